"""Functions of torch that have no public name, each with the public way for a version of torch that lacks it.

Times are the fastest of 2,400 calls on small operands, in microseconds, with torch 2.13 on two cores of an AMD EPYC.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Final

import torch
from torch import _C, Tensor

__all__ = [
    "backward_function", "convolution", "flash_attention_on_cpu", "gelu_of_packed_product", "gelu_tanh_gradient",
    "has_fused_attention", "inference_mode", "int4_packed", "int4_product", "log_softmax_gradient",
    "max_pool_with_indices", "multiplies_bf16", "multiplies_tiles_of_bf16", "out_function", "packed_linear",
    "packed_product", "silu_gradient", "softmax_gradient",
]  # fmt: skip

_NN: Final[Any] = getattr(_C, "_nn", None)
_INFERENCE_MODE: Final[Any] = getattr(_C, "_InferenceMode", torch.inference_mode)


def multiplies_bf16() -> bool:
    """Whether the processor has instructions for products in bf16 that torch's libraries use."""
    return _processor_has("_is_avx512_bf16_supported") or multiplies_tiles_of_bf16()


def multiplies_tiles_of_bf16() -> bool:
    """Whether these instructions multiply whole tiles (AMX)."""
    return _processor_has("_is_amx_tile_supported")


def _processor_has(name: str) -> bool:
    ask: Callable[[], bool] | None = getattr(torch.cpu, name, None)
    return ask is not None and ask()


def out_function(name: str) -> Callable[..., Any]:
    """A function of ``torch.nn.functional`` with ``out=``, which the public ones do not take.

    ========== ================== ========================= ========================
    function   ``torch._C._nn``   ``torch.ops.aten.X.out``  public, and a copy
    ========== ================== ========================= ========================
    silu       0.6                1.3                       1.5
    avg_pool2d 1.9                3.6                       2.3
    bilinear   4.6                6.1                       6.8
    ========== ================== ========================= ========================
    """
    found: Callable[..., Any] = getattr(_NN, name, None) or getattr(torch.ops.aten, name).out
    return found


def max_pool_with_indices() -> Callable[..., Any]:
    """``max_pool2d`` with ``out=(values, indices)``: 2.2. The public operator takes 4.0, the public function and a copy
    of its result 3.3."""
    found: Callable[..., Any] | None = getattr(_NN, "max_pool2d_with_indices", None)
    operator = torch.ops.aten.max_pool2d_with_indices.out
    return found or (lambda *args, out: operator(*args, out=out[0], indices=out[1]))


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]) -> Callable[[], Tensor]:
    """A call of ``torch.convolution``; on CUDA without TF32, in which cuDNN computes f32 by default.

    Publicly this is a setting of the process, which takes 5.7 to change and change back (the convolution: 7.7) and
    holds for other threads too. The private function takes it as an argument.
    """
    operands = (x, weight, bias, *geometry)
    if x.device.type != "cuda":
        return partial(torch.convolution, *operands)
    private: Callable[..., Tensor] | None = getattr(torch, "_convolution", None)

    def without_tf32() -> Tensor:
        deterministic = torch.are_deterministic_algorithms_enabled()
        if private is not None:
            return private(*operands, False, deterministic, True, False)  # benchmark, ., cudnn_enabled, allow_tf32
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=deterministic, allow_tf32=False):
            return torch.convolution(*operands)

    return without_tf32


def flash_attention_on_cpu() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The kernel behind ``scaled_dot_product_attention`` on the CPU, ``None`` where torch has another one.

    Unlike the public function (31.9, this one and a look at its second result 35.9) it also gives the logarithm of each
    row's sum, by which sinks are applied and rows that see no key are found.
    """
    operator = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    return None if operator is None else operator.default


def has_fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> bool:
    """Whether ``scaled_dot_product_attention`` has a fused kernel for the operands. Else it would compute all scores at
    once, in memory that nobody planned; only where torch does not tell, it may."""
    choose: Callable[..., int] | None = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return True
    try:
        return choose(q, k, v, mask, 0.0, **options) != 0  # 0: by plain products
    except NotImplementedError:  # a device that does not choose has no kernels to choose from
        return False


def inference_mode(enabled: bool = True) -> AbstractContextManager[object]:
    """torch's inference mode for a ``with`` block, or no inference mode.

    The private class has no methods in Python. In one of those of the public class an interruption (Ctrl-C) can leave
    the mode entered, and the thread's tensors have no gradients from there on.
    """
    return _INFERENCE_MODE(enabled)  # type: ignore[no-any-return]


# --- packed weights -------------------------------------------------------------------------------------------------
#
# None of these has a public way. `opweave_torch.packed` tries them out once, and reads weights as they lie where this
# torch lacks them or computes something else.


@cache
def _operator(library: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(getattr(torch.ops, library), name)
    return found


def packed_linear(matrix: Tensor) -> Tensor:
    """A dense matrix of weights in the layout that oneDNN's products read fastest."""
    packed: Tensor = _operator("mkldnn", "_reorder_linear_weight")(matrix.contiguous(), None)
    return packed


_LINEAR: Final[Any] = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of a weight that `packed_linear` made, a new tensor."""
    product: Tensor = _LINEAR(x, packed, bias, "none", [], "")
    return product


def gelu_of_packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """The exact gelu of `packed_product`, a new tensor. Where the product is infinite it is NaN."""
    found: Tensor = _LINEAR(x, packed, bias, "gelu", [], "none")
    return found


def int4_packed(integers: Tensor) -> Tensor:
    """i32 integers of 4 bits, (outputs, inputs), in the layout of `int4_product`."""
    packed: Tensor = _operator("aten", "_convert_weight_to_int4pack_for_cpu")(integers, 1)
    return packed


def int4_product(x: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
    """``x @ weight.T`` of rows in bf16 and a weight of `int4_packed` in groups of inputs with a scale each, a new
    tensor."""
    product: Tensor = _operator("aten", "_weight_int4pack_mm_for_cpu")(x, packed, group, scales)
    return product


def backward_function(name: str) -> Callable[..., Any]:
    """torch's function for the gradient of an operation, which takes ``grad_input=`` for the result."""
    function: Callable[..., Any] = getattr(torch.ops.aten, name).grad_input
    return function


def silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of silu, a new tensor."""
    made: Tensor = torch.ops.aten.silu_backward(grad, x)
    return made


def gelu_tanh_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of gelu by tanh, a new tensor."""
    made: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return made


_SOFTMAX_GRADIENT: Final[Any] = getattr(torch.ops.aten, "_softmax_backward_data", None)
_LOG_SOFTMAX_GRADIENT: Final[Any] = getattr(torch.ops.aten, "_log_softmax_backward_data", None)


def softmax_gradient(grad: Tensor, result: Tensor, out: Tensor) -> None:
    """The gradient of softmax over the last axis, of whose result it is made."""
    if _SOFTMAX_GRADIENT is None:
        torch.mul(grad - (grad * result).sum(-1, keepdim=True), result, out=out)
    else:
        _SOFTMAX_GRADIENT.out(grad, result, -1, grad.dtype, grad_input=out)


def log_softmax_gradient(grad: Tensor, result: Tensor, out: Tensor) -> None:
    """The gradient of the logarithm of softmax over the last axis, of whose result it is made."""
    if _LOG_SOFTMAX_GRADIENT is None:
        torch.sub(grad, result.exp() * grad.sum(-1, keepdim=True), out=out)
    else:
        _LOG_SOFTMAX_GRADIENT.out(grad, result, -1, grad.dtype, out=out)
