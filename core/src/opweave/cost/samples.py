"""The operations that profiles measure, each at several sizes; `opweave.cost.profile` says what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opweave.graph import opdef
from opweave.graph.dtypes import as_dtype
from opweave.graph.tensor import Leaf, Tensor, input, new_leaf

__all__ = ["EXPERTS", "SAMPLES", "Sample"]


class Sample(NamedTuple):
    """An operation to measure: ``build`` makes the nodes, one for each size; the first are tiny."""

    op: str
    dtype: str
    build: Callable[[], list[Tensor]]
    products: Callable[[], list[Tensor]] | None = None


def _leaf(*shape: int, dtype: str = "f32") -> Tensor:
    return input("measured " + "x".join(map(str, shape)) + dtype, shape, dtype)


def _weight(*shape: int, dtype: str = "f32") -> Tensor:
    """Blocks are no inputs."""
    return new_leaf(Leaf("weight", "measured"), shape, as_dtype(dtype))


ROWS: Final = ((8, 64), (128, 512), (1024, 1024))


EXPERTS: Final = 8


def _rows(op: str, *args: Any, operands: int = 1, dtype: str = "f32", **params: Any) -> Sample:
    """An operation over matrices."""

    def build() -> list[Tensor]:
        return [opdef.build(op, *[_leaf(*shape, dtype=dtype)] * operands, *args, **params) for shape in ROWS]

    return Sample(op, dtype, build)


def _scaled(op: str) -> Sample:
    """A normalization, with a scale for each column."""
    return Sample(op, "f32", lambda: [opdef.build(op, _leaf(*s), _leaf(s[1])) for s in ROWS])


def _linear(dtype: str) -> Sample:
    widths = ((32, 32), (256, 256), (1024, 1024)) if dtype != "q4_k" else ((256, 256), (1024, 1024))
    other = dtype if dtype in ("f64", "f16", "bf16") else "f32"

    def vectors() -> list[Tensor]:
        return [opdef.build("linear", _leaf(1, n, dtype=other), _weight(m, n, dtype=dtype)) for m, n in widths]

    def squares() -> list[Tensor]:
        sides = ((8, 64), (32, 256), (256, 512)) if dtype != "q4_k" else ((8, 256), (32, 512))
        return [opdef.build("linear", _leaf(m, n, dtype=other), _weight(n, n, dtype=dtype)) for m, n in sides]

    return Sample("linear", dtype, vectors, squares)


def _matmul() -> Sample:
    shapes = ((2, 8, 16), (8, 64, 64), (8, 256, 64))

    def build() -> list[Tensor]:
        return [opdef.build("matmul", _leaf(b, m, n), _leaf(b, n, m)) for b, m, n in shapes]

    return Sample("matmul", "f32", lambda: [opdef.build("matmul", _leaf(1, n), _leaf(n, n)) for n in (32, 256, 1024)],
                  build)  # fmt: skip


def _attention() -> Sample:
    def build() -> list[Tensor]:
        result = []
        for heads, rows, size in ((2, 8, 16), (4, 64, 32), (8, 256, 64)):
            q = _leaf(1, heads, rows, size)
            result.append(opdef.build("attention", q, q, q))
        return result

    return Sample("attention", "f32", build, build)


def _convolution() -> Sample:
    def build() -> list[Tensor]:
        sizes = ((4, 8), (16, 16), (32, 32))
        return [opdef.build("conv2d", _leaf(1, c, n, n), _leaf(c, c, 3, 3), padding=1) for c, n in sizes]

    return Sample("conv2d", "f32", build, build)


def _experts() -> Sample:
    """Few rows, for which the weights of the experts are read; and many."""

    def build(*sizes: tuple[int, int]) -> list[Tensor]:
        return [
            opdef.build("expert_linear", _leaf(rows, n), _leaf(EXPERTS, n, n), _leaf(rows, 2, dtype="i32"))
            for rows, n in sizes
        ]

    return Sample("expert_linear", "f32", lambda: build((4, 16), (4, 64), (4, 256)),
                  lambda: build((8, 16), (32, 64), (64, 256)))  # fmt: skip


def _embedding() -> Sample:
    def build() -> list[Tensor]:
        return [opdef.build("embedding", _leaf(r, c), _leaf(r // 2, dtype="i32")) for r, c in ROWS]

    return Sample("embedding", "f32", build)


SAMPLES: Final[tuple[Callable[[], Sample], ...]] = (
    *(lambda op=op: _rows(op, operands=2) for op in ("add", "div", "swiglu")),
    *(lambda op=op: _rows(op) for op in (
        "exp", "sqrt", "tanh", "relu", "sigmoid", "silu", "gelu", "gelu_tanh", "copy", "softmax",
    )),
    *(lambda op=op: _rows(op, -1) for op in ("sum", "max", "argmax", "cumsum")),
    *(lambda op=op: _scaled(op) for op in ("rms_norm", "layer_norm")),
    *(lambda dtype=dtype: _rows("add", operands=2, dtype=dtype) for dtype in ("f64", "f16", "bf16", "i32")),
    *(lambda dtype=dtype: _linear(dtype) for dtype in ("f32", "f64", "f16", "bf16", "q8_0", "q4_0", "q4_k")),
    lambda: _rows("cast", "f16"),
    lambda: Sample("concat", "f32", lambda: [opdef.build("concat", [_leaf(*s), _leaf(*s)], axis=-1) for s in ROWS]),
    lambda: Sample("where", "f32", lambda: [
        opdef.build("where", _leaf(*s, dtype="bool"), _leaf(*s), _leaf(*s)) for s in ROWS
    ]),
    lambda: Sample("top_k", "f32", lambda: [opdef.build("top_k", _leaf(*s), 2)[1] for s in ROWS]),
    lambda: Sample("max_pool2d", "f32", lambda: [
        opdef.build("max_pool2d", _leaf(1, c, n, n), 2) for c, n in ((4, 8), (16, 32), (64, 64))
    ]),
    lambda: Sample("rope", "f32", lambda: [
        opdef.build("rope", _leaf(r, h, 64), _leaf(r, dtype="i32")) for r, h in ((4, 2), (64, 8), (256, 16))
    ]),
    _matmul, _attention, _convolution, _experts, _embedding,
)  # fmt: skip
"""What is measured. `opweave.cost.profile` says which operations each of them stands for."""
