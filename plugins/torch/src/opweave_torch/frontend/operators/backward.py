"""Backward operators of ATen, by the gradients of opweave's operations. torch decomposes the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.operators.attention import attention
from opweave_torch.frontend.operators.convolution import avg_pool, convolution, max_pool
from opweave_torch.frontend.operators.table import operator

__all__: list[str] = []


def _gradients(forward: Callable[..., Any], grad: Tensor, *args: Tensor, wanted: Sequence[bool] = ()) -> list[Any]:
    """The gradients of ``forward(*args)`` by those of the arguments that are ``wanted``, ``None`` for the others."""
    chosen = [i for i in range(len(args)) if not wanted or wanted[i]]
    if not chosen:
        return [None] * len(args)
    own = _independent(args)
    out = forward(*own)
    found = ow.gradients(out, tuple([own[i] for i in chosen]), grad.astype(out.dtype))
    placed = dict(zip(chosen, found, strict=True))
    return [placed.get(i) for i in range(len(args))]


def _independent(args: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same values as nodes none of which is another one or computed from it, because the gradient of one would then
    contain that of the other. Copies, where the nodes are not so already."""
    above: set[Tensor] = set()
    left = [source for x in args for source in x.srcs]
    while left:
        x = left.pop()
        if x not in above:
            above.add(x)
            left += x.srcs
    if len(set(args)) == len(args) and not above.intersection(args):
        return args
    joined = ow.concat([ow.reshape(x, (x.size,)) for x in args])
    ends = list(accumulate([x.size for x in args]))
    return [ow.reshape(joined[end - x.size : end], x.shape) for x, end in zip(args, ends, strict=True)]


@operator("convolution_backward")
def _convolution_backward(
    call: Call, grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    rank = weight.ndim - 2
    if x.ndim != rank + 2 or (transposed and rank > 2):
        return call.fallback(
            grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, wanted
        )

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return convolution(x, weight, None, stride, padding, dilation, groups, transposed, output_padding)

    to_x, to_weight = _gradients(forward, grad, x, weight, wanted=wanted)
    to_bias = ow.sum(grad, (0, *range(2, grad.ndim))) if wanted[2] else None
    return to_x, to_weight, to_bias


@operator("gelu_backward")
def _gelu_backward(call: Call, grad: Tensor, x: Tensor, approximate: str = "none") -> Any:
    return _gradients(ow.gelu_tanh if approximate == "tanh" else ow.gelu, grad, x)[0]


@operator("max_pool2d_with_indices_backward")
def _max_pool_backward(
    call: Call, grad: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    indices: Tensor,
) -> Any:  # fmt: skip
    return _gradients(lambda x: max_pool(2, x, kernel, stride, padding, dilation, ceil_mode), grad, x)[0]


@operator("avg_pool2d_backward")
def _avg_pool_backward(
    call: Call, grad: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: Any,
) -> Any:  # fmt: skip
    more = ceil_mode, count_include_pad, divisor_override
    return _gradients(lambda x: avg_pool(2, x, kernel, stride, padding, *more), grad, x)[0]


@operator("native_layer_norm_backward")
def _layer_norm_backward(
    call: Call, grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Any, bias: Any,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """The gradients of (x - mean) · rstd · weight + bias (Ba et al., "Layer Normalization", 2016)."""
    first = x.ndim - len(shape)
    inner, outer = tuple(range(first, x.ndim)), tuple(range(first))
    wide = mean.dtype
    normed = (x.astype(wide) - mean) * rstd
    g = grad.astype(wide)
    scaled = g if weight is None else g * weight.astype(wide)
    to_x = None
    if wanted[0]:
        across = ow.mean(scaled * normed, inner, True)
        to_x = (scaled - ow.mean(scaled, inner, True) - normed * across) * rstd
    to_weight = (ow.sum(g * normed, outer) if outer else g * normed) if wanted[1] and weight is not None else None
    to_bias = (ow.sum(g, outer) if outer else g) if wanted[2] and bias is not None else None
    return to_x, to_weight, to_bias


@operator("embedding_dense_backward")
def _embedding_backward(
    call: Call, grad: Tensor, ids: Tensor, rows: int, padding_idx: int, scale_by_frequency: bool
) -> Any:
    if scale_by_frequency:
        return call.fallback(grad, ids, rows, padding_idx, scale_by_frequency)
    if padding_idx >= 0:
        counts = ow.expand_dims(ow.not_equal(ids, ow.constant(padding_idx, ids.dtype)), -1)
        grad = ow.where(counts, grad, ow.constant(0, grad.dtype))
    return ow.index_add(ids, grad, rows)


@operator("_scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(
    call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    return tuple(_gradients(lambda q, k, v: attention(call, q, k, v, attn_mask, is_causal, scale), grad, q, k, v))
