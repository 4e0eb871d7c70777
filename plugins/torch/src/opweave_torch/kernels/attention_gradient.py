"""The gradient of attention by products: some images and groups, or some queries of one group, at a time. Their scores
are computed again, and no more than a tile of them lives at a time. Half types compute in f32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf, prod
from typing import Any, Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import bool_
from opweave.ops.attention_gradient import attention_gradient_sizes
from opweave.ops.normalization import alibi_slopes
from opweave.ops.operands import optional_operands
from opweave_torch.kernels.attention import beginning, boxes
from opweave_torch.kernels.binding import in_order, widened
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor
from opweave_torch.native import softmax_gradient
from opweave_torch.tunables import limit

SCORES: Final = limit("attention_gradient_scores", 1 << 17, 1, 1 << 22)
"""Elements of a tile of scores at least: two tiles stay in the second-level cache of a CPU. With more queries they are
half as many as these have elements, which keeps GPUs busy and is less memory than the operands take."""

FEWEST_ROWS: Final = limit("attention_gradient_rows", 32, 1, 1024)
"""Queries of a tile at least, so that products stay fast however many keys there are."""

Box = tuple[slice, slice, slice, slice]


class _Tiling:
    """The tiles, boxes along (images, groups, heads of a group, tokens).

    Attributes:
        columns: scores of a row, with that of the sink behind the keys.
    """

    def __init__(self, q: Arg, k: Arg, v: Arg, rest: Sequence[Arg], attrs: Mapping[str, Any]) -> None:
        self.mask, self.sinks = optional_operands(rest, attrs["masked"])
        self.axes = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
        self.columns = k.shape[2] + (self.sinks is not None)
        rows = max(FEWEST_ROWS.value, max(SCORES.value, q.size // 2) // self.columns)
        self.tiles: list[Any] = list(boxes(self.axes, rows))
        self.q, self.k, self.v, self.attrs = q, k, v, attrs

    def matrices(self, tile: Box) -> int:
        """How many products a tile makes at once."""
        return prod([some.stop - some.start for some in tile[:2]])

    def rows(self, tile: Box) -> int:
        """Rows of each of them."""
        return prod([some.stop - some.start for some in tile[2:]])

    def sizes(self) -> dict[str, int]:
        """Elements of the arrays that the largest tile needs."""
        size, width, keys = self.q.shape[3], self.v.shape[3], self.k.shape[2]
        matrices = max(map(self.matrices, self.tiles))
        rows = max([self.matrices(tile) * self.rows(tile) for tile in self.tiles])
        return {
            "queries": rows * size, "given": rows * width, "keys": matrices * keys * size,
            "values": matrices * keys * width, "probs": rows * self.columns, "dprobs": rows * self.columns,
            "capped": rows * keys if self.attrs["soft_cap"] else 0,
            "bias": rows * keys if self.mask is not None else 0,
            "hidden": self.axes[3] * keys if self.attrs["causal"] else 0,
            "turns": rows * size, "key_sums": matrices * keys * size, "value_sums": matrices * keys * width,
        }  # fmt: skip


def _arrays(step: Step) -> Arrays:
    _, q, k, v, *rest = step.srcs
    dtype = widened(q.dtype)
    sizes = _Tiling(q, k, v, rest, step.attrs).sizes()
    return {name: (bool_ if name == "hidden" else dtype, (size,)) for name, size in sizes.items()}


def _why_not(step: Step) -> str | None:
    return None if step.srcs[0].size and step.srcs[1].size else "operands without elements"


@KERNELS("attention_backward", when=_why_not, workspace=_arrays)
def attention_backward(
    stream: Stream, op: str, out: Arg, grad: Arg, q: Arg, k: Arg, v: Arg, *rest: Arg, **given: Any
) -> Call:
    packed = tensor(out)
    tiling = _Tiling(q, k, v, rest, given)
    arrays = {name: tensor(array) for name, array in given.items() if isinstance(array, Arg)}
    return in_order(list(_calls(tiling, packed, tensor(grad), arrays)))


def _slopes(q: Tensor, max_bias: float, axes: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """What distances are multiplied by, a number for each head."""
    if not max_bias:
        return None
    return torch.from_numpy(alibi_slopes(q.shape[1], max_bias)).to(q.device, dtype).view(*axes[1:3], 1, 1)


def _capped(scores: Tensor, soft_cap: float, slope: Tensor) -> Iterator[Call]:
    """Caps scores; ``slope`` gets the derivative of the cap."""
    yield partial(scores.div_, soft_cap)
    yield scores.tanh_
    yield partial(torch.square, scores, out=slope)
    yield partial(torch.sub, 1, slope, out=slope)
    yield partial(scores.mul_, soft_cap)


def _with_mask(scores: Tensor, mask: Tensor, bias: Tensor, slopes: Tensor | None) -> Iterator[Call]:
    """Adds a mask to scores of its shape, multiplied by slopes if there are some, by way of ``bias``."""
    yield partial(bias.copy_, mask)
    if slopes is not None:
        yield partial(bias.mul_, slopes)
    yield partial(scores.add_, bias)


def _calls(tiling: _Tiling, packed: Tensor, grad: Tensor, arrays: Mapping[str, Tensor]) -> Iterator[Call]:
    attrs, axes, dtype = tiling.attrs, tiling.axes, arrays["probs"].dtype
    scale, soft_cap, causal = attrs["scale"], attrs["soft_cap"], attrs["causal"]
    tokens, size, keys = *tiling.q.shape[2:], tiling.k.shape[2]
    q, k, v = [tensor(arg) for arg in (tiling.q, tiling.k, tiling.v)]
    queries, grads = [x.unflatten(1, axes[1:3]) for x in (q, grad)]
    mask = None if tiling.mask is None else tensor(tiling.mask).unflatten(1, axes[1:3])
    sinks = None if tiling.sinks is None else tensor(tiling.sinks).view(*axes[1:3], 1)
    slopes = _slopes(q, attrs["max_bias"], axes, dtype)
    ends = attention_gradient_sizes(q.shape, k.shape, v.shape)
    by_queries, by_keys, by_values = packed.split(ends, -1)
    hidden = None
    if causal:
        hidden = beginning(arrays["hidden"], tokens, keys)
        last = torch.arange(keys - tokens, keys, device=q.device).unsqueeze(-1)
        yield partial(torch.gt, torch.arange(keys, device=q.device), last, out=hidden)
    for box in tiling.tiles:
        matrices, rows = tiling.matrices(box), tiling.rows(box)
        images, groups, hs, ts = box
        first = (hs.start, ts.start) == (0, 0)
        final = (hs.stop, ts.stop) == axes[2:]

        def own(name: str, *shape: int, matrices: int = matrices) -> Tensor:
            return beginning(arrays[name], matrices, *shape)

        def adds(
            target: Tensor,
            name: str,
            weights: Tensor,
            x: Tensor,
            alpha: float,
            first: bool = first,
            final: bool = final,
        ) -> Iterator[Call]:
            """The sum over the queries: copied into ``target`` behind the last tile of a group. (torch's products are
            slow where results have gaps.)"""
            total = own(name, keys, x.shape[2])
            yield partial(total.baddbmm_, weights.mT, x, beta=0 if first else 1, alpha=alpha)
            if final:
                yield partial(target.copy_, total.view(target.shape))

        right, values = own("keys", keys, size), own("values", keys, v.shape[3])
        some, given = own("queries", rows, size), own("given", rows, v.shape[3])
        of_group = [(right, k[images, groups]), (values, v[images, groups])] if first else []
        for copy, source in [(some, queries[box]), (given, grads[box]), *of_group]:
            yield partial(copy.view(source.shape).copy_, source)
        shape = queries[box].shape[:-1]
        probs = own("probs", rows, tiling.columns)
        scores, grid = probs[..., :keys], probs.view(*shape, -1)[..., :keys]
        yield partial(scores.baddbmm_, some, right.mT, beta=0, alpha=scale)
        capped = own("capped", rows, keys) if soft_cap else None
        if capped is not None:
            yield from _capped(scores, soft_cap, capped)
        if mask is not None:
            bias = own("bias", rows, keys).view(*shape, -1)
            yield from _with_mask(grid, mask[box], bias, None if slopes is None else slopes[groups, hs])
        if hidden is not None:
            yield partial(grid.masked_fill_, hidden[ts], -inf)
        dprobs = own("dprobs", rows, tiling.columns)
        if sinks is not None:  # a probability without a value, so its gradient is 0
            yield partial(probs.view(*shape, -1)[..., keys].copy_, sinks[groups, hs])
            yield partial(dprobs[..., keys].zero_)
        yield partial(torch.softmax, probs, -1, out=probs)
        yield from adds(by_values[images, groups], "value_sums", scores, given, 1)
        dscores = dprobs[..., :keys]
        yield partial(torch.bmm, given, values.mT, out=dscores)
        yield partial(softmax_gradient, dprobs, probs, dprobs)
        if capped is not None:
            yield partial(dscores.mul_, capped)
        yield from adds(by_keys[images, groups], "key_sums", dscores, some, scale)
        start = hs.start * tokens + ts.start
        target = by_queries[images, groups, start * size : (start + rows) * size]
        turns = own("turns", rows, size)
        yield partial(turns.baddbmm_, dscores, right, beta=0, alpha=scale)
        yield partial(target.copy_, turns.view(target.shape))
