"""Signals: Fourier transforms, windows and filter banks."""

from __future__ import annotations

from math import prod
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.graph.dtypes import f32
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.host import HostOperation, host_operation
from opweave_onnx.operators.movement import axis_of, taken
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array, dtype_of
from opweave_onnx.trace import Call

MATRIX: Final = 1 << 20
"""A forward transform whose matrix has up to so many elements is a product with it, which devices run. Longer and
inverse transforms are fast Fourier transforms on the host."""


def _transformed(x: Array, *, axis: int, length: int, inverse: bool, onesided: bool) -> Array:
    """The discrete Fourier transform; the last axis holds real and imaginary parts."""
    wide = x if x.dtype == np.float32 else x.astype(np.float64)
    if inverse and onesided:
        real = np.fft.irfft(wide[..., 0] + 1j * wide[..., 1], length, axis)
        return np.asarray(real[..., None])
    if x.shape[-1] == 1 and onesided:
        found = np.fft.rfft(wide[..., 0], length, axis)
    else:
        values = wide[..., 0] if x.shape[-1] == 1 else wide[..., 0] + 1j * wide[..., 1]
        found = np.fft.ifft(values, length, axis) if inverse else np.fft.fft(values, length, axis)
        if onesided:
            found = np.take(found, range(length // 2 + 1), axis)
    return np.stack([found.real, found.imag], -1)


_dft: Final = HostOperation("dft", _transformed)


def _matrix(length_in: int, parts: int, **attrs: Any) -> Array:
    """The matrix of the transform, which is linear: its columns are the transforms of unit vectors. Rows and columns
    run over the elements and their real and imaginary parts."""
    units = np.eye(length_in * parts).reshape(-1, length_in, parts)
    return np.ascontiguousarray(_transformed(units, axis=1, **attrs).reshape(length_in * parts, -1).T)


def _multiplied(call: Call, x: Tensor, matrix: Array, length: int, parts: int) -> Tensor:
    """The last two axes, elements and parts, of the product with a matrix."""
    wide = x.dtype if x.dtype.itemsize >= 4 else f32
    flat = ow.reshape(x.astype(wide), (*x.shape[:-2], x.shape[-2] * x.shape[-1]))
    found = ow.linear(flat, call.tensor(matrix.astype(wide.numpy)))
    return ow.reshape(found, (*x.shape[:-2], length, parts)).astype(x.dtype)


@operator("DFT")
def _dft_node(call: Call, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None) -> Tensor:
    at = axis_of(
        x, call.get("axis", 1) if call.version < 20 else -2 if axis is None else int(call.known(axis).reshape(()))
    )
    inverse, onesided = bool(call.get("inverse", 0)), bool(call.get("onesided", 0))
    n = x.shape[at] if length is None else int(call.known(length).reshape(()))
    if inverse and onesided and length is None:
        n = 2 * (x.shape[at] - 1)
    shape = list(x.shape)
    shape[at] = n // 2 + 1 if onesided and not inverse else n
    shape[-1] = 1 if inverse and onesided else 2
    if not inverse and x.shape[at] * x.shape[-1] * shape[at] * shape[-1] <= MATRIX:
        order = [*[i for i in range(x.ndim - 1) if i != at], at, x.ndim - 1]
        matrix = _matrix(x.shape[at], x.shape[-1], length=n, inverse=inverse, onesided=onesided)
        found = _multiplied(call, ow.transpose(x, order), matrix, shape[at], shape[-1])
        return ow.transpose(found, [order.index(i) for i in range(x.ndim)])
    return _dft(x, shape=shape, dtype=x.dtype, axis=at, length=n, inverse=inverse, onesided=onesided)


@host_operation("stft")
def _stft(x: Array, window: Array, *, step: int, onesided: bool) -> Array:
    """The Fourier transforms of frames of a signal, multiplied by a window."""
    n = window.size
    wide = x.astype(np.float64)
    values = wide[..., 0] if x.shape[-1] == 1 else wide[..., 0] + 1j * wide[..., 1]
    frames = np.stack([values[:, i : i + n] for i in range(0, values.shape[1] - n + 1, step)], 1) * window
    found = np.fft.fft(frames, n, -1)
    if onesided:
        found = found[..., : n // 2 + 1]
    return np.stack([found.real, found.imag], -1)


@operator("STFT")
def _stft_node(
    call: Call, x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None
) -> Tensor:
    hop = int(call.known(step).reshape(()))
    n = window.size if window is not None else int(call.known(length).reshape(()))
    weights = window if window is not None else call.tensor(np.ones(n, x.dtype.numpy))
    onesided = bool(call.get("onesided", 1))
    shape = (x.shape[0], (x.shape[1] - n) // hop + 1, n // 2 + 1 if onesided else n, 2)
    if n * x.shape[2] * prod(shape[2:]) <= MATRIX:
        ids = np.arange(shape[1]).reshape(-1, 1) * hop + np.arange(n)
        frames = taken(x, call.tensor(ids), 1) * ow.reshape(weights, (n, 1))
        return _multiplied(call, frames, _matrix(n, x.shape[2], length=n, inverse=False, onesided=onesided), *shape[2:])
    return _stft(x, weights, shape=shape, dtype=x.dtype, step=hop, onesided=onesided)


@operator("HannWindow", "HammingWindow", "BlackmanWindow", raw=True)
def _window(call: Call, size: Any) -> Array:
    n = int(call.known(size).reshape(()))
    period = n if call.get("periodic", 1) else n - 1
    angle = 2 * np.pi * np.arange(n) / max(period, 1)
    match call.node.op:
        case "HannWindow":
            values = 0.5 - 0.5 * np.cos(angle)
        case "HammingWindow":
            values = 25 / 46 - 21 / 46 * np.cos(angle)
        case _:
            values = 0.42 - 0.5 * np.cos(angle) + 0.08 * np.cos(2 * angle)
    return values.astype(dtype_of(call.get("output_datatype", 1)).numpy)


@operator("MelWeightMatrix", raw=True)
def _mel(call: Call, bands: Any, length: Any, rate: Any, low: Any, high: Any) -> Array:
    n, size, hertz = (int(call.known(v).reshape(())) for v in (bands, length, rate))
    first, last = (float(call.known(v).reshape(())) for v in (low, high))
    bins = size // 2 + 1

    def mel(f: float) -> float:
        return 2595 * float(np.log10(1 + f / 700))

    step = (mel(last) - mel(first)) / (n + 2)  # as the standard has it, which leaves the last band out
    places = 700 * (10 ** ((mel(first) + step * np.arange(n + 2)) / 2595) - 1)
    edges = ((size + 1) * places // hertz).astype(int)
    result = np.zeros((bins, n))
    for i in range(n):
        low_, center, high_ = edges[i : i + 3]
        rising = np.arange(low_, center + 1)
        result[rising, i] = 1.0 if center == low_ else (rising - low_) / (center - low_)
        falling = np.arange(center, high_)
        if high_ > center:
            result[falling, i] = (high_ - falling) / (high_ - center)
    return result.astype(dtype_of(call.get("output_datatype", 1)).numpy)
