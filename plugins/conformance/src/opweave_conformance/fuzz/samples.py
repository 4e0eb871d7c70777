"""Values of the tensors of a graph by the references, with errors that are tracked through it.

Each tensor is computed several times. The first time by the references alone. In the others every node's result is
moved by as much as a device may be wrong at that node (`opweave_conformance.tolerances`), up, down, or at random for
each element, and what it computes with by a few units in the last place. The spread of these samples is how far a
correct device may be from the reference at the end, through whatever lies between: this is stochastic arithmetic
(Vignes, "Discrete stochastic arithmetic for validating results of numerical software", 2004). Where a choice depends
on values that lie close together (a maximum's index, a rounding), samples choose differently, and no value is asked
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Final

import numpy as np

from opweave.graph.dtypes import DType, f16, f32, f64
from opweave.graph.layout import array_shape
from opweave.graph.precision import Precision
from opweave.graph.tensor import Tensor
from opweave_conformance.tolerances import limits
from opweave_conformance.values import UNDEFINED

__all__ = ["COUNT", "FACTOR", "Samples", "differences", "evaluate"]

Array = np.ndarray[Any, Any]
Samples = list[Array]
"""The values of a tensor; the first is the reference's. None: what a device computes there is not defined."""

NARROWING: Final = frozenset({"cast", "quantize"})
"""Operations whose results are defined for numbers that their type holds."""

COUNT: Final = 5
"""Samples of a tensor; more are made where a device seems wrong."""

FACTOR: Final = 4.0
"""A device may be so many times as far from the reference as the farthest sample."""

SATURATING: Final = frozenset({
    "sigmoid", "silu", "silu_backward", "gelu", "gelu_quick", "gelu_tanh", "gelu_tanh_backward", "geglu", "swiglu",
    "swiglu_oai",
})  # fmt: skip
"""Operations by a sigmoid, or by the normal distribution, which are 0 in some libraries (ONNX Runtime's sigmoid below
-18, in f64 below -37; PyTorch's gelu below -6 and -9) where they are less than the last place of their largest values,
2**-25 and 2**-54; of products with them, that times the sources."""

REORDERED: Final = frozenset({"group_norm", "linear_attention"})
"""Operations that libraries compute in another order, in which an infinity meets another one, or 0."""

LARGE: Final = 1e12
"""Beyond this, results without a sure digit need not be finite."""

_ULPS: Final = {f32: 2.0**-19, f64: 2.0**-48}
"""How far sources are moved, relative to themselves: 16 units in the last place."""


def evaluate(
    nodes: Iterable[Tensor],
    known: dict[Tensor, Samples],
    rng: np.random.Generator,
    precisions: Mapping[Tensor, Precision],
    count: int = COUNT,
) -> None:
    """Add the samples of ``nodes``, sources first, to ``known``, which has those of their leaves.

    What is computed exactly from exact values has only one sample. Every version of a state is a value of its own, so
    that no order can go wrong. Raises what references raise.
    """
    for tensor in nodes:
        if tensor not in known:
            if not _defined(tensor, known):
                known[tensor] = []
                continue
            limit = limits(tensor, precisions.get(tensor, "exact")).error if tensor.dtype.is_float else 0.0
            exact = not limit and all(len(known[s.root]) == 1 for s in tensor.srcs)
            known[tensor] = [_value(tensor, known, i, rng, limit) for i in range(1 if exact else count)]


def _defined(tensor: Tensor, known: Mapping[Tensor, Samples]) -> bool:
    """Whether all devices have to compute the same: not of values that the operation leaves undefined."""
    op = tensor.op
    assert op is not None
    if any(not known[s.root] for s in tensor.srcs):
        return False
    if op.is_view:
        return True
    if tensor.attrs.get("stable") is False and _has_ties(known[tensor.srcs[0].root]):
        return False  # equal elements in any order
    narrow = op.name in NARROWING and not tensor.dtype.is_float
    finite = tensor.srcs if narrow or not op.nan or op.name in UNDEFINED | REORDERED else ()
    if _is_padded(tensor):
        finite = tensor.srcs[1:2]
    for source in finite:
        for sample in known[source.root] if source.dtype.is_float else ():
            with np.errstate(all="ignore"):
                wide = sample.astype(np.float64)
            if not np.isfinite(wide).all() or (narrow and not _held(wide, tensor.dtype)):
                return False
    return True


