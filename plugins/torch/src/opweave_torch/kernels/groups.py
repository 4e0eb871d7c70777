"""Calls of the groups of steps that `opweave_torch.groups` finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from opweave.contract import Arg, Call, Group, Step, Stream
from opweave.contract.step import scratch_args
from opweave_torch.kernels.activation import FUNCTIONS, SMALL, gelu
from opweave_torch.kernels.binding import in_order
from opweave_torch.kernels.matmul import as_source
from opweave_torch.kernels.packed_products import computed_in, product_of_int4
from opweave_torch.memory import reshaped, tensor, torch_dtype
from opweave_torch.native import gelu_of_packed_product, packed_product
from opweave_torch.packed import PackedType
from opweave_torch.packed_weight import PackedWeight, merged_weight

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
    constant = {group.reads[i].value for i in group.constant}
    products = [step for step in group.steps if step.op == "linear" and step.srcs[0] == first.srcs[0]]
    if len(products) > 1:
        return MergedProduct(products, None if last.op == "linear" else last, arrays, constant)
    return ProductChain(group.steps, arrays, constant)


class _Bias:
    """The biases of products, one behind the other, in the type that these compute in.

    Args:
        products: all with a bias or all without.
        constant: numbers of the values that no node writes. Where all biases are among them, the converted ones are
            kept until `refresh`.
    """

    def __init__(self, products: Sequence[Step], constant: Set[int]) -> None:
        biases = [step.srcs[2] for step in products if len(step.srcs) > 2]
        self._biases = [tensor(b) for b in biases]
        self._dtype = torch_dtype(computed_in(products[0].srcs[1]))
        self._is_constant = all(b.value in constant for b in biases)
        self._kept: Tensor | None = None

    def __call__(self) -> Tensor | None:
        if self._kept is not None or not self._biases:
            return self._kept
        bias = (torch.cat(self._biases) if len(self._biases) > 1 else self._biases[0]).to(self._dtype)
        self._kept = bias if self._is_constant else None
        return bias

    def refresh(self) -> None:
        """Forget the converted biases, because leaves were written."""
        self._kept = None


# --- a product and what follows it ----------------------------------------------------------------------------------


class _Packed:
    """A product of a matrix with a packed weight: a function that makes a new tensor."""

    def __init__(self, step: Step, constant: Set[int]) -> None:
        self._weight = step.srcs[1].handle
        self.bias = _Bias([step], constant)

    def __call__(self, x: Tensor) -> Tensor:
        return packed_product(x, self._weight.value.packed, self.bias())

    def gelu(self, x: Tensor) -> Tensor:
        """The exact gelu of the product, NaN where the product is infinite."""
        return gelu_of_packed_product(x, self._weight.value.packed, self.bias())


class ProductChain:
    """A product, and steps that each read nothing computed but the result of the one before them and operands from
    outside: activations, further products, sums, a layer norm. Results between them are matrices of torch's own; the
    last step stores.

    Args:
        steps: of the group.
        arrays: workspace of the first one.
        constant: numbers of the values that no node writes.
    """

    def __init__(self, steps: Sequence[Step], arrays: dict[str, Arg], constant: Set[int]) -> None:
        x, w, *bias = steps[0].srcs
        last = steps[-1]
        self._before: Sequence[Call]
        self._source, self._before = as_source(x, arrays)
        self._target, *self._others = _alike(last.out, *_others(last, steps[-2]))
        if isinstance(w.buffer_type, PackedType):
            functions: list[Callable[[Tensor], Tensor]] = [_Packed(steps[0], constant)]
        else:
            product = product_of_int4(x, w, bias[0] if bias else None, arrays)
            self._before, functions = product.before, [lambda _: product.result()]
        functions += [_function(step, before, constant) for before, step in pairwise(steps)]
        self._packed = [function for function in functions if isinstance(function, _Packed)]
        self._functions = functions[:-1]
        self._store = self._stored(steps, functions[-1])
        # The same with each gelu behind a product computed with it, in oneDNN's registers.
        self._folded: list[Callable[[Tensor], Tensor]] = []
        self._store_folded = self._store
        for before, step, function in zip((None, *steps), steps, functions, strict=False):
            product_before = self._folded[-1] if self._folded else None
            if (
                step.op == "gelu"
                and before is not None
                and isinstance(product_before, _Packed)
                and _form(step.out) == _form(before.out)
                and (step is not last or last.out.size > SMALL.value)
            ):
                self._folded[-1] = product_before.gelu
                if step is last:
                    self._store_folded = self._copy
            elif step is not last:
                self._folded.append(function)
        self._folds = self._folded != self._functions

    def __call__(self) -> None:
        for call in self._before:
            call()
        if self._folds:
            x = self._source
            for function in self._folded:
                x = function(x)
            # NaN of an infinite product shows in the sum; where that of finite elements overflows, this is only slower.
            if math.isfinite(x.sum().item()):
                self._store_folded(x)
                return
        x = self._source
        for function in self._functions:
            x = function(x)
        self._store(x)

    def refresh(self, token: object) -> None:
        """Forget converted biases, because leaves were written. Packed weights are looked up at each run."""
        for product in self._packed:
            product.bias.refresh()

    def _copy(self, x: Tensor) -> None:
        shape = self._target.shape
        self._target.copy_(x if x.shape == shape else x.view(shape))

    def _stored(self, steps: Sequence[Step], function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], object]:
        """The last step, which stores its result."""
        before, step = steps[-2:]
        target = self._target
        if step.op == "add":
            (other,) = self._others
            return _of_shape(target.shape, before, lambda x: torch.add(x, other, out=target))
        if step.op not in ACTIVATIONS:
            return lambda x: self._copy(function(x))
        activation = ACTIVATIONS[step.op]
        store = _of_shape(target.shape, before, lambda x: activation(x, out=target))

        def store_rounded(x: Tensor) -> None:
            if x.dtype is target.dtype:
                store(x)
            else:  # rounded first, as it would be by itself
                self._copy(x)
                activation(target, out=target)

        return store_rounded


def _form(arg: Arg) -> tuple[int, ...]:
    """The shape of an operand as a matrix."""
    return math.prod(arg.shape[:-1]), arg.shape[-1]


def _others(step: Step, before: Step) -> list[Arg]:
    """What a sum adds to the result of the step before it; of other steps nothing."""
    return [src for src in step.srcs if src.value != before.out.value] if step.op == "add" else []


def _alike(first: Arg, *others: Arg) -> list[Tensor]:
    """Operands as matrices; as they are where one of them has another shape or is strided."""
    form = _form(first)
    found = [reshaped(arg, form) for arg in (first, *others) if arg.shape == first.shape]
    matrices = [matrix for matrix in found if matrix is not None]
    return matrices if len(matrices) == 1 + len(others) else [tensor(arg) for arg in (first, *others)]


def _of_shape(shape: Sequence[int], before: Step, function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A function of a tensor of some shape, for the matrix that the step before makes. Showing a tensor in another
    shape takes as long as an addition of few rows."""
    return function if tuple(shape) == _form(before.out) else lambda x: function(x.view(shape))


