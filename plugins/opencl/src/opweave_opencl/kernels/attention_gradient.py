"""The gradient of attention: products, and a kernel that makes the softmax and its gradient of two of them. Some groups
of some images are computed at a time, so that only their scores are in memory. Half types compute in f32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import f32
from opweave.graph.layout import Shape, dense_strides
from opweave.ops.attention_gradient import attention_gradient_sizes
from opweave.ops.operands import optional_operands
from opweave_opencl.kernels.calls import in_order
from opweave_opencl.kernels.matmul import matmul
from opweave_opencl.kernels.pointwise import bind_pointwise
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.layouts import element_offset, optional_strides
from opweave_opencl.tuning import limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

SCORES: Final = limit("attention_gradient_scores", 1 << 17, 1, 1 << 22)
"""Elements of the scores that are computed at once: so many, half as many as the queries have, or those of one group,
whichever is most."""


def _tile(q: Arg, k: Arg) -> tuple[int, int]:
    """How many images and groups are computed at once: all groups of some images, or some of one image."""
    batch, groups = k.shape[:2]
    each, most = q.shape[1] // groups * q.shape[2] * k.shape[2], max(SCORES.value, q.size // 2)
    together = max(1, min(groups, most // each))
    return (max(1, min(batch, most // (each * groups))) if together == groups else 1), together


def _arrays(step: Step) -> Arrays:
    _, q, k, v, *_ = step.srcs
    images, groups = _tile(q, k)
    rows, (size, width, keys) = q.shape[1] // k.shape[1] * q.shape[2], (q.shape[3], v.shape[3], k.shape[2])
    lengths = {
        "probs": rows * keys, "dscores": rows * keys, "slopes": rows * keys if step.attrs["soft_cap"] else 0,
        "queries": rows * size, "grads": rows * width,
    }  # fmt: skip
    if step.out.dtype is not f32:
        lengths |= {"keys": keys * size, "values": keys * width, "packed": rows * size + keys * (size + width)}
    return {name: ("f32", (images * groups * n,)) for name, n in lengths.items()}


def _why_not(step: Step) -> str | None:
    grad, q, k, v, *_ = step.srcs
    if not all(x.size for x in (grad, q)):
        return "operands without elements"
    other = next((x for x in (grad, q, k, v) if x.dtype is not step.out.dtype), None)
    return None if other is None else f"a source is {other.dtype}"


def _shown(array: Arg, *shape: int) -> Arg:
    """The beginning of scratch memory in that shape."""
    return Arg(array.buffer, array.offset, array.dtype, shape, dense_strides(shape, array.dtype))


def _window(x: Arg, start: tuple[int, ...], shape: Shape) -> Arg:
    """The elements of ``x`` from ``start`` on along its first axes, in ``shape``."""
    offset = x.offset + sum(i * step for i, step in zip(start, x.strides, strict=False))
    return Arg(x.buffer, offset, x.dtype, shape, x.strides)


def _transposed(x: Arg) -> Arg:
    *lead, m, n = x.shape
    *steps, down, across = x.strides
    return Arg(x.buffer, x.offset, x.dtype, (*lead, n, m), (*steps, across, down))


@KERNELS("attention_backward", dtypes="f32 f16 bf16", when=_why_not, workspace=_arrays)
def attention_backward(
    stream: OpenCLStream, op: str, out: Arg, grad: Arg, q: Arg, k: Arg, v: Arg, *rest: Arg, **given: Any
) -> Call:
    return in_order(list(_calls(stream, out, grad, q, k, v, *optional_operands(rest, given["masked"]), given)))


def _calls(
    stream: OpenCLStream, out: Arg, grad: Arg, q: Arg, k: Arg, v: Arg, mask: Arg | None, sinks: Arg | None,
    given: dict[str, Any],
) -> Iterator[Call]:  # fmt: skip
    batch, heads, tokens, size = q.shape
    groups, keys, width = k.shape[1], k.shape[2], v.shape[3]
    repeats = heads // groups
    ends = attention_gradient_sizes(q.shape, k.shape, v.shape)
    images, together = _tile(q, k)
    narrow = out.dtype is not f32

    def copied(target: Arg, x: Arg) -> Call:
        return bind_pointwise(stream, [Step("cast" if x.dtype is not target.dtype else "copy", target, (x,), {})])

    for n, g in product(range(0, batch, images), range(0, groups, together)):
        lead = (min(images, batch - n), min(together, groups - g))
        rows = repeats * tokens
        probs, dscores = (_shown(given[name], *lead, rows, keys) for name in ("probs", "dscores"))
        queries, grads = (_shown(given[name], *lead, rows, x) for name, x in (("queries", size), ("grads", width)))
        for target, x in ((queries, q), (grads, grad)):
            by_head = (lead[0], lead[1] * repeats, tokens, x.shape[3])
            yield copied(_shown(target, *by_head), _window(x, (n, g * repeats), by_head))
        pair = []
        for name, x in (("keys", k), ("values", v)):
            pair.append(_window(x, (n, g), (*lead, *x.shape[2:])))
            if narrow:
                wide = _shown(given[name], *pair[-1].shape)
                yield copied(wide, pair[-1])
                pair[-1] = wide
        yield matmul(stream, "matmul", probs, queries, _transposed(pair[0]))
        yield matmul(stream, "matmul", dscores, grads, _transposed(pair[1]))
        yield _weigh(stream, probs, dscores, g, repeats, tokens, heads, _mask_from(mask, n), sinks, given)
        result = _window(out, (n, g), (*lead, sum(ends)))
        packed = _shown(given["packed"], *result.shape) if narrow else result
        parts = [
            Arg(packed.buffer, packed.offset + start * packed.strides[2], f32, (*lead, m, length),
                (*packed.strides[:2], length * packed.strides[2], packed.strides[2]))
            for start, m, length in ((0, rows, size), (ends[0], keys, size), (ends[0] + ends[1], keys, width))
        ]  # fmt: skip
        yield matmul(stream, "matmul", parts[0], dscores, pair[0])
        yield matmul(stream, "matmul", parts[1], _transposed(dscores), queries)
        yield matmul(stream, "matmul", parts[2], _transposed(probs), grads)
        if narrow:
            yield copied(result, packed)


def _mask_from(mask: Arg | None, image: int) -> Arg | None:
    return None if mask is None else _window(mask, (image,), mask.shape)


def _weigh(
    stream: OpenCLStream, probs: Arg, dscores: Arg, group: int, repeats: int, tokens: int, heads: int, mask: Arg | None,
    sinks: Arg | None, given: dict[str, Any],
) -> Call:  # fmt: skip
    """The call of the kernel, for the scores of groups from ``group`` on."""
    operands = [probs, dscores, given.get("slopes", probs), mask or probs, sinks or probs]
    rows = prod(probs.shape[:-1])
    words = [rows, probs.shape[1], group, repeats, tokens, heads, probs.shape[-1], *map(element_offset, operands)]
    words += [*optional_strides(mask, 4), *optional_strides(sinks, 1)]
    tuning = stream.target.tuning
    macros = {
        "ADDED": operands[3].dtype.name, "SINK": operands[4].dtype.name, "OTHER": operands[3].dtype is not f32,
        "MASKED": mask is not None, "SINKING": sinks is not None, "CAUSAL": given["causal"],
        "CAPPED": given["soft_cap"] != 0, "VEC": tuning.vector,
    }  # fmt: skip
    texts = {name: x if isinstance(x, str) else str(int(x)) for name, x in macros.items()}
    program = stream.target.programs.get("attention_gradient", texts | stream.target.sharing())
    size, numbers = (
        min(rows, tuning.most_groups) * tuning.row_group,
        [given[x] for x in ("scale", "max_bias", "soft_cap")],
    )
    return stream.launch(program, "weigh", (size,), (tuning.row_group,), operands, words, tuple(numbers))
