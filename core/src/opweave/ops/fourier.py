"""The discrete Fourier transform. Complex numbers are pairs along the last axis: the real and the imaginary part."""

from __future__ import annotations

from math import isqrt
from typing import Any, Final, Literal

import numpy as np

from opweave.errors import ShapeError
from opweave.graph.tensor import Tensor, constant
from opweave.ops.arrangement import flip, pad
from opweave.ops.elementwise import add, mul, scale
from opweave.ops.matmul import linear
from opweave.ops.movement import concat, reshape, transpose
from opweave.ops.operands import Array, as_axis, as_flag, as_integer, composite, floating, plain

__all__ = ["dft"]

DENSE: Final = 1 << 18
"""A transform whose matrix has up to so many elements is one product with it."""
FACTORS: Final = {"backward": (0.0, 1.0), "ortho": (0.5, 0.5), "forward": (1.0, 0.0)}
"""``norm`` -> the powers of 1 / length that the forward and the inverse transform are multiplied by."""


def dft(
    x: Any, length: int | None = None, axis: int = -2, *, inverse: bool = False, onesided: bool = False,
    norm: Literal["backward", "ortho", "forward"] = "backward",
) -> Tensor:  # fmt: skip
    """The discrete Fourier transform along an axis: NumPy's ``fft``, ``ifft``, ``rfft`` and ``irfft``.

    Short transforms are products with their matrix. A longer one of n = a · b elements is b transforms of a elements
    and a of b (Cooley and Tukey, "An Algorithm for the Machine Calculation of Complex Fourier Series", 1965); one of a
    large prime length is a convolution (Bluestein, "A Linear Filtering Approach to the Computation of Discrete Fourier
    Transform", 1970). Factors are computed in f64. Half types compute in f32; integers become f32.

    Args:
        x: shape (..., n, ..., p). The last axis holds the real and the imaginary part (p = 2), or the real part alone
            (p = 1).
        length: of the transform: the operand is cut or padded with zeros to it. ``None``: that of the operand; for an
            inverse one-sided transform, of m elements, 2 · (m − 1).
        axis: the axis of the transform, any but the last.
        inverse: whether the exponent is positive.
        onesided: forward, only the first length // 2 + 1 elements are returned, which say all for a real operand.
            Inverse, the operand holds only these, and the result is real: its last axis has length 1.
        norm: which transforms are divided by the length: the inverse one, the forward one, or both by its square root.

    Returns:
        The transform; its last axis has length 2, and 1 if it is inverse and one-sided.

    Raises:
        ShapeError: a last axis of another length than 1 or 2, no elements to transform, an unknown ``norm``.
        BoundsError: an axis that does not exist.
        DTypeError: a quantized operand.
    """
    y = floating("dft", x)
    plain("dft", y)
    at, back, one = as_axis("dft", axis, y), as_flag("dft", "inverse", inverse), as_flag("dft", "onesided", onesided)
    if y.ndim < 2 or y.shape[-1] not in (1, 2) or at == y.ndim - 1:
        raise ShapeError(f"dft: needs an axis of elements and a last axis of 1 or 2 parts; axis {axis}, {y.describe()}")
    if norm not in FACTORS:
        raise ShapeError(f"dft: norm is one of {', '.join(FACTORS)}, not {norm!r}")
    given = y.shape[at]
    n = (2 * (given - 1) if back and one else given) if length is None else as_integer("dft", "length", length)
    if n < 1:
        raise ShapeError(f"dft: a transform has at least one element, not {n}; {y.describe()}")
    return _along(y, at, n, back, one, (1 / n) ** FACTORS[norm][back])


@composite
def _along(x: Tensor, axis: int, n: int, inverse: bool, onesided: bool, factor: float) -> Tensor:
    """The transform of length ``n`` along an axis, times ``factor``."""
    needed = n // 2 + 1 if inverse and onesided else n
    x = x[tuple([slice(0, needed) if i == axis else slice(None) for i in range(x.ndim)])]
    order = [*[i for i in range(x.ndim - 1) if i != axis], axis, x.ndim - 1]
    y = _last(transpose(x, order), needed, n, inverse, onesided, factor)
    return transpose(y, [order.index(i) for i in range(x.ndim)])


