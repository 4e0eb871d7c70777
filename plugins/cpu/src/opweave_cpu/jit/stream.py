"""`CompilingStream`: a CPU stream whose chains of steps are compiled."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Final, TypeGuard, TypeVar

from opweave.contract import Arg, Call, Group, Single, Step, pointwise_groups
from opweave.graph.layout import dense_strides
from opweave.graph.opdef import OPS
from opweave_cpu.jit.compiler import FirstRun, has_fma, recall
from opweave_cpu.jit.supported import BLOCKS, MOST_STEPS, MOST_WORK, ROWS, WRITES
from opweave_cpu.kernels.attention import attention_of_few_queries
from opweave_cpu.kernels.experts import compiled_expert_linear
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.stream import CpuStream
from opweave_cpu.tiles import Array, calls_within, in_turn
from opweave_cpu.tunables import COMPILED_ROWS

if TYPE_CHECKING:
    from opweave.contract.kernels import Kernel
    from opweave_cpu.jit.kinds import Kind
    from opweave_cpu.jit.sequence import KernelSequence

__all__ = ["CompilingStream"]

T = TypeVar("T")

_READERS: Final[Mapping[str, tuple[int, ...]]] = {"linear": (1,), "expert_linear": (1,), "attention": (1, 2)}
"""Operations, and which of their sources they can read as a step before them finds them, which makes them f32."""

_MAKERS: Final = frozenset({"cast", "dequantize"})
"""Operations that make f32 of what is stored in another type."""

_GATHERS: Final = frozenset({"embedding"})
"""Operations that put blocks of keys or values side by side, which attention finds by their block table."""


class CompilingStream(CpuStream):
    """Runs kernels as `CpuStream`, but chains of pointwise steps, and single ones for which NumPy makes several passes,
    as functions that are compiled when they are first run, once on a machine."""

    @property
    def lists_operands(self) -> bool:
        return False

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        stored = _stored(steps)
        if stored:
            done = {id(before) for found, _ in stored.values() for before in found}
            steps = [step for step in steps if id(step) not in done]
        kinds = _kinds(steps)
        groups: list[Group] = []
        chained = {number for number, kind in kinds.items() if kind.chains}
        for run in pointwise_groups(steps, lambda step: id(step) in chained, MOST_STEPS.value):
            if id(run[0]) in stored:
                before, read = stored[id(run[0])]
                workspace = max(_scratch_bytes(read), *map(self.device._workspace, before))
                groups.append(Group((*before, run[0]), workspace))
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
        chains = (kind is not None and kind.chains) or step.op == "dequantize" or _gathers(step)
        follows = _followed(step) if _may_read(step) else frozenset()
        if kind is not None and kind.kernel is not None:
            return Single(kind.kernel, 0, chains, follows)
        kernel = None if step.choice is None else step.choice.kernel
        return Single(kernel, self.device._workspace(step), chains, follows)

    def _bind(self, group: Group) -> Call:
        if len(group.steps) == 1:
            kinds = {} if group.kernel is not None else _kinds(group.steps)
            found = [kind.kernel for kind in kinds.values()]
            return super()._bind(group._replace(kernel=found[0]) if found else group)
        if group.steps[-1].op in _READERS:
            return self._bind_stored(group)
        from opweave_cpu.jit.pointwise import bind_chain

        return bind_chain(self, group.steps)

    def _bind_stored(self, group: Group) -> Call:
        *before, last = group.steps
        step = _as_stored(last, before)
        assert step is not None
        if step.op == "linear":
            from opweave_cpu.jit.products import prepare_product

            args = (*step.srcs, step.out)
            key = "stored", last.choice, *[(arg.dtype.name, arg.strides) for arg in args]
            call = self.artefact(key, partial(prepare_product, self, step)).bind(self, args)
        else:
            call = _kernel(step.op).bind(self, step, group.scratch)
        # Somebody else may read what is made, in a group of his own: then it has memory, and is made too.
        others = [self._bind(Group((x,), scratch=group.scratch)) for x in before if x.out.buffer is not None]
        return in_turn([*others, call]) if others else call

    def artefact(self, key: Hashable, make: Callable[[], T]) -> T:
        return super().artefact(key, partial(recall, key, make))

    def decode_rows(self, w: Arg, rows: slice, values: Arg) -> Call | None:
        if not has_fma():
            return None
        from opweave_cpu.jit import products

        return products.bind_decoding(self, w, rows, values) if products.is_decoded(w) else None

    def bind_rows(self, step: Step) -> Call | None:
        kinds = [kind.kernel for kind in _kinds([step]).values() if kind.kernel is not None]
        return kinds[0].bind(self, step, None) if kinds else None

    def cos_and_sin(self, positions: Arg, steps: Sequence[float], magnitude: float, cos: Arg, sin: Arg) -> Call | None:
        if cos.dtype.name != "f32" or not has_fma():
            return None
        from opweave_cpu.jit.rotation import bind_cos_and_sin

        return bind_cos_and_sin(self, positions, steps, magnitude, cos, sin)

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

    def multiply(self, parts: Sequence[tuple[Array, Array, Array]]) -> Call | None:
        if not _is_compiling() or parts[0][2].ndim != 2:
            return None
        from opweave_cpu.jit.gemm import bind_gemm

        return bind_gemm(parts)

    def put(self, out: Arg, ids: Arg, rows: Arg) -> Call | None:
        if not _is_compiling():
            return None
        from opweave_cpu.jit.copies import bind_put

        return bind_put(self, out, ids, rows)

    def _merge(self, calls: Sequence[Call]) -> Sequence[tuple[Call, int]]:
        if not _is_compiling():
            return super()._merge(calls)
        from opweave_cpu.jit.sequence import merge

        return merge(calls)

    def _warm(self, call: Call) -> None:
        for part in calls_within(call):
            if isinstance(part, FirstRun):
                part.compile()
            elif _is_merged(part):
                with self._in_pool():
                    part.warm()
            elif part is not call:
                self._warm(part)


def _is_compiling() -> bool:
    """Whether anything was compiled yet: what saves time only between other compiled calls loads LLVM for nobody."""
    return "opweave_cpu.jit.walk" in sys.modules


def _is_merged(call: Call) -> TypeGuard[KernelSequence]:
    if not _is_compiling():
        return False
    from opweave_cpu.jit.sequence import KernelSequence

    return isinstance(call, KernelSequence)


def _stored(steps: Sequence[Step]) -> Mapping[int, tuple[Sequence[Step], Step]]:
    """By ``id(step)`` of products of some rows and attention of few queries: the steps that convert, decode, or gather
    sources which nothing else reads, and the step as it reads what these read, as it lies: fewer bytes, and once."""
    if not any(map(_makes, steps)):
        return {}
    makers: dict[int, Step] = {}
    found: dict[int, tuple[Sequence[Step], Step]] = {}
    reads = Counter(src.value for step in steps for src in step.srcs)
    for step in steps:
        # What is written anew behind a step is not what that step has read.
        makers = {
            value: maker for value, maker in makers.items() if all(src.value != step.out.value for src in maker.srcs)
        }
        if _makes(step):
            makers[step.out.value] = step
        elif makers and _may_read(step):
            alone = {value: maker for value, maker in makers.items() if reads[value] == 1}
            for gathered in (_GATHERS, frozenset[str]()):
                before = _before(step, alone, gathered)
                read = _as_stored(step, before) if before and has_fma() else None
                if read is not None and _reads(read):
                    found[id(step)] = before, read
                    break
    return found


def _before(step: Step, makers: Mapping[int, Step], gathered: frozenset[str]) -> Sequence[Step]:
    """The steps among ``makers`` that make what ``step`` may read as it is stored, in their order."""
    found: list[Step] = []
    for at in _READERS[step.op]:
        value = step.srcs[at].value
        for ops in (_MAKERS, gathered):
            if value in makers and makers[value].op in ops:
                found.insert(0, makers[value])
                value = makers[value].srcs[0].value
    return found


def _makes(step: Step) -> bool:
    """Whether the step makes f32 of a half type, or of blocks, or gathers blocks, which nobody else needs."""
    if step.live or _gathers(step):
        return not step.live
    if step.op not in _MAKERS or step.out.dtype.name != "f32" or not step.out.is_dense:
        return False
    return step.op == "dequantize" or step.srcs[0].dtype.is_half


def _gathers(step: Step) -> bool:
    """Whether the step gathers blocks of keys or values: (blocks, keys of a block, groups, size), by a block table."""
    return step.op in _GATHERS and [len(src.shape) for src in step.srcs] == [4, 2]


def _followed(step: Step) -> frozenset[str]:
    """The operations whose sources a step may read: attention those of gathers, all those of conversions to f32."""
    gathered = _GATHERS if step.op == "attention" else frozenset[str]()
    return gathered | _MAKERS if step.srcs[1].dtype.name == "f32" else gathered


def _as_stored(step: Step, before: Sequence[Step]) -> Step | None:
    """The step with what all of the steps before it read in the place of what they make; ``None`` where it cannot
    be. Attention is given the block table, and how many keys a sequence has, as attributes."""
    srcs, attrs, tables, used = list(step.srcs), step.attrs, list[Arg](), 0
    for at in _READERS[step.op]:
        for maker in reversed(before):
            if maker.op in _GATHERS:
                pool = _pool(maker, srcs[at])
                tables += [maker.srcs[1]] * (pool is not None)
            else:
                pool = maker.srcs[0] if _is_same(maker.out, srcs[at]) else None
            if pool is not None:
                srcs[at], used = pool, used + 1
    if used < len(before):
        return None
    if tables:
        k, v = srcs[1], srcs[2]
        apart = k.strides[0] * v.strides[2] == v.strides[0] * k.strides[2]
        if len(tables) < 2 or tables[0] != tables[1] or k.shape[2] != v.shape[2] or not apart:
            return None
        attrs = {**attrs, "table": tables[0], "keys": step.srcs[1].shape[2]}
    return step._replace(srcs=tuple(srcs), attrs=attrs, choice=None)


def _pool(gather: Step, src: Arg) -> Arg | None:
    """The blocks that a step gathers, as (blocks, groups, keys of a block, size), where attention reads of them, as
    ``src``, all groups of the first keys of each sequence; else ``None``."""
    (blocks, ids), out = gather.srcs, gather.out
    count, room, groups, size = blocks.shape
    n, keys = ids.shape[0], ids.shape[1] * room
    batch, key, group, element = dense_strides((n, keys, groups, size), out.dtype)
    strides = batch, group, key, element
    if not _begins_as(out, src) or src.shape != (n, groups, min(keys, src.shape[2]), size):
        return None
    if any(a != b for a, b, length in zip(src.strides, strides, src.shape, strict=True) if length > 1):
        return None
    apart, key, group, element = blocks.strides
    if ids.dtype.name != "i64" or not key or apart % key:
        return None
    return Arg(
        blocks.buffer, blocks.offset, blocks.dtype, (count, groups, room, size), (apart, group, key, element),
        blocks.handle, blocks.value, blocks.buffer_type,
    )  # fmt: skip


def _begins_as(a: Arg, b: Arg) -> bool:
    return a.buffer is b.buffer and a.offset == b.offset and (a.buffer is not None or a.value == b.value)


def _is_same(a: Arg, b: Arg) -> bool:
    return _begins_as(a, b) and a.shape == b.shape and a.strides == b.strides


def _may_read(step: Step) -> bool:
    """Whether the step may be one of those that read sources as they are stored: with few rows if not of experts, and
    of weights f32."""
    if step.op not in _READERS:
        return False
    if step.op == "attention":
        return step.srcs[0].shape[2] <= COMPILED_ROWS.value
    few = step.op == "expert_linear" or step.srcs[0].size <= COMPILED_ROWS.value * step.srcs[1].shape[-1]
    return step.srcs[1].dtype.name == "f32" and few


def _reads(step: Step) -> bool:
    """Whether the step can be computed of sources as they are stored."""
    if step.op == "linear":
        from opweave_cpu.jit.products import fits

        return fits(step)
    when = _kernel(step.op).when
    return when is not None and when(step) is None


@cache
def _kernel(op: str) -> Kernel:
    """The kernel that reads sources of an operation as they are stored, of more types than a graph can ask it for."""
    factories = attention_of_few_queries, compiled_expert_linear
    return next(kernel for kernel in KERNELS.candidates(op) if kernel.factory in factories)


def _scratch_bytes(step: Step) -> int:
    return 0 if step.op == "linear" else _kernel(step.op).scratch(step).size


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
