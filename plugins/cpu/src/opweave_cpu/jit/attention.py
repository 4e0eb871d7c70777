"""Attention: all of it for a few queries, and for more of them what lies between the products of BLAS.

For a few queries, keys and values are read once, where they lie, in their own type, also by a block table.
The keys are cut into chunks, each of which some thread takes for all queries of a group: scores, their largest one,
shares and sums of values, as in T. Dao et al., "Flash-Decoding for long-context inference", 2023. A second kernel adds
up the sums of the chunks. Scores are computed for `LANES` pairs of a query and a key at a time: lane r · n + j is
that of query r and key j, where n is `LANES` by the number of queries, rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir

from opweave.contract import Arg, Call, Stream
from opweave.graph.dtypes import as_dtype
from opweave_cpu.jit.blocks import decoded
from opweave_cpu.jit.compiler import MachineCode
from opweave_cpu.jit.functions import exp, larger, tanh
from opweave_cpu.jit.rows import Row
from opweave_cpu.jit.vectors import LANES, VECTOR_BYTES, Vector, fma, load, select, store, totals, vector_type
from opweave_cpu.jit.walk import Operand, Walk, bind_walk, moved
from opweave_cpu.jit.writer import Cell, Writer
from opweave_cpu.tiles import in_turn

__all__ = ["CHUNK", "bind_attention", "bind_shares", "chunks_of", "padded"]

CHUNK: Final = 256
"""Keys of a chunk at most: beside so many, storing the sums of their values takes no time."""

TOGETHER: Final = 32
"""Keys whose values are read at a time, while the sums of some columns are in registers."""

_ITEM: Final = 4
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)


class _Form(NamedTuple):
    """What a kernel is compiled for: heads of a group and tokens; elements of a key and of a value; the types of all
    but keys and values, of keys, and of values; whether there is a mask, and whether all queries share it; whether
    scores are capped; whether keys and values are found by a block table."""

    heads: int
    tokens: int
    size: int
    values: int
    dtype: str
    of_keys: str
    of_values: str
    masked: bool
    shared: bool
    capped: bool
    paged: bool

    @property
    def rows(self) -> int:
        """Queries of a group, rounded up to a power of two."""
        return padded(self.heads * self.tokens)

    @property
    def keys(self) -> int:
        """Keys whose scores are computed at a time."""
        return LANES // self.rows


def padded(rows: int) -> int:
    """The power of two from ``rows`` on."""
    return 1 << (rows - 1).bit_length()


def chunks_of(keys: int) -> tuple[int, int]:
    """How many keys a chunk has, and how many chunks there are; the last one may be shorter."""
    count = -(-keys // CHUNK)
    length = -(-keys // (count * LANES)) * LANES
    return length, -(-keys // length)


def bind_attention(
    stream: Stream,
    out: Arg,
    q: Arg,
    k: Arg,
    v: Arg,
    mask: Arg | None,
    scale: float,
    soft_cap: float,
    sums: Arg,
    largest: Arg,
    table: Arg | None = None,
    keys: int = 0,
) -> Call:
    """The call of attention of at most `LANES` queries of each group, of sizes that are multiples of `LANES`.

    Args:
        out, q, k, v, mask: f32, f16 or bf16, as of `opweave.attention`; elements of a row lie side by side. Keys and
            values may also be of other types than the queries, and in blocks that `opweave_cpu.jit.blocks` decodes.
        table: i64 (batch, blocks of a sequence), the block table: ``k`` and ``v`` then are (blocks, groups, keys of a
            block, size), with equal numbers of rows from one block to the next, and each sequence has ``keys`` keys.
        sums: memory for the sums of values, f32 (batch, groups, chunks, queries rounded up, values).
        largest: for the largest score and the sum of the shares, f32 (batch, groups, chunks, 2, `LANES`).
    """
    (batch, all_heads, tokens, size), groups, keys = q.shape, k.shape[1], keys or k.shape[2]
    heads, item = all_heads // groups, q.dtype.itemsize
    shared = mask is not None and not (mask.strides[1] and heads > 1) and not (mask.strides[2] and tokens > 1)
    form = _Form(
        heads, tokens, size, v.shape[3], q.dtype.name, k.dtype.name, v.dtype.name, mask is not None, shared,
        bool(soft_cap), table is not None,
    )  # fmt: skip
    length, count = chunks_of(keys)

    def rows(arg: Arg) -> tuple[int, int, int, int]:
        """Bytes from one batch, group, head and token to the next."""
        n, h, t, _ = arg.strides
        return n, h * heads, h, t

    def of_keys(arg: Arg) -> tuple[int, ...]:
        n, g, j, _ = arg.strides
        return (n, g, j * length, j, 0, 0) if table is None else (0, g, 0, j, 0, 0)

    *queries, head, token = rows(q)
    strides: list[tuple[int, ...]] = [(*queries, 0, 0, head, token), of_keys(k), of_keys(v)]
    args = [q, k, v]
    if mask is not None:
        *queries, head, token = rows(mask)
        strides.append((*queries, item * length, item, head, token))
        args.append(mask)
    numbers = [scale / soft_cap, soft_cap] if soft_cap else [scale]
    if table is not None:
        n, j, apart = *table.strides, k.strides[0] // k.strides[2]
        # The second address is that of the first, and so many bytes more as keys lie before the chunk.
        strides += [(n, 0, 0, j, 0, 0), (n, 0, length, 0, 0, 0)]
        args += [table, table]
        numbers += [k.shape[2], apart]
    for arg in (sums, largest):
        strides.append((*arg.strides[:3], 0, 0, 0))
        args.append(arg)
    code = stream.artefact(("attention", form), partial(_scores_and_sums, form))
    calls: list[Call] = []
    whole = keys // length
    for first, some, n in ((0, whole, length), (whole, count - whole, keys - whole * length)):
        if some:
            there = [moved(arg, first * along[2]) for arg, along in zip(args, strides, strict=True)]
            walk = Walk((batch, groups, some, n, heads, tokens), tuple(strides), 3)
            calls.append(bind_walk(stream, code, walk, there, numbers, work=2 * (size + form.values)))
    *results, head, token = rows(out)
    strides = [(*arg.strides[:3], 0, 0) for arg in (sums, largest)] + [(*results, 0, head, token)]
    code = stream.artefact(("sums of attention", form), partial(_combined, form))
    walk = Walk((batch, groups, count, heads, tokens), tuple(strides), 2)
    return in_turn([*calls, bind_walk(stream, code, walk, [sums, largest, out], work=form.values)])


def _scores_and_sums(form: _Form) -> MachineCode:
    """The kernel of a chunk: the sums of its values by their shares, exp(score - largest), and of the shares."""
    optional = [form.dtype] * form.masked + ["i64", "i64"] * form.paged
    types = [form.dtype, form.of_keys, form.of_values, *optional, "f32", "f32"]
    writer = Writer(6, [Operand(name, as_dtype(name).itemsize) for name in types])
    code, keys = writer.code, writer.lengths[3]
    factor = writer.scalar().to("f32")
    cap = writer.scalar().to("f32") if form.capped else None
    room, apart = (writer.integer(), writer.integer()) if form.paged else (None, None)
    queries = writer.array(vector_type("f32"), form.rows * form.size // LANES)
    shares = writer.array(vector_type("f32"), CHUNK // form.keys)
    lanes = Vector(code, ir.Constant(vector_type("i64"), [lane % form.keys for lane in range(LANES)]), "i64")
    with writer.blocks(3) as (q, k, v, *rest, sums, largest):
        rows = _rows_in_blocks(writer, rest[-2:], room, apart) if form.paged else None
        for r, at in enumerate(_rows(writer, form, 0, q)):
            with writer.loop(_I64(0), _I64(form.size), LANES) as i:
                place = code.add(queries, code.mul(code.add(i, _I64(r * form.size)), _I64(_ITEM)))
                store(code, (writer.read(0, at, i) * factor).value, place, VECTOR_BYTES)
        top = writer.cell(writer.number(float(np.finfo(np.float32).min), "f32"))  # -inf - -inf would be NaN
        masks = _rows(writer, form, 3, rest[0]) if form.masked else []

        def tile(first: Any, left: Any = None) -> None:
            score = _products(writer, form, k, rows, queries, first, left)
            if cap is not None:
                score = tanh(score) * cap
            if masks:
                score = score + _mask(writer, form, masks, first, left)
            if left is not None:
                exists = lanes < writer.splat(left, "i64")
                score = Vector(code, code.select(exists.value, score.value, score.number(-np.inf).value), "f32")
            top.set(larger(top.get(), score))
            store(code, score.value, _tile_of(writer, form, shares, first), VECTOR_BYTES)

        whole = code.and_(keys, _I64(-form.keys))
        with writer.loop(_I64(0), whole, form.keys) as first:
            tile(first)
        with writer.loop(whole, keys, form.keys) as first:
            tile(first, code.sub(keys, first))
        best = writer.folded(top.get(), larger, form.keys)
        total = writer.cell(writer.number(0.0, "f32"))
        with writer.loop(_I64(0), keys, form.keys) as first:
            place = _tile_of(writer, form, shares, first)
            share = exp(Vector(code, load(code, vector_type("f32"), place, VECTOR_BYTES), "f32") - best)
            total.set(total.get() + share)
            store(code, share.value, place, VECTOR_BYTES)
        store(code, best.value, largest)
        weight = writer.folded(total.get(), lambda a, b: a + b, form.keys)
        store(code, weight.value, code.add(largest, _I64(VECTOR_BYTES)))
        _add_values(writer, form, v, rows, shares, sums)
    return MachineCode(writer.end())


def _rows(writer: Writer, form: _Form, k: int, base: Any) -> list[Any]:
    """The addresses of the rows of operand ``k`` for each query of a group; the last one stands for those that are
    only there to fill vectors."""
    code, (head, token) = writer.code, writer.strides[k][-2:]
    count = form.heads * form.tokens
    numbers = [divmod(min(r, count - 1), form.tokens) for r in range(form.rows)]
    return [code.add(base, code.add(code.mul(head, _I64(h)), code.mul(token, _I64(t)))) for h, t in numbers]


def _rows_in_blocks(writer: Writer, places: Sequence[Any], room: Any, apart: Any) -> Any:
    """The address of the numbers of the rows, from the first block on, in which the keys of a chunk lie.

    Args:
        places: the address of the sequence's row of the block table, and so many bytes behind it as keys lie before the
            chunk.
        room, apart: keys of a block, and rows from one block to the next.
    """
    table, ahead = places
    code, keys, along = writer.code, writer.lengths[3], writer.strides[-4][3]
    numbers = writer.array(_I64, CHUNK + LANES)
    lanes = Vector(code, ir.Constant(vector_type("i64"), list(range(LANES))), "i64")
    first = code.sub(ahead, table)
    last = code.add(first, code.sub(keys, _I64(1)))
    with writer.loop(code.udiv(first, room), code.add(code.udiv(last, room), _I64(1)), 1) as block:
        begin = code.sub(code.mul(block, room), first)
        start = code.select(code.icmp_signed("<", begin, _I64(0)), _I64(0), begin)
        end = code.add(begin, room)
        end = code.select(code.icmp_signed("<", end, keys), end, keys)
        number = load(code, _I64, code.add(table, code.mul(block, along)))
        shift = code.sub(code.mul(number, apart), begin)
        with writer.loop(start, end, LANES) as j:  # what is written beyond the end is the next block's
            rows = writer.splat(code.add(shift, j), "i64") + lanes
            store(code, rows.value, code.add(numbers, code.mul(j, _I64(8))), 8)
    return numbers


def _row(writer: Writer, rows: Any, j: Any) -> Any:
    """In which row key ``j`` of a chunk lies."""
    code = writer.code
    return j if rows is None else load(code, _I64, code.add(rows, code.mul(j, _I64(8))), 8)


def _tile_of(writer: Writer, form: _Form, shares: Any, first: Any) -> Any:
    """Where the scores of the keys from ``first`` on are."""
    return writer.code.add(shares, writer.code.mul(first, _I64(form.rows * _ITEM)))


def _products(writer: Writer, form: _Form, k: Any, rows: Any, queries: Any, first: Any, left: Any) -> Vector:
    """The products of all queries with the keys from ``first`` on, of which ``left`` exist."""
    code, along = writer.code, writer.strides[1][3]
    places = []
    for j in range(form.keys):
        number = _I64(j) if left is None else writer.code.select(code.icmp_signed("<", _I64(j), left), _I64(j), _I64(0))
        places.append(code.add(k, code.mul(_row(writer, rows, code.add(first, number)), along)))
    sums = [writer.cell(writer.number(0.0, "f32")) for _ in range(LANES)]
    for i, keys in _in_vectors(writer, 1, form.of_keys, form.size, places):
        for r in range(form.rows):
            place = code.add(queries, code.mul(code.add(i, _I64(r * form.size)), _I64(_ITEM)))
            query = Vector(code, load(code, vector_type("f32"), place, VECTOR_BYTES), "f32")
            for j, key in enumerate(keys):
                cell = sums[r * form.keys + j]
                cell.set(fma(query, key, cell.get()))
    return Vector(code, totals(code, [cell.get().value for cell in sums]), "f32")


def _in_vectors(
    writer: Writer, k: int, kind: str, size: int, rows: Sequence[Any]
) -> Iterator[tuple[Any, list[Vector]]]:
    """Writes a loop over rows of operand ``k``: gives the index of some values in their row, and these values of each
    row."""
    dtype = as_dtype(kind)
    if dtype.is_float:
        with writer.loop(_I64(0), _I64(size), LANES) as i:
            yield i, [writer.read(k, row, i) for row in rows]
        return
    code = writer.code
    with writer.loop(_I64(0), _I64(size), dtype.block) as i:
        vectors = zip(*[decoded(writer, dtype, row, i) for row in rows], strict=True)
        for n, values in enumerate(vectors):
            yield code.add(i, _I64(n * LANES)), list(values)


def _mask(writer: Writer, form: _Form, rows: Sequence[Any], first: Any, left: Any) -> Vector:
    """The mask of all queries and the keys from ``first`` on, of which ``left`` exist."""
    code, lanes_type = writer.code, ir.VectorType(_I32, LANES)
    parts = [writer.repeated(3, row, first, form.keys, left) for row in (rows[:1] if form.shared else rows)]
    whole = parts[0].value
    for r, part in enumerate(parts[1:], 1):
        own = range(r * form.keys, (r + 1) * form.keys)
        lanes = [lane + (LANES if lane in own else 0) for lane in range(LANES)]
        whole = code.shuffle_vector(whole, part.value, ir.Constant(lanes_type, lanes))
    return Vector(code, whole, "f32")


def _add_values(writer: Writer, form: _Form, v: Any, rows: Any, shares: Any, sums: Any) -> None:
    """Code that stores the sums of the values of a chunk, each times its share, for each query."""
    code, keys, along = writer.code, writer.lengths[3], writer.strides[2][3]
    vectors, vector, dtype = form.values // LANES, vector_type("f32"), as_dtype(form.of_values)
    least = max(1, dtype.block // LANES)
    most = max(least, min(vectors, LANES // form.rows))
    columns = next(n for n in range(most, 0, -1) if vectors % n == 0 and n % least == 0)
    with writer.loop(_I64(0), _I64(form.rows * form.values), LANES) as i:
        store(code, ir.Constant(vector, None), code.add(sums, code.mul(i, _I64(_ITEM))))
    with writer.loop(_I64(0), keys, TOGETHER) as first:
        end = code.add(first, writer.at_most(TOGETHER, code.sub(keys, first)))
        with writer.loop(_I64(0), _I64(form.values), columns * LANES) as column:
            places: list[list[Any]] = []
            cells: list[list[Cell]] = []
            for r in range(form.rows):
                numbers = [code.add(column, _I64(r * form.values + c * LANES)) for c in range(columns)]
                own = [code.add(sums, code.mul(number, _I64(_ITEM))) for number in numbers]
                places.append(own)
                cells.append([writer.cell(Vector(code, load(code, vector, at), "f32")) for at in own])
            with writer.loop(first, end, 1) as j:
                row = code.add(v, code.mul(_row(writer, rows, j), along))
                if dtype.is_float:
                    values = [writer.read(2, row, code.add(column, _I64(c * LANES))) for c in range(columns)]
                else:
                    values = list(decoded(writer, dtype, row, column, columns // least))
                tile, within = code.and_(j, _I64(-form.keys)), code.and_(j, _I64(form.keys - 1))
                place = code.add(_tile_of(writer, form, shares, tile), code.mul(within, _I64(_ITEM)))
                for r, of_row in enumerate(cells):
                    share = load(code, ir.FloatType(), code.add(place, _I64(r * form.keys * _ITEM)), _ITEM)
                    for cell, value in zip(of_row, values, strict=True):
                        cell.set(fma(writer.splat(share, "f32"), value, cell.get()))
            for cell, at in zip(chain(*cells), chain(*places), strict=True):
                store(code, cell.get().value, at)


def _combined(form: _Form) -> MachineCode:
    """The kernel that adds up the sums of all chunks, relative to the largest score of all, and divides them."""
    item = 2 if form.dtype != "f32" else _ITEM
    writer = Writer(5, [Operand("f32", _ITEM), Operand("f32", _ITEM), Operand(form.dtype, item)])
    code, count, vector = writer.code, writer.lengths[2], vector_type("f32")
    with writer.blocks(3) as (sums, largest, out):

        def of_chunk(n: Any, row: int) -> tuple[Vector, Any]:
            at = code.add(largest, code.add(code.mul(n, writer.strides[1][2]), _I64(row * VECTOR_BYTES)))
            return Vector(code, load(code, vector, at), "f32"), at

        best = writer.cell(writer.number(-np.inf, "f32"))
        with writer.loop(_I64(0), count, 1) as n:
            best.set(larger(best.get(), of_chunk(n, 0)[0]))
        total = writer.cell(writer.number(0.0, "f32"))
        with writer.loop(_I64(0), count, 1) as n:
            top, at = of_chunk(n, 0)
            share = exp(top - best.get())
            total.set(fma(share, of_chunk(n, 1)[0], total.get()))
            store(code, share.value, at)
        for r, row in enumerate(_rows(writer, form, 2, out)[: form.heads * form.tokens]):
            lane = _I32(r * form.keys)
            weight = writer.splat(code.extract_element(total.get().value, lane), "f32")
            with writer.loop(_I64(0), _I64(form.values), LANES) as i:
                result = writer.cell(writer.number(0.0, "f32"))
                with writer.loop(_I64(0), count, 1) as n:
                    place = code.add(sums, code.mul(n, writer.strides[0][2]))
                    place = code.add(place, code.mul(code.add(i, _I64(r * form.values)), _I64(_ITEM)))
                    share = code.extract_element(of_chunk(n, 0)[0].value, lane)
                    value = Vector(code, load(code, vector, place), "f32")
                    result.set(fma(writer.splat(share, "f32"), value, result.get()))
                writer.write(2, row, i, result.get() / weight)
    return MachineCode(writer.end())


# --- between products -----------------------------------------------------------------------------------------------


def bind_shares(
    stream: Stream,
    scores: Arg,
    mask: Arg | None,
    behind: Arg | None,
    state: Sequence[Arg],
    soft_cap: float,
    *,
    alone: bool,
) -> Call:
    """The call that updates an online softmax by a tile of scores, f32 (groups, heads, tokens, keys), in place.

    Args:
        mask, behind: of the same shape: what is added to scores, and bool, which keys are hidden.
        state: f32 (groups, heads, tokens, 1): the largest score so far, the sum of the shares, and what is written: the
            factor by which sums so far are multiplied, as they are relative to the largest score.
        soft_cap: if not 0, scores s become soft_cap · tanh(s / soft_cap), and ``scores`` is given s / soft_cap.
        alone: in the thread that makes the call.
    """
    optional = [arg for arg in (mask, behind) if arg is not None]
    strides = [*[arg.strides for arg in (scores, *optional)], *[(*arg.strides[:3], 0) for arg in state]]
    walk = Walk(scores.shape, tuple(strides), 0 if alone else 3)
    args = [scores, *optional, *state]
    key = walk.operands(args), mask is not None, behind is not None, bool(soft_cap)
    code = stream.artefact(("shares", key), partial(_shares, *key))
    return bind_walk(stream, code, walk, args, [soft_cap] if soft_cap else [], work=24)


def _shares(operands: tuple[Operand, ...], masked: bool, hides: bool, capped: bool) -> MachineCode:
    writer = Writer(4, operands)
    cap = writer.scalar().to("f32") if capped else None
    with writer.rows() as rows:
        scores, (largest, total, rescale) = rows[0], rows[-3:]
        row, first = Row(writer, rows, "f32"), len(operands) - 3

        def score(i: Any, mask: Any) -> Vector:
            value = writer.read(0, scores, i, mask)
            if cap is not None:
                value = tanh(value) * cap
            if masked:
                value = value + writer.read(1, rows[1], i, mask)
            if hides:
                value = select(writer.read(1 + masked, rows[1 + masked], i, mask), -np.inf, value)
            writer.write(0, scores, i, value, mask)
            return value

        a, b, c, d = row.reduced(score, -np.inf, larger)
        before = writer.read(first, largest, _I64(0))
        best = larger(before, writer.folded(larger(larger(a, b), larger(c, d)), larger))

        def share(i: Any, mask: Any) -> Vector:
            value = exp(writer.read(0, scores, i, mask) - best)
            writer.write(0, scores, i, value, mask)
            return value

        factor = exp(before - best)
        weight = fma(writer.read(first + 1, total, _I64(0)), factor, row.total(share))
        for k, (place, value) in enumerate(((largest, best), (total, weight), (rescale, factor)), first):
            writer.write_one(k, place, value)
    return MachineCode(writer.end())
