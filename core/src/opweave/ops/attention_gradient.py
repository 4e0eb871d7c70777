"""The gradient of attention, as one operation. It computes the weights of the values again, because attention does not
return them."""

from __future__ import annotations

from math import prod
from typing import Final, Unpack

import numpy as np

from opweave.graph.dtypes import DType
from opweave.graph.layout import Shape
from opweave.graph.opdef import OpDef, define_op
from opweave.graph.tensor import Tensor, node
from opweave.ops.attention import ATTENTION, AttentionOptions, attention_samples, attention_shares
from opweave.ops.operands import Array, floats, misfit, wide
from opweave.ops.samples import measured

__all__: list[str] = []


def attention_gradient_sizes(q: Shape, k: Shape, v: Shape) -> tuple[int, int, int]:
    """How many elements `attention_backward` returns for the queries, keys and values of each group, given the shapes
    of q, k and v."""
    return prod(q[1:]) // k[1], prod(k[2:]), prod(v[2:])


def _backward_infer(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Unpack[AttentionOptions]
) -> tuple[Shape, DType]:
    shape, dtype = ATTENTION.infer(q, k, v, *rest, **options)
    if grad.shape != shape:
        raise misfit("attention_backward", f"the gradient of a result of shape {shape}", grad)
    return (*k.shape[:2], sum(attention_gradient_sizes(q.shape, k.shape, v.shape))), dtype


def _backward(
    grad: Array, q: Array, k: Array, v: Array, *rest: Array, **options: Unpack[AttentionOptions]
) -> Array:  # fmt: skip
    shares, capped = attention_shares(q, k, rest, **options)
    sizes = attention_gradient_sizes(q.shape, k.shape, v.shape)
    rows = q.shape[1] // k.shape[1] * q.shape[2]

    def of_group(x: Array) -> Array:
        """The heads of a group as further rows."""
        return wide(x).reshape(*k.shape[:2], rows, x.shape[-1])

    g, shares, keys, values = of_group(grad), of_group(shares), wide(k), wide(v)
    along = np.matmul(g, values.swapaxes(-1, -2))
    along = shares * (along - (shares * along).sum(-1, keepdims=True))
    if options["soft_cap"]:
        along = along * (1 - np.square(of_group(capped) / options["soft_cap"]))
    along = along * options["scale"]
    turned = along.swapaxes(-1, -2)
    parts = np.matmul(along, keys), np.matmul(turned, of_group(q)), np.matmul(shares.swapaxes(-1, -2), g)
    packed = [part.reshape(*k.shape[:2], n) for part, n in zip(parts, sizes, strict=True)]
    return np.concatenate(packed, -1)


def _backward_flops(out: Tensor) -> int:
    grad, q, k, *_ = out.srcs
    return 2 * (3 * q.size + 2 * grad.size) * k.shape[2]


def _backward_samples() -> list[Tensor]:
    return [attention_backward(out, *out.srcs, **out.attrs) for out in attention_samples()]


ATTENTION_BACKWARD: Final = define_op(
    OpDef(
        "attention_backward",
        infer=_backward_infer,
        attributes=tuple(AttentionOptions.__annotations__),
        reference=_backward,
        flops=_backward_flops,
        formula="(s k, sᵀ q, pᵀ dy), p = softmax(cap(scale · q kᵀ) + slope · mask), d = dy vᵀ, "
        "s = scale · cap'(scale · q kᵀ) · p · (d − Σ p d)",
        product=True,
        slack=8.0,
        nan=False,
        rough={},
        samples=measured(_backward_samples, _backward_samples),
    )
)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Unpack[AttentionOptions]
) -> Tensor:
    """The gradients of q, k and v of `attention`, given the gradient ``grad`` of its result.

    They are one result, because all of them need the weights of the values, which are computed once. The other sources
    and the attributes are those of the node of `attention`.

    Returns:
        Shape (batch, groups, n): of each group the gradients of the queries of its heads, of its keys and of its
        values, one behind the other (`attention_gradient_sizes`).
    """
    return node(ATTENTION_BACKWARD, (*floats("attention_backward", grad, q, k, v), *rest), dict(options))
