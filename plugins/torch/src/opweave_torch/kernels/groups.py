"""Calls of the groups of steps that `opweave_torch.groups` finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Group, Step, Stream
from opweave.contract.workspace import scratch_args
from opweave_torch.kernels.activation import FUNCTIONS, SMALL, gelu
from opweave_torch.kernels.binding import in_order
from opweave_torch.kernels.matmul import as_source
from opweave_torch.kernels.packed_products import Product, computed_in, product_of_int4, product_of_packed
from opweave_torch.memory import tensor, torch_dtype
from opweave_torch.native import packed_product
from opweave_torch.packed import PackedType
from opweave_torch.packed_weight import PackedWeight, joint_weight

__all__ = ["ACTIVATIONS", "GATES", "bind_group", "rearranged"]


def _relu(x: Tensor, out: Tensor) -> None:
    torch.clamp_min(x, 0, out=out)


ACTIVATIONS: Final[dict[str, Callable[..., Any]]] = {
    "silu": FUNCTIONS["silu"],
    "gelu_tanh": FUNCTIONS["gelu_tanh"],
    "relu": _relu,
    "gelu": gelu,
}
"""Operations on the result of one product."""

GATES: Final = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Gated units of the results of two products, and the activation of each."""


def bind_group(stream: Stream, group: Group) -> Call:
    """The call of a group: attention and its copy, or products and what is done with their results."""
    first, last = group.steps[0], group.steps[-1]
    if first.op == "attention":
        step = rearranged(first, last)
        kernel = None if step is None else stream.device.kernels.find(step)
        assert step is not None
        assert kernel is not None
        return kernel.bind(stream, step, group.scratch)
    kernel = stream.device.kernels.find(first)
    assert kernel is not None
    arrays: Any = scratch_args(kernel.scratch(first).arrays, group.scratch)
    products = [step for step in group.steps if step.op == "linear"]
    if len(products) > 1:
        constant = {group.reads[i].value for i in group.constant}
        return JointProduct(products, None if last.op == "linear" else last, arrays, constant)
    x, w, *bias = first.srcs
    form = product_of_packed if isinstance(w.buffer_type, PackedType) else product_of_int4
    product = form(x, w, bias[0] if bias else None, arrays)
    if last.op == "add":
        return _sum(product, first, last)
    return _activation(product, last)


# --- one product ----------------------------------------------------------------------------------------------------


def _sum(product: Product, first: Step, last: Step) -> Call:
    (other,) = [tensor(src) for src in last.srcs if src.value != first.out.value]
    target, result = tensor(last.out), product.result
    shape = target.shape
    return in_order([*product.before, lambda: torch.add(result().view(shape), other, out=target)])


def _activation(product: Product, last: Step) -> Call:
    target, function, result = tensor(last.out), ACTIVATIONS[last.op], product.result
    shape, folded = target.shape, product.gelu if last.op == "gelu" else None

    def separately() -> None:
        _activated(function, result().view(shape), target)

    if folded is None or last.out.size <= SMALL:
        return in_order([*product.before, separately])

    def run() -> None:
        found = folded()
        # NaN of an infinite product shows in the sum.
        if torch.sum(found).isfinite():
            target.copy_(found.view(shape))
        else:
            separately()

    return in_order([*product.before, run])


def _activated(function: Callable[..., Any], result: Tensor, target: Tensor) -> None:
    """The activation of a new tensor; of one that is rounded to ``target`` first, as it would be by itself."""
    if result.dtype is target.dtype:
        function(result, out=target)
    else:
        target.copy_(result)
        function(target, out=target)


# --- several products -----------------------------------------------------------------------------------------------


class JointProduct:
    """Products of the same rows as one, with a packed matrix of all weights.

    Args:
        products: steps with packed weights, all with a bias or all without.
        gated: a gated unit of the results of two products; ``None``: the results are stored.
        arrays: workspace of the first product.
        constant: numbers of the values that no node writes.
    """

    def __init__(
        self, products: Sequence[Step], gated: Step | None, arrays: dict[str, Arg], constant: Set[int]
    ) -> None:
        x, w = products[0].srcs[:2]
        self._source, before = as_source(x, arrays)
        self._weights = [step.srcs[1].handle for step in products]
        biases = [step.srcs[2] for step in products if len(step.srcs) > 2]
        self._biases = [tensor(b) for b in biases]
        self._keeps_bias = all(b.value in constant for b in biases)
        self._bias: Tensor | None = None
        self._dtype = torch_dtype(computed_in(w))
        self._parts: list[PackedWeight] = []
        self._whole: Tensor
        counts = [step.out.shape[-1] for step in products]
        store = self._stores(products, counts) if gated is None else self._gates(products, gated, counts)
        self._run = in_order([*before, store])

    def __call__(self) -> None:
        self._run()

    @property
    def library_bytes(self) -> int:
        """Bytes of the weights that were packed again for somebody who reads them alone."""
        return sum(part.nbytes for part in self._parts if not part.is_in(self._whole))

    def refresh(self, token: object) -> None:
        """Weights were written; those that are packed are compared at each run."""
        self._bias = None

    def _product(self) -> Tensor:
        parts = [weight.value for weight in self._weights]
        if parts != self._parts:  # the first run, or weights were written
            self._whole, self._parts = joint_weight(parts), parts
        bias = self._bias
        if bias is None and self._biases:
            bias = torch.cat(self._biases).to(self._dtype)
            self._bias = bias if self._keeps_bias else None
        return packed_product(self._source, self._whole, bias)

    def _stores(self, products: Sequence[Step], counts: Sequence[int]) -> Call:
        targets = [tensor(step.out) for step in products]

        def run() -> None:
            for part, target in zip(self._product().split(counts, 1), targets, strict=True):
                target.copy_(part.view(target.shape))

        return run

    def _gates(self, products: Sequence[Step], gated: Step, counts: Sequence[int]) -> Call:
        function, target = ACTIVATIONS[GATES[gated.op]], tensor(gated.out)
        if gated.attrs.get("approximate") == "tanh":
            function = ACTIVATIONS["gelu_tanh"]
        shape, first = target.shape, gated.srcs[0].value == products[0].out.value
        dtype = torch.float32 if self._dtype is torch.bfloat16 else self._dtype

        def run() -> None:
            values, gate = self._product().split(counts, 1)[:: 1 if first else -1]
            gate = gate.to(dtype)
            function(gate, out=gate)
            torch.mul(gate.view(shape), values.view(shape), out=target)

        return run


# --- attention ------------------------------------------------------------------------------------------------------


def rearranged(step: Step, copy: Step) -> Step | None:
    """The step with its result where ``copy``, which reads all of it in another order of the axes, would put it;
    ``None`` if ``copy`` does not."""
    out, shown = step.out, copy.srcs[0]
    axes = {
        stride: (n, target)
        for n, stride, target in zip(shown.shape, shown.strides, copy.out.strides, strict=True)
        if n > 1
    }
    found = [axes.get(stride) if n > 1 else (1, 0) for n, stride in zip(out.shape, out.strides, strict=True)]
    if shown.offset != out.offset or shown.size != out.size or copy.out.dtype is not out.dtype:
        return None
    if any(axis is None or axis[0] != n for axis, n in zip(found, out.shape, strict=True)):
        return None
    to = copy.out
    strides = tuple([axis[1] for axis in found if axis is not None])
    there = Arg(to.buffer, to.offset, to.dtype, out.shape, strides, to.handle, to.value)
    return step._replace(out=there, choice=None)
