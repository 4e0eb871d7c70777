"""`Support`: what a device says of a signature, and the questions that it is asked for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from opweave.contract.step import Arg, Step
from opweave.graph.dtypes import bf16
from opweave.graph.layout import dense_strides, is_dense
from opweave.graph.precision import is_within

if TYPE_CHECKING:
    from opweave.contract.step import Choice
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Signature, Window
    from opweave.runtime.device import Device
    from opweave.runtime.memory import BufferType

__all__ = ["Support", "ask", "ask_repacked", "has_dense_sources", "packing_support", "unbound_step"]

_NONE: Final[Mapping[int, Any]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Support:
    """What a device says of a signature, asked once.

    Attributes:
        reason: why it does not run the node, ``None``: it does.
        packed: it runs the node only with its non-dense sources packed.
        unpacked: kinds of memory in a form of their own whose tensors it reads through copies in plain memory.
        inplace: the output may be the same memory as a source.
        workspace: bytes of scratch memory while it runs.
        choice: the kernel that computes it, and its scratch memory.
        nbytes: bytes of the result.
        allowed: the precision that the program allows for the node.
        precision: the one that it is computed in.
        rounded: positions of read-only sources that it is given in bf16, rounded once.
        repacked: positions of read-only sources of which it is given a copy in special memory, made once -> that kind.
        seconds: what a step took inside a program, where `opweave_cost.tune` has measured it; predictions then use it.
    """

    reason: str | None
    packed: bool = False
    inplace: bool = False
    workspace: int = 0
    choice: Choice | None = None
    unpacked: frozenset[BufferType] = frozenset()
    nbytes: int = 0
    allowed: Precision = "exact"
    precision: Precision = "exact"
    rounded: frozenset[int] = frozenset()
    repacked: Mapping[int, BufferType] = field(default_factory=lambda: _NONE)
    seconds: float | None = None


AS_IT_IS: Final = Support(None)
"""Every source is read as and where it lies."""


def unbound_step(signature: Signature, device: Device, form: Support = AS_IT_IS) -> Step:
    """The step that ``device`` is asked about: no memory yet, every source as and where it would lie there.

    Args:
        form: which sources would be ``packed`` or come as copies in ordinary memory (``unpacked``, and those in special
            memory that the device does not reach), in bf16 (``rounded``) or in special memory (``repacked``).
    """
    own = 1 if signature.op.writes else 0  # the region that is written is no source
    srcs = signature.srcs[own:]
    if form.rounded:
        srcs = tuple([_rounded(window) if i in form.rounded else window for i, window in enumerate(srcs)])
    memories = [
        m if m is not None and m not in form.unpacked and device.reaches(m.space) else None
        for m in signature.memories[own:]
    ]
    if form.repacked:
        memories = [form.repacked.get(i, m) for i, (_, m) in enumerate(zip_longest(srcs, memories))]
    args = [
        Arg(None, 0, dtype, shape, dense_strides(shape, dtype) if form.packed else strides, None, i + 1, memory)
        for i, ((dtype, shape, strides), memory) in enumerate(zip_longest(srcs, memories))
    ]
    out = Arg(None, 0, *signature.out, None, 0)
    return Step(signature.op.name, out, tuple(args), signature.attrs, precision=signature.precision)


def _rounded(window: Window) -> Window:
    """The window of the same elements of a leaf in bf16."""
    dtype, shape, strides = window
    return bf16, shape, tuple([s // dtype.itemsize * bf16.itemsize for s in strides])


def packing_support(device: Device, dtype: DType, shape: Shape, strides: Strides) -> Support | None:
    """How ``device`` makes a dense copy of a window in its memory; ``None``: it has no kernel for that."""
    out = Arg(None, 0, dtype, shape, dense_strides(shape, dtype), None, 0)
    step = Step("contiguous", out, (Arg(None, 0, dtype, shape, strides, None, 1),), {})
    if device.why_not(step) is not None:
        return None
    return Support(None, workspace=device._workspace(step), choice=device.kernels.choice(step))


def has_dense_sources(signature: Signature) -> bool:
    """Whether packing changes nothing."""
    return all(is_dense(shape, strides, dtype) for dtype, shape, strides in signature.srcs)


def ask(device: Device, signature: Signature) -> Support:
    """What a device says of a signature: with its sources as they lie if it runs that, rounded to bf16 if it computes
    in that anyway, else through copies of sources in memory of which it reads no tensors."""
    if 0 in signature.out[1]:
        return Support(None)  # there is nothing to compute
    answer = _ask_as(device, signature, AS_IT_IS)
    if answer.precision == "bf16" and signature.constant:
        rounded = _ask_as(device, signature, Support(None, rounded=signature.constant))
        if rounded.reason is None and rounded.precision == "bf16":
            answer = rounded
    if answer.reason is None:
        return ask_repacked(device, signature, answer) if device in signature.repacking else answer
    kinds = frozenset(m for m in signature.memories if m is not None and not m.is_raw and device.reaches(m.space))
    if not kinds:
        return answer
    # Each kind of memory that is refused by itself is read through a copy, or else all of them are.
    refused = [k for k in kinds if _ask_as(device, signature, Support(None, unpacked=kinds - {k})).reason is not None]
    for unpacked in dict.fromkeys((frozenset(refused) or kinds, kinds)):
        copied = _ask_as(device, signature, Support(None, unpacked=unpacked))
        if copied.reason is None:
            return copied
    return answer


def ask_repacked(device: Device, signature: Signature, answer: Support) -> Support:
    """The answer with read-only sources in the special memory that the device would rather read, if it has some:
    rounded to bf16 where that is allowed and the kernel then computes in it, else as they are. It is not computed
    more finely than before, because the rougher kernel is there for speed."""
    rough = signature.precision != "exact" and bool(signature.constant)
    for rounded in dict.fromkeys((signature.constant if rough else answer.rounded, answer.rounded)):
        kinds = device.repacks(unbound_step(signature, device, replace(answer, rounded=rounded)), signature.whole)
        form = Support(None, rounded=rounded, repacked=kinds)
        found = _ask_as(device, signature, form) if kinds else answer
        fits = found.precision == "bf16" or not rounded
        if kinds and found.reason is None and fits and is_within(answer.precision, found.precision):
            return found
    return answer


def _ask_as(device: Device, signature: Signature, form: Support) -> Support:
    """What a device says of a signature whose sources come in a form; packed, too, where it runs only that."""
    step = unbound_step(signature, device, form)
    reason = device.why_not(step)
    if reason is not None:
        form = replace(form, packed=not has_dense_sources(signature))
        step = unbound_step(signature, device, form)
        if not form.packed or device.why_not(step) is not None:
            return Support(reason)
    try:
        workspace, choice = device._workspace(step), device.kernels.choice(step)
        precision = device.precision(step)
    except Exception as error:  # counts as a refusal: another device may run it
        return Support(f"its workspace or precision failed: {type(error).__name__}: {error}")
    return replace(
        form, inplace=device.inplace(step), workspace=workspace, choice=choice, nbytes=step.out.nbytes,
        allowed=signature.precision, precision=precision,
    )  # fmt: skip
