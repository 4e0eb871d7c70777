"""`CompilingStream`: a CPU stream whose chains of steps are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from opweave.contract import Arg, Call, Group, Step, pointwise_groups
from opweave.graph.opdef import OPS
from opweave_cpu.jit.compiler import FirstRun, target
from opweave_cpu.jit.supported import BLOCKS, ROWS, WRITES
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import calls_within

__all__ = ["CompilingStream"]


class CompilingStream(CpuStream):
    """Runs kernels as `CpuStream`, but chains of pointwise steps, and single ones for which NumPy makes several passes,
    as functions that are compiled when they are first run, once on a machine."""

    @property
    def lists_operands(self) -> bool:
        return False

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        if not _may_compile(steps) or not _multiplies_and_adds():
            return super()._fuse(steps)
        from opweave_cpu.jit import pointwise

        groups: list[Group] = []
        for run in pointwise_groups(steps, pointwise.fits, pointwise.MOST_STEPS):
            for chain in [run] if len(run) == 1 else _chains(run, pointwise.MOST_WORK):
                compiled = len(chain) > 1 or _is_compiled(chain[0])
                groups.append(Group(tuple(chain), 0 if compiled else self.device._workspace(chain[0])))
        return groups

    def _bind(self, group: Group) -> Call:
        step = group.steps[0]
        if len(group.steps) == 1 and not (_may_compile(group.steps) and _is_compiled(step)):
            return super()._bind(group)
        from opweave_cpu.jit import pointwise, products, rows

        if step.op in ROWS:
            return rows.bind_rows(self, step)
        if step.op == "linear":
            return products.bind_product(self, step)
        return pointwise.bind_chain(self, group.steps)

    def decode_rows(self, w: Arg, rows: slice, values: Arg) -> Call | None:
        if not _multiplies_and_adds():
            return None
        from opweave_cpu.jit import products

        return products.bind_decoding(self, w, rows, values) if products.is_decoded(w) else None

    def _warm(self, call: Call) -> None:
        for part in calls_within(call):
            if isinstance(part, FirstRun):
                part.compile()
            elif part is not call:
                self._warm(part)


def _may_compile(steps: Sequence[Step]) -> bool:
    """Whether there is anything to look at: asked first, so that nobody loads LLVM for nothing."""
    return any(_is_known(step.op) or _multiplies(step) for step in steps)


def _multiplies(step: Step) -> bool:
    """Whether it is a product that may be compiled."""
    if step.op != "linear":
        return False
    weights = step.srcs[1].dtype
    return weights.name in BLOCKS or weights.is_half or weights.name == "f32"


@cache
def _is_known(op: str) -> bool:
    known = OPS.get(op)
    return op in ROWS or op in WRITES or (known is not None and known.pointwise)


def _is_compiled(step: Step) -> bool:
    """Whether a step that `_fuse` has put into a group of its own is compiled."""
    if not _multiplies_and_adds():
        return False
    from opweave_cpu.jit import pointwise, products, rows

    if step.op in ROWS:
        return rows.fits(step)
    if step.op == "linear":
        if step.srcs[1].dtype.name in BLOCKS:
            from opweave_cpu.kernels.integer_products import unpacks_integers

            if unpacks_integers(step):
                return False
        return products.fits(step)
    return pointwise.is_worth_compiling(step) and pointwise.fits(step)


@cache
def _multiplies_and_adds() -> bool:
    """Whether the processor does both at once: elsewhere LLVM calls a function for it."""
    return not target().features.isdisjoint({"fma", "neon", "fp-armv8"})


def _chains(run: Sequence[Step], most: int) -> list[list[Step]]:
    """A run in parts of at most that much work."""
    from opweave_cpu.jit.pointwise import work_of

    chains: list[list[Step]] = [[]]
    total = 0
    for step in run:
        work = work_of(step)
        if chains[-1] and total + work > most:
            chains.append([])
            total = 0
        chains[-1].append(step)
        total += work
    return chains