def _is_padded(tensor: Tensor) -> bool:
    """Whether it is a convolution with padding: where a weight that is no finite number meets that, its product with 0
    is NaN, or left out."""
    assert tensor.op is not None
    if tensor.op.name == "causal_conv1d":
        return not tensor.srcs[2 + tensor.attrs["biased"] :]  # without what lies before
    return tensor.op.name in ("conv1d", "conv2d", "conv3d") and any(map(any, tensor.attrs["padding"]))


def _has_ties(samples: Samples) -> bool:
    return any(np.unique(sample).size < sample.size for sample in samples)


def _held(values: Array, dtype: DType) -> bool:
    """Whether an integer type holds such numbers; quantized types have f16 scales."""
    if dtype.kind == "b" or not values.size:
        return True
    low, high = (-60000.0, 60000.0) if dtype.is_quantized else (-(2.0**62), 2.0**62)
    if dtype.is_integer:
        info = np.iinfo(dtype.numpy)
        low, high = max(float(info.min), low), min(float(info.max), high)
    return bool(low <= values.min() and values.max() <= high)


def _of(known: Mapping[Tensor, Samples], tensor: Tensor, i: int) -> Array:
    samples = known[tensor]
    return samples[i % len(samples)]


def _value(tensor: Tensor, known: Mapping[Tensor, Samples], i: int, rng: np.random.Generator, limit: float) -> Array:
    op = tensor.op
    assert op is not None
    if not tensor.size:
        return np.empty(array_shape(tensor.shape, tensor.dtype), tensor.dtype.numpy)
    if tensor.is_view:
        return _window(tensor, _of(known, tensor.root, i))
    arrays = [_of(known, s, i) if s in known else _window(s, _of(known, s.root, i)) for s in tensor.srcs]
    if i and limit:
        first = 1 if op.writes else 0
        arrays[first:] = [_moved_source(a, s, rng) for a, s in zip(arrays[first:], tensor.srcs[first:], strict=True)]
    with np.errstate(all="ignore"):
        if op.writes:
            target = tensor.srcs[0]
            whole = np.array(_of(known, target.root, i), order="C", copy=True)
            region = _window(target, whole, copy=False)
            op.reference(region, *arrays[1:], **tensor.attrs)
            if i and limit:
                region[...] = _moved(region, limit, 0.0, i, rng)
            return whole
        value = np.empty(array_shape(tensor.shape, tensor.dtype), tensor.dtype.numpy)
        np.copyto(value, op.reference(*arrays, **tensor.attrs), casting="unsafe")
        if not i or not limit:
            return value
        if not op.pointwise and all(np.isfinite(a).all() for a in arrays if a.dtype.kind not in "iub"):
            # A sum of finite numbers that is beyond the largest one: a device may have been there on the way, and got
            # NaN from the rest of the sum. What is finite in some samples is not asked for.
            value[np.isinf(value)] = 0
        return _moved(value, limit, _hidden(tensor, arrays), i, rng)


def _hidden(tensor: Tensor, arrays: list[Array]) -> Any:
    """Errors that moving sources and results does not show: of large terms within the operation that cancel."""
    op = tensor.op
    assert op is not None
    if op.name in SATURATING:
        last_place = 2.0**-54 if tensor.dtype is f64 else 2.0**-25
        factors = [1 + np.abs(array.astype(np.float64)) for array in arrays if op.name != "sigmoid"]
        return last_place * prod(factors, start=np.float64(1))
    if op.name == "prod":
        # Products that become ever smaller end at the least number that rounds to itself, not at 0. Where the factors
        # above 1 alone leave the range, the order of all decides what a device finds.
        sizes = np.abs(arrays[0].astype(np.float64))
        growth = np.log2(sizes, where=sizes > 1, out=np.zeros_like(sizes)).sum(tuple(tensor.attrs["axes"]))
        most = {f64: 1023, f16: 15}.get(tensor.dtype, 127)
        return np.where(growth.reshape(tensor.shape) > most, np.inf, _tiny(tensor.dtype.numpy))
    if op.name == "attention_backward":
        # What a weight gains is its part of grad · vᵀ less their mean, which differ by their rounding where it is 1.
        grad, q, k, v = [array.astype(np.float64) for array in arrays[:4]]
        eps = 2.0**-48 if tensor.dtype is f64 else 2.0**-20
        largest = max(float(np.abs(q).max(initial=0)), float(np.abs(k).max(initial=0)))
        gains = float(np.abs(grad).max(initial=0) * np.abs(v).max(initial=0)) * v.shape[-1]
        return eps * gains * largest * float(tensor.attrs["scale"] or 1.0)
    return 0.0


