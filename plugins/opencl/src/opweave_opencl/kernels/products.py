"""Products of matrices on a device: which kernel suits a product, and its call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Final

from opweave.contract import NEVER, Arg, Call
from opweave.graph.dtypes import DType, f32
from opweave_opencl.kernels.blocks import block_macros
from opweave_opencl.layouts import Axes, coalesce, element_offset, element_strides, padded, padded_strides
from opweave_opencl.tuning import card_limit, limit, processor_limit

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream
    from opweave_opencl.tuning import Tuning

__all__ = ["AMPLE", "BLOCK_ROWS", "DEPTH", "TYPES", "Product", "launch_product", "matrix_product"]

TYPES: Final = "f32 f16 bf16 i64 i32"
"""Element types that multiply; f16 and bf16 add up in f32."""

FEW_ROWS: Final = limit("few_rows", 8, 1, 64)
"""Up to so many rows, a column at a time is faster than tiles."""

COLUMNS: Final = 32
"""Columns of one panel of the kernel ``panel``: two vectors."""

SHORT: Final = processor_limit("short_rows", 64, 1, 64, bounds=(1, 64))
"""Up to so many rows, a work-item takes several panels: it packs longer parts of b's rows, so it reads fewer pages.
Local memory holds no more rows of them."""

WIDE: Final = processor_limit("wide_columns", 512, 1, 1 << 12)
"""Columns for each processor from which on it does that."""

SHORT_SUMS: Final = processor_limit("short_sums", 128, 1, 1 << 12)
"""Up to this length of k, packing b into panels takes less than adding up the lanes of one vector for each element of
the result, from `PACKED_ROWS` on (measured on Intel's driver and PoCL: 0.44 to 0.95 of the time)."""

PACKED_ROWS: Final = processor_limit("packed_rows", 16, 1, 256)
"""Rows from which on that is so."""

BLOCK_ROWS: Final = processor_limit("block_rows", 16, 1, 128)
"""Rows below which the block of a work-item is not divided to keep more processors busy."""

DEPTH: Final = processor_limit("product_depth", 256, 16, 256, bounds=(16, 256))
"""Elements along k that a work-item packs or unpacks at once, a multiple of 16; some kernels take several times as
many. Local memory holds no more."""

AMPLE: Final = processor_limit("ample_local_bytes", 1 << 17, 1 << 17, 1 << 17, bounds=(1 << 17, NEVER))
"""Bytes of local memory from which on work-items take large blocks, which fill so much."""

LARGE_TILES: Final = card_limit("large_tiles", 1 << 15, 1, 1 << 20)
"""Elements of the result for each processor from which on a group takes tiles of 128 x 128, not 64 x 64."""


@dataclass(frozen=True)
class Product:
    """``out[..., m, n] = sum over k of a[..., m, k] * b[..., k, n] (+ bias)``, all lengths and steps in elements.

    Attributes:
        out, a, b, bias: the operands' memory.
        m, n, k: lengths.
        out_m ... bias_n: steps along these axes; those of b and ``bias_m`` are 0 where nothing changes along them.
        batch: lengths of the axes before, innermost first; ``steps``: of out, a, b and possibly bias along them.
        blocks: the type of b's quantized blocks; ``b_n`` and b's steps are in bytes then, and ``b_k`` is 1.
        route: for rows that choose their b: which rows go to which, made by ``experts.cl``. ``m`` is then the number of
            all rows together, the only axis of batches is that of b, and ``used``, ``out_u``, ``a_u`` say how rows lie.
    """

    out: Arg
    a: Arg
    b: Arg
    bias: Arg | None
    m: int
    n: int
    k: int
    out_m: int
    out_n: int
    a_m: int
    a_k: int
    b_k: int
    b_n: int
    bias_m: int = 0
    bias_n: int = 0
    batch: Axes = (1,)
    steps: tuple[Axes, ...] = ((0,), (0,), (0,))
    blocks: DType | None = None
    route: Arg | None = None
    used: int = 1
    out_u: int = 0
    a_u: int = 0
    macros: dict[str, str] = field(default_factory=dict)
    extra: tuple[int, ...] = ()
    """Macros and parameters for a b whose elements are found by rules of their own."""

    @property
    def along_k(self) -> bool:
        """Whether rows of a and columns of b lie without gaps."""
        return (self.a_k == 1 or self.k == 1) and (self.b_k == 1 or self.k == 1) and not self.extra

    def transposed(self) -> Product:
        """The same product as that of the transposes in the other order."""
        return replace(
            self,
            a=self.b,
            b=self.a,
            m=self.n,
            n=self.m,
            out_m=self.out_n,
            out_n=self.out_m,
            a_m=self.b_n,
            a_k=self.b_k,
            b_k=self.a_k,
            b_n=self.a_m,
            bias_m=self.bias_n,
            bias_n=self.bias_m,
            steps=(self.steps[0], self.steps[2], self.steps[1], *self.steps[3:]),
        )


def matrix_product(
    operands: tuple[Arg, ...],
    rows: Axes,
    steps: tuple[Axes, Axes, Axes],
    *,
    n: tuple[int, int, int],
    k: tuple[int, int, int],
    blocks: DType | None = None,
) -> Product:
    """The product ``out[..., n] = sum over k of a[..., k] * b[..., k, n] (+ bias[n])``.

    Args:
        operands: out, a, b and possibly bias.
        rows: the axes of the output but the last, outermost first; ``steps`` are those of out, a and b along them.
        n: length of the last axis, step of out and of b along it.
        k: length of the summed axis, step of a and of b along it.
    """
    lengths, (o_rows, a_rows, b_rows) = coalesce(rows, steps)
    if b_rows[0] == 0 or lengths == (1,):  # the innermost rows share one b: they are the rows of a product
        m, o_step, a_step = lengths[0], o_rows[0], a_rows[0]
        lengths, o_rows, a_rows, b_rows = lengths[1:], o_rows[1:], a_rows[1:], b_rows[1:]
    else:
        m, o_step, a_step = 1, 0, 0
    out, a, b, *rest = operands
    bias = rest[0] if rest else None
    bias_n = element_strides(bias)[0] if bias else 0
    along = (o_step, n[1], a_step, k[1], k[2], n[2], 0, bias_n)
    return Product(out, a, b, bias, m, n[0], k[0], *along, lengths, (o_rows, a_rows, b_rows), blocks)


def launch_product(stream: OpenCLStream, product: Product) -> Call:
    """The call that computes a product, by the kernel of ``products.cl`` that suits the device and the layout."""
    tuning = stream.target.tuning
    p = product
    macros = {
        "T": p.out.dtype.name,
        "BIAS": (p.bias or p.out).dtype.name,
        "DIRECT": str(int(not p.out.dtype.is_half)),
        "ROUTED": str(int(p.route is not None)),
        **p.macros,
    }
    if p.blocks is not None:
        macros |= block_macros(p.blocks)
    block = width = 0
    size: tuple[int, int, int]
    if tuning.tiled:
        if p.along_k and (p.m <= FEW_ROWS.value or _rows_each(p) <= FEW_ROWS.value // 2):
            group = (tuning.row_group, 1, 1)
            kernel, size = "strip", (p.n * tuning.row_group, 1, _batches(p))
            macros |= {"STRIP": "1"} | stream.target.sharing()
        else:
            each = _tile(p, tuning)
            side = 16 * each
            group = (16, 16, 1)
            kernel, size = "tile", (-(-p.n // side) * 16, -(-_rows_each(p) // side) * 16, _batches(p))
            macros |= {"TILE": "1", "EACH": str(each)}
    elif p.blocks is not None and _rows_each(p) == 1 and p.out.dtype is f32:
        width = max(1, min(32, p.n * prod(p.batch) // (2 * tuning.wanted)))
        group = (1, 1, 1)
        kernel, size = "decoded", (-(-p.n // width), 1, _batches(p))
        macros |= {"DECODED": "1", "PAIRED": str(int(tuning.wide_registers))}
    elif p.along_k and not _sums_are_short(p):
        block, depth, width = _dots_sizes(p, tuning)
        one = _rows_each(p) == 1
        group = (1, 1, 1)
        kernel, size = "dots", (-(-p.n // width), -(-_rows_each(p) // block), _batches(p))
        macros |= {"DOTS": "1", "ROWS": "1" if one else "4", "BLOCK": str(_most_rows(p, tuning)), "DEPTH": str(depth)}
    else:
        if p.b_n != 1 and p.a_m == 1 and not p.extra:
            p = p.transposed()  # vectors lie along n
        ample, most = tuning.local >= AMPLE.value, _most_rows(p, tuning)
        panels, depth = 1, DEPTH.value if ample else min(DEPTH.value, 64)
        if p.m <= SHORT.value and ample and p.n >= WIDE.value * tuning.units and not p.extra:
            panels, depth, most = 4, min(DEPTH.value, 64), min(most, SHORT.largest)
        columns = panels * COLUMNS
        block = _panel_rows(p, tuning, columns)
        group = (1, 1, 1)
        kernel, size = "panel", (-(-p.n // columns), -(-p.m // block), _batches(p))
        macros |= {"PANEL": "1", "PANELS": str(panels), "BLOCK": str(most), "DEPTH": str(depth)}
    operands = [p.out, p.a, p.b, p.out if p.bias is None else p.bias]
    if p.route is not None:
        operands.append(p.route)
    program = stream.target.programs.get("convolution" if p.extra else "products", macros)
    return stream.launch(program, kernel, size, group, operands, _words(p, block, width))


def _sums_are_short(p: Product) -> bool:
    if p.blocks is not None or p.route is not None:
        return False
    return p.k <= SHORT_SUMS.value and p.m >= PACKED_ROWS.value and p.n >= COLUMNS


def _words(p: Product, block: int, width: int) -> list[int]:
    b_offset = element_offset(p.b) if p.blocks is None else p.b.offset
    words = [p.m, p.n, p.k, len(p.batch), *padded(p.batch, 1)]
    words += [element_offset(p.out), element_offset(p.a), b_offset, element_offset(p.bias) if p.bias else 0]
    words += padded_strides((*p.steps, *[()] * (4 - len(p.steps))))
    words += [p.out_m, p.out_n, p.a_m, p.a_k, p.b_k, p.b_n, p.bias_m, p.bias_n, int(p.bias is not None)]
    words += [block, width, p.used, p.out_u, p.a_u, element_offset(p.route) if p.route else 0, *p.extra]
    return words


def _batches(p: Product) -> int:
    """Batches, and one more where rows choose theirs, for the rows that choose none."""
    return prod(p.batch) + (p.route is not None)


def _rows_each(p: Product) -> int:
    """Rows of one product; on average where rows choose their b."""
    return p.m if p.route is None else -(-p.m // p.batch[0])


def _tile(p: Product, tuning: Tuning) -> int:
    """The side of what one work-item computes: large, but with groups for every processor, and 24 KiB of tiles."""
    wide = _rows_each(p) * p.n * _batches(p) >= LARGE_TILES.value * tuning.units
    return 8 if wide and tuning.local >= 24 << 10 and p.out.dtype.name != "i64" else 4


def _most_rows(p: Product, tuning: Tuning) -> int:
    """The most rows of a work-item of a processor, as its local memory allows."""
    if tuning.local < AMPLE.value:
        return 16
    return 64 if p.out.dtype.is_half or p.out.dtype.itemsize > 4 else 128


def _panel_rows(p: Product, tuning: Tuning, columns: int) -> int:
    """Rows of one work-item: many, since it packs panels for them, but few enough that every core has a block."""
    rows = _most_rows(p, tuning)
    panels = -(-p.n // columns) * prod(p.batch)
    while rows > BLOCK_ROWS.value and panels * -(-p.m // rows) < tuning.wanted:
        rows //= 2
    return rows


def _dots_sizes(p: Product, tuning: Tuning) -> tuple[int, int, int]:
    """Rows and columns of one work-item, and how much of k it takes at once."""
    rows, width = _most_rows(p, tuning), 16
    m = _rows_each(p)
    if m <= FEW_ROWS.value:
        width = 4
    least, pieces = BLOCK_ROWS.value, 2 * tuning.wanted
    while (rows > least or width > 4) and -(-p.n // width) * -(-m // rows) * prod(p.batch) < pieces:
        width, rows = (width // 2, rows) if width > 4 else (width, rows // 2)
    depth = DEPTH.value if p.blocks is None else DEPTH.largest  # of whole blocks
    if p.out.dtype.is_half:
        return rows, depth, width
    if m == 1 and p.blocks is None:
        return rows, 1 << 30, width  # rows of b from one end to the other
    return rows, 4 * depth if tuning.local >= AMPLE.value else depth, width
