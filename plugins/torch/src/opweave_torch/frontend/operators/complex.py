"""Complex numbers, as their real and imaginary parts, and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, Literal, TypeVar

import numpy as np

import opweave as ow
from opweave.errors import UnsupportedOpError
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.native import overload
from opweave_torch.frontend.operators.elementwise import as_kind
from opweave_torch.frontend.operators.table import OPERATORS
from opweave_torch.frontend.values import Complex

__all__ = ["COMPLEX", "of_complex"]

F = TypeVar("F", bound=Callable[..., Any])
COMPLEX: Final[dict[Any, Callable[..., Any]]] = {}
"""An overload of an operator -> what builds it for complex operands or a complex result."""
BY_PARTS: Final = (
    "view", "_unsafe_view", "reshape", "permute", "transpose.int", "t", "slice.Tensor", "select.int", "unsqueeze",
    "squeeze.dim", "squeeze.dims", "expand", "cat", "stack", "flip", "roll", "repeat", "split_with_sizes",
    "split.Tensor", "unbind.int", "constant_pad_nd", "diagonal", "clone", "alias", "detach", "neg", "add.Tensor",
    "sub.Tensor", "sum.dim_IntList", "sum.default", "mean.dim", "mean.default", "index_select",
    "slice_scatter", "select_scatter", "copy",
)  # fmt: skip
"""Linear operators, which compute each part by itself."""


def _operator(*names: str) -> Callable[[F], F]:
    def register(function: F) -> F:
        for name in names:
            found = overload(name)
            if found is not None:
                COMPLEX[found] = function
        return function

    return register


def of_complex(target: Any) -> Callable[..., Any]:
    """What builds an operator for complex numbers. Raises `UnsupportedOpError` where nothing does."""
    found = COMPLEX.get(target)
    if found is None:
        raise UnsupportedOpError(
            "this operator is not supported for complex numbers; use their real and imaginary parts"
        )
    return found


def _parts(value: Any) -> tuple[Any, Any]:
    """The real and the imaginary part of an operand."""
    if isinstance(value, Complex):
        return value.real, value.imag
    if isinstance(value, complex):
        return value.real, value.imag
    return value, ow.full(value.shape, 0, value.dtype) if isinstance(value, Tensor) else 0.0


def _side(value: Any, i: int) -> Any:
    """One of the parts of all tensors in an argument; what is no tensor stays."""
    if isinstance(value, (list, tuple)):
        return [_side(v, i) for v in value]
    return _parts(value)[i] if isinstance(value, (Complex, Tensor, complex)) else value


def _by_parts(build: Callable[..., Any], both: bool) -> Callable[..., Any]:
    """``both``: numbers are operands as well, of which the imaginary part is 0."""

    def built(call: Call, *args: Any, **kwargs: Any) -> Any:
        def side(i: int) -> Any:
            given = [_parts(a)[i] if both and isinstance(a, (int, float)) else _side(a, i) for a in args]
            return build(call, *given, **kwargs)

        real, imag = side(0), side(1)
        if isinstance(real, tuple):
            return tuple([Complex(a, b) for a, b in zip(real, imag, strict=True)])
        return Complex(real, imag)

    return built


for _name in BY_PARTS:
    _target = overload(_name)
    if _target in OPERATORS:
        COMPLEX[_target] = _by_parts(OPERATORS[_target], _name in ("add.Tensor", "sub.Tensor"))


# --- parts ----------------------------------------------------------------------------------------------------------


@_operator("complex")
def _complex(call: Call, real: Tensor, imag: Tensor) -> Complex:
    shape = np.broadcast_shapes(real.shape, imag.shape)
    return Complex(ow.broadcast_to(real, shape), ow.broadcast_to(imag, shape))


@_operator("polar")
def _polar(call: Call, size: Tensor, angle: Tensor) -> Complex:
    return Complex(size * ow.cos(angle), size * ow.sin(angle))


@_operator("view_as_real", "view_as_real_copy")
def _view_as_real(call: Call, z: Complex) -> Tensor:
    return z.pairs


@_operator("view_as_complex", "view_as_complex_copy")
def _view_as_complex(call: Call, x: Tensor) -> Complex:
    return Complex.of(x)


@_operator("_to_copy")
def _to_copy(call: Call, value: Any, **_: Any) -> Any:
    real, imag = _parts(value)
    promised = call.node.meta["val"]
    return Complex(real.astype(call.dtype), imag.astype(call.dtype)) if promised.is_complex() else real


@_operator("_conj", "_conj_physical", "conj_physical", "resolve_conj")
def _conj(call: Call, z: Complex) -> Complex:
    return Complex(z.real, ow.neg(z.imag))


@composite
def _length(a: Tensor, b: Tensor) -> Tensor:
    """√(a² + b²), without squares that overflow."""
    a, b = ow.abs(a), ow.abs(b)
    large, small = ow.maximum(a, b), ow.minimum(a, b)
    ratio = ow.where(ow.equal(small, large), ow.constant(1, a.dtype), small / large)
    return large * ow.sqrt(ow.square(ratio) + 1.0)


@_operator("abs")
def _abs(call: Call, z: Complex) -> Tensor:
    return _length(z.real, z.imag)


@_operator("angle")
def _angle(call: Call, z: Complex) -> Tensor:
    x, y = z.real, z.imag
    zero = ow.constant(0, x.dtype)
    turn = ow.where(_is_negative(y), ow.constant(-np.pi, x.dtype), ow.constant(np.pi, x.dtype))
    inner = ow.where(ow.equal(y, zero), y, ow.atan(y / ow.abs(x)))
    return ow.where(_is_negative(x), turn - inner, inner)


def _is_negative(x: Tensor) -> Tensor:
    """Whether numbers have a sign, −0 too."""
    zero = ow.constant(0, x.dtype)
    return ow.less(ow.where(ow.equal(x, zero), ow.div(1.0, x), x), zero)


@_operator("sgn")
def _sgn(call: Call, z: Complex) -> Complex:
    size = _length(z.real, z.imag)
    zero = ow.constant(0, size.dtype)
    return Complex(*[ow.where(ow.equal(size, zero), zero, part / size) for part in (z.real, z.imag)])


# --- arithmetic -----------------------------------------------------------------------------------------------------


@_operator("mul.Tensor", "mul.Scalar")
def _mul(call: Call, x: Any, y: Any) -> Complex:
    if not isinstance(x, (Complex, complex)) or not isinstance(y, (Complex, complex)):
        (a, b), c = (_parts(x), y) if isinstance(x, (Complex, complex)) else (_parts(y), x)
        return Complex(ow.mul(a, c), ow.mul(b, c))
    (a, b), (c, d) = _parts(x), _parts(y)
    return Complex(ow.mul(a, c) - ow.mul(b, d), ow.mul(a, d) + ow.mul(b, c))


@_operator("div.Tensor", "div.Scalar")
def _div(call: Call, x: Any, y: Any) -> Complex:
    if not isinstance(y, (Complex, complex)):
        return Complex(ow.div(x.real, y), ow.div(x.imag, y))
    (a, b), (c, d) = _parts(x), [ow.constant(v, call.dtype) if isinstance(v, float) else v for v in _parts(y)]
    large = ow.maximum(ow.abs(c), ow.abs(d))
    u, v = c / large, d / large  # so that no square overflows
    norm = c * u + d * v
    return Complex((ow.mul(a, u) + ow.mul(b, v)) / norm, (ow.mul(b, u) - ow.mul(a, v)) / norm)


@_operator("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(call: Call, condition: Tensor, x: Any, y: Any) -> Complex:
    return Complex(
        *[
            ow.where(condition, *[as_kind(v, call.dtype) for v in pair])
            for pair in zip(_parts(x), _parts(y), strict=True)
        ]
    )


@_operator("new_zeros", "zeros_like")
def _zeros(call: Call, *args: Any, **kwargs: Any) -> Complex:
    zeros = ow.full(tuple(call.node.meta["val"].shape), 0, call.dtype)
    return Complex(zeros, zeros)


@_operator("exp")
def _exp(call: Call, z: Complex) -> Complex:
    return _polar(call, ow.exp(z.real), z.imag)


@_operator("mm", "bmm", "matmul")
def _matmul(call: Call, x: Any, y: Any) -> Complex:
    (a, b), (c, d) = _parts(x), _parts(y)
    return Complex(ow.matmul(a, c) - ow.matmul(b, d), ow.matmul(a, d) + ow.matmul(b, c))


# --- Fourier transforms ---------------------------------------------------------------------------------------------


def _dft(x: Tensor, axis: int, length: int, inverse: bool, onesided: bool = False) -> Tensor:
    """The transform of pairs along an axis, which is not divided by the length."""
    norm: Literal["forward", "backward"] = "forward" if inverse else "backward"
    return ow.dft(x, length, axis, inverse=inverse, onesided=onesided, norm=norm)


def _normed(x: Tensor, n: int, mode: int) -> Tensor:
    """torch's modes: 0 leaves the transform as it is, 1 divides by the root of the length, 2 by the length."""
    return ow.scale(x, (1.0, n**-0.5, 1 / n)[mode]) if mode else x


