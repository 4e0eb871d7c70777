"""`phases`: the products of a split apart from the steps between them, so that programs share their sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opweave.contract import Step
from opweave.graph.opdef import OPS

if TYPE_CHECKING:
    from opweave.contract import Device

__all__ = ["phases"]


def phases(device: Device, steps: Sequence[Step], repack: float) -> list[tuple[int, Step]]:
    """The steps with the numbers of their phases, in the order of these, which keeps all reads and writes of each value
    in sequence.

    ONNX Runtime packs weights into each session, and programs for one token, whose attention is written in another way
    than that for several, have sessions of their own. Where two copies of the packed weights take at most ``repack``
    bytes, all steps are one phase. Else a phase has either products with weights and what is computed of their rows,
    which is alike for any number of rows and therefore one session for all programs, or all other steps; the last
    product, of which programs may compute fewer rows, is a phase by itself.
    """
    written = {step.out.value for step in steps}
    casts = {s.out.value: i for i, s in enumerate(steps) if s.op == "cast" and s.srcs[0].value not in written}
    products = [s for s in steps if s.op == "linear" and (s.srcs[1].value in casts or s.srcs[1].value not in written)]
    if not products or 2 * sum({s.srcs[1].value: device.packed_bytes(s, 1) for s in products}.values()) <= repack:
        return [(0, step) for step in steps]
    rows = {step.out.shape[:-1] for step in products}
    own = {id(step) for step in products}
    write: dict[int, int] = {}
    access: dict[int, int] = {}
    found: list[int] = []
    last = 0
    for step in steps:
        phase = max([write.get(arg.value, 0) for arg in step.srcs] + [access.get(step.out.value, 0)])
        if step is products[-1]:
            phase = last + 1 + last % 2
        elif phase % 2 != (id(step) in own or (step.out.shape[:-1] in rows and _is_of_rows(step))):
            phase += 1
        write[step.out.value] = max(phase, write.get(step.out.value, 0))
        for arg in (step.out, *step.srcs):
            access[arg.value] = max(phase, access.get(arg.value, 0))
        last = max(last, phase)
        found.append(phase)
    for value, at in casts.items():  # where it is first read
        reads = [n for n, s in zip(found, steps, strict=True) if value in [a.value for a in s.srcs]]
        found[at] = min(reads, default=found[at])
    end = steps.index(products[-1])
    before = next((i for i, s in enumerate(steps) if s.out.value == steps[end].srcs[0].value), end)
    read = [s for s in steps if steps[before].out.value in [a.value for a in s.srcs]]
    later = {s.out.value for s in steps[before + 1 :]}
    if len(read) == 1 and later.isdisjoint(a.value for a in (steps[before].out, *steps[before].srcs)):
        found[before] = found[end]  # as a norm before the output, whether rows are chosen before it or not
    return sorted(zip(found, steps, strict=True), key=lambda each: each[0])


def _is_of_rows(step: Step) -> bool:
    """Whether rows of its result are computed of rows of its operands, in memory that is laid out as theirs is."""
    op = OPS.get(step.op)
    return op is not None and op.family in ("activation", "elementwise", "gated", "normalization") and op.name != "cast"
