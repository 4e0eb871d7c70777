"""A device with kernels that compute less than exactly, for tests of `precision`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import opweave as ow
from opweave.contract import Step
from opweave.graph.dtypes import DType
from opweave.ops.blocks import dequantize
from tests.support.devices import BASIC, Separate

BF16 = ow.as_dtype("bf16").numpy
Array = np.ndarray[Any, Any]


def to_bf16(array: Array) -> Array:
    """Rounded to 8 significant bits, as f64."""
    return array.astype(np.float32).astype(BF16).astype(np.float64)


def to_int8(array: Array, levels: int = 127) -> Array:
    """Rounded to 8-bit integers times one scale for every block of 32, as f64."""
    blocks = array.astype(np.float64).reshape(*array.shape[:-1], -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / levels
    steps = np.round(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0))
    return (steps * scale).reshape(array.shape)


class Rounding(Separate):
    """Computes products exactly, in bf16 and, of q8_0 weights, in int8. ``calls`` is what ran: precision and dtypes.

    Args:
        exact: whether it has exact kernels of products too.
        levels: of the largest value of a block, in int8; 127 is right.
        declared: what the kernel that computes in bf16 is declared for.
    """

    def __init__(
        self, name: str = "rounding", *, exact: bool = True, levels: int = 127, declared: Any = "bf16"
    ) -> None:
        products = ("linear", "matmul")
        super().__init__(name, [op for op in BASIC if exact or op not in products])
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        floats = lambda step: "quantized" if any(s.dtype.is_quantized for s in step.srcs) else None  # noqa: E731

        @self.kernels("linear", "matmul", dtypes="f32 bf16", precision=declared, when=floats)
        def in_bf16(stream: Any, op: str, out: Any, x: Any, w: Any, b: Any = None, **attrs: Any) -> Any:
            def run() -> None:
                self.calls.append(("bf16", tuple([s.dtype.name for s in (x, w, b) if s is not None])))
                weights = to_bf16(w.view)
                with np.errstate(all="ignore"):
                    result = to_bf16(to_bf16(x.view) @ (weights.T if op == "linear" else weights))
                    out.view[...] = result if b is None else result + b.view.astype(np.float64)

            return run

        def blocks_only(step: Step) -> str | None:
            return None if step.srcs[1].dtype.name == "q8_0" else "no q8_0"

        @self.kernels("linear", dtypes="f32 q8_0", when=blocks_only, precision="int8")
        def in_int8(stream: Any, op: str, out: Any, x: Any, w: Any, b: Any = None, *, blocks: DType) -> Any:
            def run() -> None:
                self.calls.append(("int8", (x.dtype.name, w.dtype.name)))
                weights = dequantize(w.view, blocks).astype(np.float64)
                result = to_int8(x.view, levels) @ weights.T
                out.view[...] = result if b is None else result + b.view.astype(np.float64)

            return run

        if exact:
            self.kernels("linear", dtypes="f32 q8_0", when=blocks_only)(self._exact_blocks)

    def _exact_blocks(self, stream: Any, op: str, out: Any, x: Any, w: Any, b: Any = None, *, blocks: DType) -> Any:
        def run() -> None:
            self.calls.append(("exact", (x.dtype.name, w.dtype.name)))
            with np.errstate(all="ignore"):
                result = x.view.astype(np.float64) @ dequantize(w.view, blocks).astype(np.float64).T
                out.view[...] = result if b is None else result + b.view.astype(np.float64)

        return run


def nmse(got: Array, want: Array) -> float:
    """Normalised mean square error."""
    difference = got.astype(np.float64) - want
    return float(np.mean(difference**2) / np.mean(np.asarray(want, np.float64) ** 2))


def named(rows: Iterable[Any]) -> dict[str, str]:
    """Node -> the precision that a report shows for it."""
    return {row.node: row.precision for row in rows}