def _axes(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    return [d % len(shape) for d in dims]


@_operator("_fft_r2c")
def _fft_r2c(call: Call, x: Tensor, dims: Sequence[int], mode: int, onesided: bool) -> Complex:
    *others, last = _axes(x.shape, dims)
    y = _dft(ow.expand_dims(x, -1), last, x.shape[last], False, onesided)
    for axis in others:
        y = _dft(y, axis, x.shape[axis], False)
    y = _normed(y, prod([x.shape[d] for d in (*others, last)]), mode)
    return Complex.of(y)


@_operator("_fft_c2c")
def _fft_c2c(call: Call, z: Complex, dims: Sequence[int], mode: int, forward: bool) -> Complex:
    y = z.pairs
    for axis in _axes(z.shape, dims):
        y = _dft(y, axis, z.shape[axis], not forward)
    y = _normed(y, prod([z.shape[d] for d in dims]), mode)
    return Complex.of(y)


@_operator("_fft_c2r")
def _fft_c2r(call: Call, z: Complex, dims: Sequence[int], mode: int, size: int) -> Tensor:
    *others, last = _axes(z.shape, dims)
    y = z.pairs
    for axis in others:
        y = _dft(y, axis, z.shape[axis], True)
    y = _dft(y, last, size, True, True)[..., 0]
    return _normed(y, prod([z.shape[d] for d in others]) * size, mode)