def _window(tensor: Tensor, root: Array, *, copy: bool = True) -> Array:
    """What a view shows of its root's values."""
    shape = array_shape(tensor.shape, tensor.dtype)
    if not tensor.size:
        return np.empty(shape, root.dtype)  # wherever its offset leads
    strides = (*tensor.strides[:-1], 1) if tensor.dtype.is_quantized else tensor.strides
    shown = np.ndarray(shape, root.dtype, np.ascontiguousarray(root), tensor.offset, strides)
    return shown.copy() if copy else shown


def _moved_source(array: Array, source: Tensor, rng: np.random.Generator) -> Array:
    ulps = _ULPS.get(source.dtype)
    if ulps is None:
        return array
    return np.asarray(array * (1 + ulps * rng.choice((-1.0, 1.0), array.shape)), array.dtype)


def _moved(value: Array, limit: float, least: Any, i: int, rng: np.random.Generator) -> Array:
    """The values moved by ``limit`` of what they and all of them are, ``least`` at least."""
    wide = value.astype(np.float64)
    finite = np.isfinite(wide)
    power = float(np.sqrt(np.mean(np.square(wide, where=finite, out=np.zeros_like(wide)))))
    signs: Any = {1: 1.0, 2: -1.0}.get(i)
    if signs is None:
        signs = rng.choice((-1.0, 1.0), wide.shape)
    # Below its smallest normal number f16 has fewer digits than the limit says: at least one step between numbers.
    if value.dtype == np.float16:
        least = np.maximum(least, float(np.finfo(np.float16).smallest_subnormal))
    return np.where(finite, wide + signs * np.maximum(limit * (np.abs(wide) + power), least), wide).astype(value.dtype)


# --- judging --------------------------------------------------------------------------------------------------------


def differences(got: Array, samples: Samples) -> str:
    """Where ``got`` is farther from the reference than the samples allow, in words; ``""``: nowhere."""
    if not samples:
        return ""
    want = samples[0]
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"it gives {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    if got.tobytes() == want.tobytes():
        return ""
    if want.dtype.kind in "iub":
        settled = np.ones(want.shape, np.bool_)
        for sample in samples[1:]:
            settled &= sample == want
        return _found((got != want) & settled, got, want, None)
    with np.errstate(all="ignore"):
        return _float_differences(got, samples)


def _float_differences(got: Array, samples: Samples) -> str:
    have, want = got.astype(np.float64), samples[0].astype(np.float64)
    spread, settled = np.zeros(want.shape), np.ones(want.shape, np.bool_)
    for sample in samples[1:]:
        moved = sample.astype(np.float64)
        settled &= np.isfinite(moved) == np.isfinite(want)
        settled &= np.isfinite(moved) | (moved == want) | (np.isnan(moved) & np.isnan(want))
        spread = np.maximum(spread, np.where(np.isfinite(moved), np.abs(moved - want), 0))
    finite = np.isfinite(want)
    alike = (have == want) | (np.isnan(have) & np.isnan(want))
    allowed = FACTOR * spread + (_smallest(got.dtype) if len(samples) > 1 else 0.0)
    close = finite & np.isfinite(have) & (np.abs(have - want) <= allowed)
    # Large numbers without a digit that is sure: what is computed in f32 may be beyond its largest on the way.
    lost = ~np.isfinite(have) & (allowed >= np.abs(want)) & (np.abs(want) > LARGE)
    return _found(settled & ~alike & ~close & ~lost, got, samples[0], allowed)


def _smallest(dtype: np.dtype[Any]) -> float:
    """What may be 0 where it is not computed exactly: formulas lose their last digits before results are too small for
    their type, and some devices have no denormal numbers. (Half types are computed in f32.)"""
    return _tiny(dtype) * 2.0**24


def _tiny(dtype: np.dtype[Any]) -> float:
    """The smallest normal number of the type that values of ``dtype`` are computed in."""
    return float(np.finfo(np.float64 if dtype == np.float64 else np.float32).tiny)


def _found(wrong: Array, got: Array, want: Array, allowed: Array | None) -> str:
    count = int(np.count_nonzero(wrong))
    if not count:
        return ""
    at = tuple(map(int, np.unravel_index(int(np.argmax(wrong)), want.shape)))
    within = "" if allowed is None else f" within {allowed[at]:.2e}"
    of = "it is" if want.size == 1 else f"{count:,} of {want.size:,} elements are wrong: at {list(at)} it is"
    return f"{of} {got[at]!s}, not {want[at]!s}{within}"