def _last(x: Tensor, needed: int, n: int, inverse: bool, onesided: bool, factor: float) -> Tensor:
    """The same along the last axis but one, of which elements up to ``needed`` can be missing."""
    given, parts = x.shape[-2:]
    results = n if inverse or not onesided else n // 2 + 1
    kept = 1 if inverse and onesided else 2
    if given and given * parts * results * kept <= DENSE:
        return _product(x, _matrix(n, given, results, inverse, inverse and onesided)[:, :, :kept, :parts] * factor)
    x = pad(x, [*[(0, 0)] * (x.ndim - 2), (0, needed - given), (0, 2 - parts)])
    if inverse and onesided:  # the other half are the conjugates
        other = flip(x[..., 1 : (n + 1) // 2, :], -2)
        x = concat([x, mul(other, constant(np.array([1, -1]), x.dtype))], -2)
    y = _transformed(x, n, inverse)[..., :results, :kept]
    return y if factor == 1.0 else scale(y, factor)


def _roots(powers: Array, n: int, inverse: bool) -> Array:
    """exp(∓2πi · power / n). Integer powers are reduced first, so that the angles are exact to f64."""
    angles = 2 * np.pi / n * (powers % n)
    return np.asarray(np.exp(1j * angles if inverse else -1j * angles))


def _pairs(z: Array) -> Array:
    return np.stack([z.real, z.imag], -1)


def _matrix(n: int, given: int, results: int, inverse: bool, halved: bool) -> Array:
    """The matrix of the transform: (results, given, parts of a result, parts of an element). ``halved``: the operand
    holds the first half of elements only, whose conjugates are the others."""
    z = _roots(np.outer(np.arange(results), np.arange(given)), n, inverse)
    matrix = np.stack([_pairs(z), _pairs(1j * z)], -1)
    if halved:
        twice = np.full(given, 2.0)
        twice[0] = 1.0
        if n % 2 == 0 and given == n // 2 + 1:
            twice[-1] = 1.0
        matrix *= twice[:, None, None]
    return matrix


def _product(x: Tensor, matrix: Array) -> Tensor:
    """The product of the last two axes with a matrix of pairs, as `_matrix` makes it."""
    results, given, kept, parts = matrix.shape
    w = np.ascontiguousarray(matrix.transpose(0, 2, 1, 3)).reshape(results * kept, given * parts)
    y = linear(reshape(x, (*x.shape[:-2], given * parts)), constant(w, x.dtype))
    return reshape(y, (*x.shape[:-2], results, kept))


def _times(x: Tensor, z: Array) -> Tensor:
    """Pairs times known complex numbers: x · re(z) + (−im(x), re(x)) · im(z)."""
    real = constant(np.stack([z.real, z.real], -1), x.dtype)
    imaginary = constant(np.stack([-z.imag, z.imag], -1), x.dtype)
    return add(mul(x, real), mul(flip(x, -1), imaginary))


def _transformed(x: Tensor, n: int, inverse: bool) -> Tensor:
    """The transform of ``n`` pairs, which is not divided by ``n``."""
    if 4 * n * n <= DENSE:
        return _product(x, _matrix(n, n, n, inverse, False))
    a = next(i for i in range(isqrt(n), 0, -1) if n % i == 0)
    if a == 1:
        return _convolved(x, n, inverse)
    b, batch, k = n // a, x.shape[:-2], x.ndim - 2
    swapped = (*range(k), k + 1, k, k + 2)
    y = _transformed(transpose(reshape(x, (*batch, a, b, 2)), swapped), a, inverse)
    y = _times(y, _roots(np.outer(np.arange(b), np.arange(a)), n, inverse))
    y = _transformed(transpose(y, swapped), b, inverse)
    return reshape(transpose(y, swapped), x.shape)


def _convolved(x: Tensor, n: int, inverse: bool) -> Tensor:
    """Bluestein's transform: 2jk = j² + k² − (k − j)² makes of it a convolution, of which the length is free."""
    chirp = _roots(np.arange(n) ** 2, 2 * n, inverse)
    m = 1 << (2 * n - 2).bit_length()
    kernel = np.zeros(m, complex)
    kernel[:n] = chirp.conj()
    kernel[m - n + 1 :] = chirp.conj()[:0:-1]
    y = pad(_times(x, chirp), [*[(0, 0)] * (x.ndim - 2), (0, m - n), (0, 0)])
    y = _times(_transformed(y, m, False), np.fft.fft(kernel) / m)
    return _times(_transformed(y, m, True)[..., :n, :], chirp)