def _function(step: Step, before: Step, constant: Set[int]) -> Callable[[Tensor], Tensor]:
    """A step as a function of the matrix that the step before it makes, into which it may write."""
    form = _form(step.out)
    if step.op == "linear":
        return _Packed(step, constant)
    if step.op in ACTIVATIONS:
        activation = ACTIVATIONS[step.op]

        def activated(x: Tensor) -> Tensor:
            activation(x, out=x)
            return x

        return _of_shape(form, before, activated)
    if step.op == "add":
        (arg,) = _others(step, before)
        other = _alike(arg)[0] if arg.shape == step.out.shape else tensor(arg)
        if tuple(other.shape) == form:
            return _of_shape(form, before, lambda x: x.add_(other) if x.dtype is other.dtype else torch.add(x, other))
        return lambda x: torch.add(x.view(step.out.shape), other).reshape(form)
    assert step.op == "layer_norm", step.op
    weight, bias = [*map(tensor, step.srcs[1:]), None, None][:2]
    eps = step.attrs["eps"]
    return _of_shape(form, before, lambda x: torch.layer_norm(x, form[1:], weight, bias, eps))


# --- several products -----------------------------------------------------------------------------------------------


class MergedProduct:
    """Products of the same rows as one, with a packed matrix of all weights, one below the other.

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
        self._bias = _Bias(products, constant)
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
        """Forget the biases, because leaves were written. Packed weights are compared at each run."""
        self._bias.refresh()

    def _product(self) -> Tensor:
        parts = [weight.value for weight in self._weights]
        if parts != self._parts:  # the first run, or weights were written
            self._whole, self._parts = merged_weight(parts), parts
        return packed_product(self._source, self._whole, self._bias())

    def _stores(self, products: Sequence[Step], counts: Sequence[int]) -> Call:
        targets = [_alike(step.out)[0] for step in products]
        if all(target.dim() == 2 for target in targets):

            def run() -> None:
                for part, target in zip(self._product().split(counts, 1), targets, strict=True):
                    target.copy_(part)
        else:

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
