"""The numbers of this plugin's kernels of which each machine has best values of its own: `opweave profile` measures
them.

The other sizes and limits in this package stay as they are; what decides each stands beside it: rounding errors, the
size of a cache line or of registers, memory, or where ``benchmarks/cpu_ops.py`` showed one way to become faster than
another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from opweave.contract import Tunable
from opweave.graph.opdef import build
from opweave.graph.tensor import Tensor
from opweave.ops.samples import operand, weight

__all__ = [
    "ATTENTION_WORK", "BLOCK_TILE", "COMPILED_ROWS", "COMPILED_WORK", "SHARED_TILE", "SPREAD", "SPREAD_PASS",
    "SPREAD_WORK", "TILE", "TUNABLES", "TUNABLES_OF_COMPILED", "TURNED_ROWS",
]  # fmt: skip


def _powers(first: int, last: int, step: int = 1) -> list[int]:
    return [1 << power for power in range(first, last + 1, step)]


def _of_bytes(op: str, powers: Sequence[int], operands: int = 1) -> Callable[[], list[Tensor]]:
    """Samples of an operation on rows of 1,024 f32, with outputs of 2 to each of those powers of bytes."""
    return lambda: [build(op, *[operand(1 << (power - 12), 1024)] * operands) for power in powers]


def _products(rows: Sequence[int], dtype: str = "f32") -> Callable[[], list[Tensor]]:
    """Samples of products with 768 rows of weights of 768 inputs."""
    return lambda: [build("linear", operand(n, 768), weight(768, 768, dtype=dtype)) for n in rows]


TILE: Final = Tunable("tile_bytes", 1 << 18, _powers(16, 20), _of_bytes("gelu", (20, 21)))
"""Bytes of one operand's tile: a few of them fit the second-level cache, and a pass over one takes many times as long
as calling it."""

SHARED_TILE: Final = Tunable("shared_tile_bytes", 1 << 19, _powers(17, 21), _of_bytes("gelu", (23, 24)))
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

BLOCK_TILE: Final = Tunable("block_tile", 1 << 17, _powers(14, 19), _products((4, 16), "iq4_nl"))
"""Weights that are decoded at a time: their f32 values and what they are made of fit the second-level cache, from which
a product with few rows reads them too."""

COMPILED_WORK: Final = Tunable("compiled_work", 1 << 19, _powers(15, 23, 2), _of_bytes("gelu", (14, 16, 18, 20, 22)))
"""Elementary operations, such as an addition or a part of a polynomial, from which on a compiled kernel is spread over
threads: with fewer, waking a thread takes longer than is saved."""

COMPILED_ROWS: Final = Tunable("compiled_rows", 16, (4, 8, 16, 24, 32, 48), _products((3, 6, 12, 20, 28, 40)))
"""Rows up to which a compiled product multiplies weights in registers; of more rows BLAS is faster."""

TUNABLES: Final = (TILE, SHARED_TILE, SPREAD, SPREAD_PASS, SPREAD_WORK, ATTENTION_WORK, TURNED_ROWS, BLOCK_TILE)
TUNABLES_OF_COMPILED: Final = (COMPILED_WORK, COMPILED_ROWS)
"""Those of compiled functions, which are there with the extra ``jit``."""
