"""Signals: Fourier transforms, windows and filter banks."""

from __future__ import annotations

from typing import Any

import numpy as np

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.host import host_operation
from opweave_onnx.operators.movement import axis_of, taken
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array, dtype_of
from opweave_onnx.trace import Call


@host_operation("inverse_dft")
def _inverse(x: Array, *, axis: int, length: int | None) -> Array:
    """The inverse discrete Fourier transform as NumPy rounds it: results that ONNX's own tests expect depend on it."""
    wide = x if x.dtype == np.float32 else x.astype(np.float64)
    found = np.fft.ifft(wide[..., 0] if x.shape[-1] == 1 else wide[..., 0] + 1j * wide[..., 1], length, axis)
    return np.stack([found.real, found.imag], -1)


@operator("DFT")
def _dft_node(call: Call, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None) -> Tensor:
    at = axis_of(
        x, call.get("axis", 1) if call.version < 20 else -2 if axis is None else int(call.known(axis).reshape(()))
    )
    n = None if length is None else int(call.known(length).reshape(()))
    inverse, onesided = bool(call.get("inverse", 0)), bool(call.get("onesided", 0))
    if inverse and not onesided:
        shape = [*x.shape[:-1], 2]
        shape[at] = shape[at] if n is None else n
        return _inverse(x, shape=shape, dtype=x.dtype, axis=at, length=n)
    return ow.dft(x, n, at, inverse=inverse, onesided=onesided)


@operator("STFT")
def _stft_node(
    call: Call, x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None
) -> Tensor:
    hop = int(call.known(step).reshape(()))
    n = window.size if window is not None else int(call.known(length).reshape(()))
    weights = window if window is not None else call.tensor(np.ones(n, x.dtype.numpy))
    onesided = bool(call.get("onesided", 1))
    ids = np.arange((x.shape[1] - n) // hop + 1).reshape(-1, 1) * hop + np.arange(n)
    frames = taken(x, call.tensor(ids), 1) * ow.reshape(weights, (n, 1))
    return ow.dft(frames, onesided=onesided)


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
