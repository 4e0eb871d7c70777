"""`CompilingStream`: a CPU stream whose chains of steps are compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

from opweave.contract import Arg, Call, Group, Single, Step, pointwise_groups
from opweave.graph.opdef import OPS
from opweave_cpu.jit.compiler import FirstRun, has_fma, recalled
from opweave_cpu.jit.supported import BLOCKS, MOST_STEPS, MOST_WORK, ROWS, WRITES
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import calls_within, in_turn
from opweave_cpu.tunables import COMPILED_ROWS

if TYPE_CHECKING:
    from opweave_cpu.jit.kinds import Kind

__all__ = ["CompilingStream"]

T = TypeVar("T")

_PRODUCTS = frozenset({"linear", "expert_linear"})
"""Products whose weights may be of a half type that a step before them converts."""


class CompilingStream(CpuStream):
    """Runs kernels as `CpuStream`, but chains of pointwise steps, and single ones for which NumPy makes several passes,
    as functions that are compiled when they are first run, once on a machine."""

    @property
    def lists_operands(self) -> bool:
        return False

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        widened = _widened(steps)
        if widened:
            done = set(map(id, widened.values()))
            steps = [step for step in steps if id(step) not in done]
        kinds = _kinds(steps)
        groups: list[Group] = []
        chained = {number for number, kind in kinds.items() if kind.chains}
        for run in pointwise_groups(steps, lambda step: id(step) in chained, MOST_STEPS.value):
            if id(run[0]) in widened:
                groups.append(Group((widened[id(run[0])], run[0])))
                continue
            for chain in [run] if len(run) == 1 else _chains(run, kinds):
                alone = self._alone(chain[0], kinds) if len(chain) == 1 else None
                workspace, kernel = (0, None) if alone is None else (alone.workspace, alone.kernel)
                groups.append(Group(tuple(chain), workspace, kernel=kernel))
        return groups

    def _single(self, step: Step) -> Single:
        return self._alone(step, _kinds([step]))

    def _alone(self, step: Step, kinds: Mapping[int, Kind]) -> Single:
        kind = kinds.get(id(step))
        chains = (kind is not None and kind.chains) or _multiplies_some_rows(step)
        if kind is not None and kind.kernel is not None:
            return Single(kind.kernel, 0, chains)
        return Single(None if step.choice is None else step.choice.kernel, self.device._workspace(step), chains)

    def _bind(self, group: Group) -> Call:
        if len(group.steps) == 1:
            kinds = {} if group.kernel is not None else _kinds(group.steps)
            found = [kind.kernel for kind in kinds.values()]
            return super()._bind(group._replace(kernel=found[0]) if found else group)
        if group.steps[-1].op in _PRODUCTS:
            return self._bind_widened(*group.steps)
        from opweave_cpu.jit.pointwise import bind_chain

        return bind_chain(self, group.steps)

    def _bind_widened(self, cast: Step, product: Step) -> Call:
        step = _of_halves(cast, product)
        if step.op == "expert_linear":
            from opweave_cpu.kernels.experts import expert_linear_of_few_rows

            call = expert_linear_of_few_rows(self, step.op, step.out, *step.srcs)
        else:
            from opweave_cpu.jit.products import prepare_product

            args = (*step.srcs, step.out)
            key = "halves", product.choice, *[(arg.dtype.name, arg.strides) for arg in args]
            call = self.artefact(key, partial(prepare_product, self, step)).bind(self, args)
        # Somebody else may read what is converted, in a group of his own: then it has memory.
        return call if cast.out.buffer is None else in_turn([self._bind(Group((cast,))), call])

    def artefact(self, key: Hashable, make: Callable[[], T]) -> T:
        return super().artefact(key, partial(recalled, key, make))

    def decode_rows(self, w: Arg, rows: slice, values: Arg) -> Call | None:
        if not has_fma():
            return None
        from opweave_cpu.jit import products

        return products.bind_decoding(self, w, rows, values) if products.is_decoded(w) else None

    def bind_rows(self, step: Step) -> Call | None:
        kinds = [kind.kernel for kind in _kinds([step]).values() if kind.kernel is not None]
        return kinds[0].bind(self, step, None) if kinds else None

    def cos_and_sin(self, angles: Arg, cos: Arg, sin: Arg) -> Call | None:
        if cos.dtype.name != "f32" or not has_fma():
            return None
        from opweave_cpu.jit.rotation import bind_cos_and_sin

        return bind_cos_and_sin(self, angles, cos, sin)

    def rotate(self, args: Sequence[Arg]) -> Call | None:
        if not has_fma():
            return None
        from opweave_cpu.jit.rotation import bind_rotation

        return bind_rotation(self, args)

    def transpose(self, out: Arg, x: Arg) -> Call | None:
        if not has_fma():
            return None
        from opweave_cpu.jit.transpose import bind_transpose

        return bind_transpose(self, out, x)

    def join(self, out: Arg, srcs: Sequence[Arg], axis: int) -> Sequence[Call] | None:
        if not has_fma():
            return None
        from opweave_cpu.jit.copies import bind_joined

        return bind_joined(self, out, srcs, axis)

    def pick(self, out: Arg, table: Arg, ids: Arg) -> Call | None:
        if not has_fma():
            return None
        from opweave_cpu.jit.copies import bind_picked

        return bind_picked(self, out, table, ids)

    def _warm(self, call: Call) -> None:
        for part in calls_within(call):
            if isinstance(part, FirstRun):
                part.compile()
            elif part is not call:
                self._warm(part)


def _widened(steps: Sequence[Step]) -> Mapping[int, Step]:
    """By ``id(step)`` of products of some rows: the step that converts its weights from a half type, if nothing else
    reads them. The product then reads them as they lie, which is half of the bytes, once."""
    casts = {
        step.out.value: step for step in steps if step.op == "cast" and not step.live and step.srcs[0].dtype.is_half
    }
    if not casts or not has_fma():
        return {}
    from opweave_cpu.jit.products import fits, fits_experts

    readers: dict[int, list[Step]] = {}
    for step in steps:
        for src in step.srcs:
            if src.value in casts:
                readers.setdefault(src.value, []).append(step)
    return {
        id(product): casts[value]
        for value, (product, *others) in readers.items()
        if not others
        and _multiplies_some_rows(product)
        and product.srcs[1].value == value
        and casts[value].out.is_dense
        and (fits if product.op == "linear" else fits_experts)(_of_halves(casts[value], product))
    }


def _of_halves(cast: Step, product: Step) -> Step:
    """The product with the weights that ``cast`` converts."""
    x, _, *others = product.srcs
    return product._replace(srcs=(x, cast.srcs[0], *others), choice=None)


def _multiplies_some_rows(step: Step) -> bool:
    """Whether the step is a product in f32 of few enough rows to read weights of a half type as they lie."""
    if step.op not in _PRODUCTS or step.srcs[1].dtype.name != "f32":
        return False
    return step.srcs[0].size <= COMPILED_ROWS.value * step.srcs[1].shape[-1]


def _kinds(steps: Sequence[Step]) -> Mapping[int, Kind]:
    """The `Kind` of each step that may be compiled, by ``id(step)``."""
    some = [step for step in steps if _is_known(step.op) or _multiplies(step)]
    if not some or not has_fma():  # asked first, so that nobody loads LLVM for nothing
        return {}
    from opweave_cpu.jit.kinds import kind_of

    return {id(step): kind_of(step) for step in some}


def _multiplies(step: Step) -> bool:
    """Whether the step is a product that may be compiled."""
    if step.op == "matmul":
        return len(step.out.shape) > 2 and step.out.dtype.name in ("f32", "f64")
    if step.op != "linear":
        return False
    weights = step.srcs[1].dtype
    return weights.name in BLOCKS or weights.is_half or weights.name == "f32"


@cache
def _is_known(op: str) -> bool:
    known = OPS.get(op)
    return op in ROWS or op in WRITES or (known is not None and known.pointwise)


def _chains(run: Sequence[Step], kinds: Mapping[int, Kind]) -> list[list[Step]]:
    """A run of steps as chains of at most `MOST_WORK`, so that none takes long to compile."""
    chains: list[list[Step]] = [[]]
    total = 0
    for step in run:
        work = kinds[id(step)].work
        if chains[-1] and total + work > MOST_WORK.value:
            chains.append([])
            total = 0
        chains[-1].append(step)
        total += work
    return chains
