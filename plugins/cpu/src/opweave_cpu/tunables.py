"""The numbers by which this plugin's kernels choose their paths.

Here are those of which each machine has best values of its own: `opweave profile` measures them. The others stand
beside their kernels, made by `limit`; what decides each is said there: rounding errors, memory, or where
``benchmarks/cpu_ops.py`` showed one way to become faster than another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from opweave.contract import NEVER, Limits, Tunable
from opweave.graph.opdef import build
from opweave.graph.tensor import Tensor
from opweave.ops.samples import operand, weight

__all__ = [
    "ATTENTION_WORK", "BLAS_ROWS", "BLOCK_TILE", "COLUMN_TILE", "COMPILED_ROWS", "COMPILED_WORK",
    "INTEGER_ROWS", "MANY_ROWS", "PAIR_ROWS", "PREFETCHED", "SHARED_TILE", "SMALL_PRODUCT", "SPREAD", "SPREAD_PASS",
    "SPREAD_WORK", "TILE", "TILE_ROWS", "TUNABLES", "TUNABLES_OF_COMPILED", "TURNED_ROWS", "VECTOR_ROWS",
    "limit",
]  # fmt: skip


limit: Final = Limits()
"""Declares the other numbers, beside their kernels."""


def _powers(first: int, last: int, step: int = 1) -> list[int]:
    return [1 << power for power in range(first, last + 1, step)]


def _of_bytes(op: str, powers: Sequence[int], operands: int = 1) -> Callable[[], list[Tensor]]:
    """Samples of an operation on rows of 1,024 f32, with outputs of ``2**power`` bytes for each of ``powers``."""
    return lambda: [build(op, *[operand(1 << (power - 12), 1024)] * operands) for power in powers]


def _products(rows: Sequence[int], dtype: str = "f32") -> Callable[[], list[Tensor]]:
    """Samples of products with 768 rows of weights of 768 inputs."""
    return lambda: [build("linear", operand(n, 768), weight(768, 768, dtype=dtype)) for n in rows]


_ELEMENT: Final = (8, NEVER)
"""Bounds of bytes of a tile: it holds an element of any type."""

TILE: Final = Tunable("tile_bytes", 1 << 18, _powers(16, 20), _of_bytes("gelu", (20, 21)), bounds=_ELEMENT)
"""Bytes of one operand's tile: a few of them fit the second-level cache, and a pass over one takes many times as long
as calling it."""

SHARED_TILE: Final = Tunable(
    "shared_tile_bytes", 1 << 19, _powers(17, 21), _of_bytes("gelu", (23, 24)), bounds=_ELEMENT
)
"""The same where several threads work: between passes they queue for the interpreter, so passes have to be longer."""

SPREAD: Final = Tunable("spread_bytes", 1 << 22, _powers(19, 24), _of_bytes("gelu", (19, 20, 21, 22, 23)))
"""Bytes of output from which on several passes are spread over threads: below, waking a thread takes as long as its
share of the work."""

SPREAD_PASS: Final = Tunable("spread_pass_bytes", 1 << 23, _powers(19, 25, 2), _of_bytes("mul", (20, 22, 24), 2))
"""The same for a single pass. Passes that only read are spread from twice as many on, columns from four times."""

SPREAD_WORK: Final = Tunable(
    "spread_work",
    1 << 21,
    _powers(17, 23, 2),
    lambda: [build("avg_pool2d", operand(1, 16, n, n), 3) for n in (32, 64, 128, 256)],
)
"""Elementary operations from which on independent jobs, such as the channels of an image, run in several threads: with
fewer, waking a thread takes longer than is saved."""

ATTENTION_WORK: Final = Tunable(
    "attention_work",
    1 << 28,
    _powers(22, 28, 2),
    lambda: [build("attention", *[operand(1, 12, n, 64)] * 3) for n in (64, 128, 256)],
)
"""Multiplications from which on the jobs of attention run in threads with one thread of BLAS each, instead of one after
the other with all threads of BLAS."""

TURNED_ROWS: Final = Tunable("turned_rows", 48, (1, 8, 16, 32, 48, 64, 96), _products((2, 4, 8, 12, 24, 40, 56, 80)))
"""Rows of ``x`` up to which ``x @ weights.T`` in f32 is computed as its transpose, ``weights @ x.T``: with few rows
OpenBLAS takes up to twice as long for the former; storing the latter transposed takes less than is won. 1: never."""

BLOCK_TILE: Final = Tunable("block_tile", 1 << 17, _powers(14, 19), _products((4, 16), "iq4_nl"), bounds=(256, NEVER))
"""Weights that are decoded at a time: their f32 values and their blocks fit the second-level cache, from which a
product with few rows then reads the values."""

MANY_ROWS: Final = Tunable("many_rows", 16, (4, 8, 16, 32, 64), _products((6, 12, 24, 48), "iq4_nl"))
"""Rows from which on a product takes longer than decoding the weights, and is faster with more of them at a time."""

COLUMN_TILE: Final = Tunable(
    "column_tile_bytes",
    1 << 20,
    _powers(17, 22),
    lambda: [build("conv_transpose2d", operand(1, 64, n, n), weight(64, 32, 3, 3)) for n in (28, 56)],
)
"""Bytes of columns at a time in transposed convolutions: so many stay in the second-level cache until they are added
up."""

BLAS_ROWS: Final = Tunable(
    "blas_rows",
    1 << 18,
    _powers(14, 22, 2),
    lambda: [build("sum", operand(1 << (power - 8), 256), 1) for power in (15, 17, 19, 21)],
)
"""Elements up to which BLAS adds up rows in one call: beyond, threads share them."""

COMPILED_WORK: Final = Tunable("compiled_work", 1 << 19, _powers(15, 23, 2), _of_bytes("gelu", (14, 16, 18, 20, 22)))
"""Elementary operations, such as an addition or a part of a polynomial, from which on a compiled kernel is spread over
threads: with fewer, waking a thread takes longer than is saved. With a quarter, steps of training of a small
perceptron, where products of BLAS lie between such kernels and send the waiting threads away, took 1.8 times as
long."""

COMPILED_ROWS: Final = Tunable("compiled_rows", 16, (4, 8, 16, 24, 32, 48), _products((3, 6, 12, 20, 28, 40)))
"""Rows up to which a compiled product multiplies weights in registers; of more rows BLAS is faster."""

VECTOR_ROWS: Final = Tunable("vector_rows", 8, (2, 4, 8, 12, 16), _products((3, 6, 10, 14)))
"""Rows from which on they are the lanes of the vectors of a compiled product in f32: of fewer, too many lanes would be
empty."""

INTEGER_ROWS: Final = Tunable("integer_rows", 5, (1, 3, 5, 8), _products((2, 4, 6, 10), "q4_0"))
"""Rows up to which the integers of quantized weights are multiplied as they are unpacked. For more rows they are
transposed first."""

TILE_ROWS: Final = Tunable("tile_rows", 9, (4, 6, 9, 12, 16, 32), _products((5, 7, 10, 14, 24), "q4_0"))
"""Rows from which on they are tiles, with quantized weights, where the processor multiplies tiles. With fewer, most of
the 16 rows of a tile are empty."""

PREFETCHED: Final = Tunable(
    "prefetched_bytes",
    4096,
    (512, 1024, 2048, 4096, 8192),
    lambda: [build("linear", operand(1, 4096), weight(8192, 4096, dtype="q8_0"))],
)
"""Bytes by which rows of quantized weights are prefetched into the second-level cache. The processor does so too, but
anew for each page, and reads memory at 0.6 to 0.8 of its speed."""

PAIR_ROWS: Final = Tunable("pair_rows", 4, (2, 4, 8, 16), _products((3, 6, 12), "bf16"))
"""Rows from which on products in bf16 transpose the weights, for the instruction that multiplies pairs."""

SMALL_PRODUCT: Final = Tunable(
    "small_product",
    1 << 21,
    _powers(15, 25, 2),
    lambda: [build("matmul", operand(12, n, 64), operand(12, 64, n)) for n in (32, 64, 128, 256)],
)
"""Multiplications of one of several products up to which a compiled function computes them, each in one thread. Of
larger ones each is shared among all threads."""

TUNABLES: Final = (
    TILE, SHARED_TILE, SPREAD, SPREAD_PASS, SPREAD_WORK, ATTENTION_WORK, TURNED_ROWS, BLOCK_TILE, MANY_ROWS,
    COLUMN_TILE, BLAS_ROWS,
)  # fmt: skip
TUNABLES_OF_COMPILED: Final = (
    COMPILED_WORK, COMPILED_ROWS, VECTOR_ROWS, INTEGER_ROWS, TILE_ROWS, PREFETCHED, SMALL_PRODUCT, PAIR_ROWS,
)  # fmt: skip
"""The tunables of compiled functions, which exist with the extra ``jit``."""
