"""Reductions over axes: sum, product, mean, variance, largest and smallest elements, counting."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.contract import Arg, Call, Step
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, as_dtype
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.table import FLOATS, KERNELS, PLAIN
from opweave_opencl.kernels.words import access, as_word
from opweave_opencl.layouts import Axes, coalesce, element_offset, element_strides, padded, padded_strides
from opweave_opencl.tuning import limit, processor_limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream
    from opweave_opencl.tuning import Tuning

__all__ = ["BLOCK", "accumulator", "smallest", "strips"]

I64: Final = as_dtype("i64")
F32: Final = as_dtype("f32")


class Combination(NamedTuple):
    """How two elements become one: a macro of ``combining.cl``, and the number that leaves the other one as it is."""

    macro: str
    neutral: str


# --- large reductions are computed in parts -------------------------------------------------------------------------

WANTED: Final = limit("reduced_parts", 512, 1, 1 << 14)
"""Parts that keep a device busy."""

LEAST: Final = limit("reduced_part", 1 << 14, 1, 1 << 20)
"""The fewest elements that are worth a part of their own."""

STEP: Final = 16
"""Parts begin at multiples of it, so that vectors are loaded whole."""

STRIP: Final = processor_limit("column_strip", 32, 1, 32, bounds=(1, 32))
"""The most vectors of columns that a work-item of a processor computes at once, so that it reads memory by lines."""


BLOCK: Final = limit("summed_block", 128, 1, 128, bounds=(1, 128))
"""Vectors that are combined one after another to a result of their own: the fewer they are, the smaller the errors."""


def strips(tuning: Tuning, vectors: int) -> tuple[int, int]:
    """The most vectors of columns of a work-item, and how many it takes where there are so many in all."""
    if tuning.row_group > 1:
        return 1, 1
    return STRIP.largest, max(min(vectors // tuning.wanted, STRIP.value), 1)


class Walk(NamedTuple):
    """The order in which sources are read: by outputs, by parts of each, by elements of a part.

    Attributes:
        columns: neighbouring outputs are computed at once, else neighbouring elements of one output.
        kept: the axes that are outputs, innermost first.
        shape, strides: of the reduced axes, innermost first; strides in elements, for each source.
        parts: of each output; a part has ``inner`` elements along the first reduced axis, ``outer`` along the rest.
    """

    columns: bool
    kept: Axes
    shape: Axes
    strides: tuple[Axes, ...]
    parts: int
    outer: int
    inner: int


def walk(sources: Sequence[Arg], axes: Axes) -> Walk:
    """The walk over sources of one shape that reduces ``axes``, for any device."""
    x_shape, strides = sources[0].shape, [element_strides(arg) for arg in sources]
    order = range(len(x_shape))
    reduced = _front([a for a in order if a in axes], x_shape, strides[0])
    kept = _front([a for a in order if a not in axes], x_shape, strides[0])
    shape, steps = coalesce([x_shape[a] for a in reduced[::-1]], [[own[a] for a in reduced[::-1]] for own in strides])
    columns = bool(kept) and _worth(x_shape[kept[0]], strides[0][kept[0]]) > _worth(shape[0], steps[0][0])
    outputs, n, rest = prod(x_shape[a] for a in kept), shape[0], prod(shape[1:])
    units = -(-outputs // STEP) if columns else outputs
    parts = max(min(WANTED.value // units, n * rest // LEAST.value), 1)
    if rest >= parts:
        outer, inner = -(-rest // parts), n
    else:
        share = -(-n * rest // parts)
        outer, inner = 1, min(-(-share // STEP) * STEP, n)
    return Walk(columns, kept, shape, tuple(steps), -(-rest // outer) * -(-n // inner), outer, inner)


def _front(axes: list[int], shape: Axes, strides: Axes) -> Axes:
    """The axes, innermost first, but before all others the one that is best walked by vectors."""
    inward = axes[::-1]
    if inward:
        best = max(inward, key=lambda axis: _worth(shape[axis], strides[axis]))
        inward.remove(best)
        inward.insert(0, best)
    return tuple(inward)


def _worth(length: int, step: int) -> int:
    return min(length, 4 * STEP) * (4 if step in (0, 1) else 1)


# --- kernels --------------------------------------------------------------------------------------------------------


def accumulator(dtype: DType) -> DType:
    """The type in which elements of a type add up."""
    return F32 if dtype.is_half else dtype


_LIMITS: Final = {
    "i64": ("LONG_MIN", "LONG_MAX"),
    "i32": ("INT_MIN", "INT_MAX"),
    "i16": ("SHRT_MIN", "SHRT_MAX"),
    "i8": ("SCHAR_MIN", "SCHAR_MAX"),
    "u8": ("0", "UCHAR_MAX"),
    "bool": ("0", "1"),
}


def smallest(dtype: DType) -> str:
    """The smallest number of a type."""
    return "-INFINITY" if dtype.is_float else _LIMITS[dtype.name][0]


def _combination(op: str, dtype: DType) -> Combination:
    if op == "max":
        return Combination("LARGER", smallest(dtype))
    if op == "min":
        return Combination("SMALLER", "INFINITY" if dtype.is_float else _LIMITS[dtype.name][1])
    return Combination("PRODUCT", "1") if op == "prod" else Combination("SUM", "0")


def _partials(step: Step) -> Arrays:
    """The result of each part of each output, where there are several parts."""
    x = step.srcs[0]
    acc = I64 if step.op == "count_equal" else accumulator(x.dtype)
    parts = walk(step.srcs, step.attrs.get("axes", tuple(range(len(x.shape))))).parts
    return {"partials": (acc, (*step.out.shape, parts))} if parts > 1 else {}


def _means_and_partials(step: Step) -> Arrays:
    return {"means": (accumulator(step.srcs[0].dtype), step.out.shape), **_partials(step)}


@KERNELS("sum", "prod", dtypes=f"{FLOATS} i64", workspace=_partials)
@KERNELS("mean", dtypes=FLOATS, workspace=_partials)
@KERNELS("max", "min", dtypes=PLAIN, workspace=_partials)
def reduce(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, axes: Axes, partials: Arg | None = None) -> Call:
    acc = accumulator(x.dtype)
    scale = out.size / x.size if op == "mean" else None
    return in_order(_calls(stream, _combination(op, acc), acc, out, x, axes, partials, scale=scale))


@KERNELS("var", dtypes=FLOATS, workspace=_means_and_partials)
def variance(
    stream: OpenCLStream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    axes: Axes,
    correction: float,
    means: Arg,
    partials: Arg | None = None,
) -> Call:
    """The means, then the squares of the differences from them."""
    acc, n = means.dtype, x.size // out.size
    add = _combination("sum", acc)
    calls = _calls(stream, add, acc, means, x, axes, partials, scale=1 / n)
    degrees = max(n - correction, 0.0)
    return in_order(
        calls + _calls(stream, add, acc, out, x, axes, partials, scale=1 / degrees if degrees else inf, center=means)
    )


@KERNELS("count_equal", dtypes=PLAIN, workspace=_partials)
def count_equal(stream: OpenCLStream, op: str, out: Arg, a: Arg, b: Arg, *, partials: Arg | None = None) -> Call:
    axes = tuple(range(len(a.shape)))
    return in_order(_calls(stream, _combination("sum", I64), I64, out, a, axes, partials, equal=b))


def _calls(
    stream: OpenCLStream,
    combination: Combination,
    acc: DType,
    out: Arg,
    x: Arg,
    axes: Axes,
    partials: Arg | None,
    *,
    scale: float | None = None,
    center: Arg | None = None,
    equal: Arg | None = None,
) -> list[Call]:
    """One call, or one that fills ``partials`` and one that combines them."""
    by_part = walk((x,) if equal is None else (x, equal), axes)
    if partials is None:
        return [_call(stream, combination, acc, out, x, by_part, scale=scale, center=center, equal=equal)]
    first_parts = Arg(partials.buffer, partials.offset, acc, out.shape, partials.strides[:-1])
    whole = walk((partials,), (len(out.shape),))._replace(parts=1, inner=by_part.parts)
    return [
        _call(stream, combination, acc, first_parts, x, by_part, center=center, equal=equal),
        _call(stream, combination, acc, out, partials, whole, scale=scale),
    ]


def _call(
    stream: OpenCLStream,
    combination: Combination,
    acc: DType,
    out: Arg,
    x: Arg,
    walk: Walk,
    *,
    scale: float | None = None,
    center: Arg | None = None,
    equal: Arg | None = None,
) -> Call:
    other = center or equal
    rank = len(x.shape)  # axes of outputs are numbered as the source's
    no_strides = (0,) * rank
    strides = (
        _spread(out, walk.kept, rank),
        element_strides(x),
        no_strides if center is None else _spread(center, walk.kept, rank),
    )
    outward = walk.kept[::-1]
    kept, kept_strides = coalesce([x.shape[a] for a in outward], [[own[a] for a in outward] for own in strides])
    operands = (out, x) if other is None else (out, x, other)
    words = [len(kept), *padded(kept, 1), len(walk.shape), *padded(walk.shape, 1), prod(walk.shape[1:])]
    words += [walk.parts, walk.outer, walk.inner]
    words += padded([element_offset(arg) for arg in operands], 0, 3)
    words += padded_strides((*kept_strides, walk.strides[0], walk.strides[-1]))
    tuning = stream.target.tuning
    group, parts = tuning.row_group, out.size * walk.parts
    vectors, rest = -(-kept[0] // tuning.vector), prod(kept[1:]) * walk.parts
    most, strip = strips(tuning, vectors * rest)
    words += [parts, strip, as_word(scale or 0.0, acc)]
    macros: dict[str, Any] = {
        "A": x.dtype.name, "ACC": acc.name, "OUT": out.dtype.name, "ACCESSES": access(x.dtype, acc, out.dtype),
        "COMBINE": combination.macro, "START": combination.neutral, "SCALED": int(scale is not None),
        "CENTERED": int(center is not None), "EQUAL": int(equal is not None), "COLUMNS": int(walk.columns),
        "VEC": tuning.vector, "STRIP": most, "BLOCK": BLOCK.value,
    }  # fmt: skip
    macros |= stream.target.sharing()
    program = stream.target.programs.get("reduction", {name: str(value) for name, value in macros.items()})
    if walk.columns:
        return stream.launch(program, "columns", (-(-vectors // strip), rest), (group, 1), operands, words)
    return stream.launch(program, "rows", (min(parts, tuning.most_groups) * group,), (group,), operands, words)


def _spread(arg: Arg, kept: Axes, rank: int) -> Axes:
    """Strides of an operand without the reduced axes, along all axes of the source."""
    own = iter(element_strides(arg))
    return tuple([next(own) if axis in kept else 0 for axis in range(rank)])
