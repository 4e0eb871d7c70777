"""`KVCache`: the keys and values of the sequences that a decoder continues, and which position each token has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index as as_index
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np

from opweave import ops
from opweave.errors import BoundsError, DTypeError, FormatError, LayoutError, ShapeError
from opweave.graph.blocks import Blocks
from opweave.graph.container import pack, unpack
from opweave.graph.dtypes import DType, DTypeLike, as_dtype, bool_, f32, f64, i64
from opweave.graph.layout import array_shape
from opweave.graph.leaf import Spec
from opweave.graph.tensor import Tensor, constant
from opweave.leaf_memory import read_leaf, write_state
from opweave.leaves import Where, state
from opweave.ops.encoding import ENCODED
from opweave.ops.movement import after
from opweave.sharding.placing import Sharded

__all__ = ["Batch", "KVCache"]

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one step: tokens of n sequences, padded to T tokens each. Made by `KVCache.feed`.

    ``step(*batch)`` passes ``tokens, positions, slots, blocks, last, reach``, in this order.

    Attributes:
        tokens: ids, i64 of shape (n, T); 0 where there is padding.
        positions: of the tokens in their sequences, i64 of shape (n, T); the cache's capacity where there is padding.
        slots: which rows of the cache's states take the tokens' keys and values, i64 of shape (n, T); the last row,
            which nobody reads, takes those of padding.
        blocks: the block table: which blocks of the states hold each sequence, in order, i64 of shape (n, m). Where
            layers have windows beside shared blocks, its last column is the number of the sequence.
        last: for each row of the batch, the number of its last token among all n · T, i64 of shape (n,).
        reach: a Python int: attention reads the first ``reach`` positions of each sequence.
        rows: sequence -> the row of the batch, and of what is computed from it.
    """

    tokens: Ids
    positions: Ids
    slots: Ids
    blocks: Ids
    last: Ids
    reach: int
    rows: Mapping[int, int]

    def __iter__(self) -> Iterator[Ids | int]:
        return iter((self.tokens, self.positions, self.slots, self.blocks, self.last, self.reach))


class KVCache:
    """Keys and values of up to ``sequences`` sequences of up to ``capacity`` tokens, for the layers of a decoder.

    A step feeds tokens of any of the sequences (`feed`), writes their keys and values to the slots that it was given,
    and lets each token attend to those of its own sequence up to itself (`attend`). Sequences come (`join`) and go
    (`release`) between steps, while others go on.

    By default each sequence has memory for ``capacity`` tokens. With ``blocks`` the memory is that many blocks of
    ``block`` tokens, which all sequences share: one takes a block when it grows into it, and gives it back when it is
    released or cut. Choose this where most sequences stay far below the capacity (Kwon et al., "Efficient Memory
    Management for Large Language Model Serving with PagedAttention", 2023), or begin alike: a `fork` shares the blocks
    of its beginning. On devices with ``reads_block_tables`` a step of few tokens reads blocks where they lie. Prompts,
    and steps on other devices, gather those of each sequence first; without ``blocks`` a step of all sequences reads
    keys and values in place everywhere.

    Shapes in a graph depend on numbers of tokens and on ``reach`` only, which are rounded up: tokens to a power of two,
    ``reach`` to one of `reaches`. So a function compiled by `opweave.compile` is traced a few times, and from then on a
    step plans nothing::

        @ow.compile
        def step(tokens, positions, slots, blocks, last, reach): ...

        batch = cache.feed({first: prompt, second: [token]})
        logits = step(*batch)[batch.rows[first]]

    Layers with a ``window`` keep the last tokens of each sequence only, in a ring: token p lies where token p - window
    was. A step of several tokens reads the ring before it writes it, and attends to what it read and to its own tokens.

    Args:
        layers: how many layers there are.
        sequences: how many sequences at a time.
        capacity: tokens of the longest one.
        groups: heads of keys and values in a layer; here and for ``size``, ``dtype``, ``window`` and those of values a
            list or tuple has one for each layer.
        size: elements of a key and of a value.
        dtype: of the states: f32, f16, bf16 or f64, and attention is computed with operands of this type; or a block
            type that values are quantized to (`opweave.quantize`), such as q8_0 or q4_0: keys and values are quantized
            when they are written, and attention is computed in f32, as where keys and values have different types.
        device: where the states lie: a device or its name for all layers, one for each layer, or ``None``: where the
            first program that uses a state places it. An `opweave.Sharded` along axis 1 splits them by heads, as it
            splits the projections of keys and values whose output features lie on the same devices.
        window: a token sees so many tokens up to and with itself; ``None``: all. Layers with windows have memory of
            their own for each sequence, also with ``blocks``.
        value_size, value_dtype: of values, where they are not those of keys.
        block: the shortest reach, and the tokens of a block.
        blocks: how many blocks all sequences share; ``None``: each sequence has its own memory.
        name: the states are called ``name.layer.keys`` and ``name.layer.values``.

    Attributes:
        keys, values: the states, one for each layer, of shape (slots + 1, groups, size). There are sequences · capacity
            slots, blocks · block, or with a window sequences · window. Those without a token are 0; the last row takes
            what padding writes.
        reaches: the values that ``reach`` takes: ``block``, doubled up to ``capacity`` (in whole blocks with
            ``blocks``).

    Raises:
        ShapeError: a number below 1, or a list that has not one for each layer.
        DTypeError: a dtype that is neither a float type nor a block type that values are quantized to.
        LayoutError: a size that is no multiple of the block of ``dtype``.
        UnknownNameError: no such device.
        AllocationError: a device has not enough free memory.
    """

    def __init__(
        self,
        layers: int,
        sequences: int,
        capacity: int,
        groups: int | Sequence[int],
        size: int | Sequence[int],
        dtype: DTypeLike | Sequence[DTypeLike] = f32,
        *,
        device: Where | Sharded | Sequence[Where | Sharded] = None,
        window: int | Sequence[int | None] | None = None,
        value_size: int | Sequence[int] | None = None,
        value_dtype: DTypeLike | Sequence[DTypeLike] | None = None,
        block: int = 64,
        blocks: int | None = None,
        name: str = "cache",
    ) -> None:
        _check_counts(
            layers=layers, sequences=sequences, capacity=capacity, block=block, blocks=1 if blocks is None else blocks
        )
        groups, size = _each("groups", groups, layers), _each("sizes", size, layers)
        windows, devices = _each("windows", window, layers), _each("devices", device, layers)
        value_sizes = size if value_size is None else _each("sizes of values", value_size, layers)
        for kind, numbers in {"groups": groups, "size": size, "value_size": value_sizes}.items():
            for number in numbers:
                _check_counts(**{kind: number})
        dtypes = [_stored(each) for each in _each("dtypes", dtype, layers)]
        value_dtypes = (
            dtypes if value_dtype is None else [_stored(e) for e in _each("dtypes of values", value_dtype, layers)]
        )
        for where in devices:
            if isinstance(where, Sharded) and where.axis != 1:
                raise LayoutError(f"KVCache: states are split by heads, along axis 1, not as {where!r} says")
        self._capacity: Final = capacity
        self._paged: Final = blocks is not None
        # Without paging, each sequence has one block of its own, which has room for all of it.
        self._count: Final = sequences if blocks is None else blocks
        self._room: Final = capacity if blocks is None else block
        longest = -(-capacity // block) * block if self._paged else capacity
        for each in windows:
            if each is not None:
                _check_counts(window=each)
        # 0: the layer keeps all tokens, also because no sequence is longer than its window.
        self._rings: Final = tuple([each if each is not None and each < longest else 0 for each in windows])
        self._places: Final = {
            ring: constant(np.arange(capacity + 1)[:, None] % ring) for ring in set(self._rings) - {0}
        }

        def states(kind: str, sizes: Sequence[int], kinds: Sequence[DType]) -> tuple[Tensor, ...]:
            made = []
            for i, ring in enumerate(self._rings):
                rows = sequences * ring if ring else self._count * self._room
                made.append(state(f"{name}.{i}.{kind}", (rows + 1, groups[i], sizes[i]), kinds[i], device=devices[i]))
            return tuple(made)

        self.keys: Final = states("keys", size, dtypes)
        self.values: Final = states("values", value_sizes, value_dtypes)
        self._states: Final = tuple(zip((*self.keys, *self.values), self._rings * 2, strict=True))
        self._lengths: Final = np.zeros(sequences, np.int64)
        self._longest: Final = np.zeros(sequences, np.int64)  # since they were empty: what rings were written up to
        self._tokens: Final[list[list[int]]] = [[] for _ in range(sequences)]
        self._joined: Final = np.zeros(sequences, np.bool_)
        self._tables: Final[list[list[int]]] = [[] if self._paged else [i] for i in range(sequences)]
        self._free: Final = list(reversed(range(self._count))) if self._paged else []
        self._uses: Final = np.zeros(self._count, np.int64)  # how many sequences hold a shared block
        reaches = [min(block, longest)]
        while reaches[-1] < longest:
            reaches.append(min(2 * reaches[-1], longest))
        self.reaches: Final = tuple(reaches)

    def __repr__(self) -> str:
        paged = f", {self.free_blocks} of {self._count} blocks of {self._room} tokens free" if self._paged else ""
        kinds = dict.fromkeys(f"{k.shape[1]} x {k.shape[2]} {k.dtype}" for k in self.keys)
        return (
            f"<KVCache {len(self.keys)} layers of {' or '.join(kinds)}, {self._joined.sum()} of {len(self.lengths)} "
            f"sequences of up to {self._capacity} tokens{paged}>"
        )

    # --- sequences --------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Ids:
        """Tokens of each sequence so far, i64 of shape (sequences,); 0 of those that are free. Read only."""
        view = self._lengths.view()
        view.flags.writeable = False
        return view

    def tokens(self, sequence: int) -> list[int]:
        """The ids that a sequence was fed so far. Raises `BoundsError` for one that is not in use."""
        return list(self._tokens[self._slot(sequence)])

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence has taken; 0 of a cache that was made without ``blocks``."""
        return len(self._free)

    @property
    def free_sequences(self) -> int:
        """How many sequences can `join`."""
        return int(np.count_nonzero(~self._joined))

    def join(self) -> int:
        """The number of a new, empty sequence; raises `BoundsError` where none is free."""
        free = np.flatnonzero(~self._joined)
        if not free.size:
            raise BoundsError(f"all {len(self.lengths)} sequences of the cache are in use; release one first")
        self._joined[free[0]] = True
        return int(free[0])

    def release(self, sequence: int) -> None:
        """End a sequence: as `truncate` to 0, after which its number is free for another one."""
        self.truncate(sequence, 0)
        self._joined[sequence] = False

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens of a sequence from ``length`` on: those of a step that failed, or that were only tried.

        Their keys and values become 0, so that no NaN or infinity among them reaches another token: what a mask hides
        has the weight 0 in attention, but 0 · NaN is NaN. Blocks without tokens are given back. Waits for work on the
        devices of the states; wait for submitted steps before, as for `opweave.write`.

        Raises:
            BoundsError: no such sequence, or a length above its own; a ring has overwritten what the next token would
                see: a sequence longer than a window is cut by one token, or to 0; no block is free for the copy of one
                that another sequence shares. Nothing has changed.
        """
        slot, before, length = self._cut(sequence, length)
        table = self._tables[slot]
        kept = -(-length // self._room)
        shared = self._paged and length % self._room and self._uses[table[kept - 1]] > 1
        if shared and not self._free and all(self._uses[block] > 1 for block in table[kept:]):
            raise BoundsError(f"sequence {slot} shares the block that it is cut in, and none is free for a copy of it")
        for each, ring in self._states:
            for first, count in self._rows(ring, slot, length, before):
                if ring or not self._paged or self._uses[first // self._room] == 1:
                    _erase(each, first, count)
        self._lengths[slot] = length
        if not length:
            self._longest[slot] = 0
        del self._tokens[slot][length:]
        if self._paged:
            for block in reversed(table[kept:]):
                self._let_go(block)
            del table[kept:]
        if shared:
            begin, old = (kept - 1) * self._room, table[-1]
            rows = [(each, [read_leaf(each[a : a + n]) for a, n in self._rows(0, slot, begin, length)])
                    for each, ring in self._states if not ring]  # fmt: skip
            table[-1] = self._taken_block()
            self._let_go(old)
            for each, values in rows:
                self._write(each, self._rows(0, slot, begin, length), np.concatenate(values))

    def _cut(self, sequence: int, length: int) -> tuple[int, int, int]:
        """A sequence, its length, and the one that it is to be cut to, where it can be; or `BoundsError`."""
        slot = self._slot(sequence)
        before = int(self._lengths[slot])
        if not isinstance(length, (int, np.integer)) or not 0 <= length <= before:
            raise BoundsError(f"sequence {slot} has {before} tokens; it cannot be cut to {length!r:.60}")
        if 0 < length < (shortest := self.shortest(slot)):
            least = min(ring for ring in self._rings if ring)
            raise BoundsError(f"sequence {slot} had {shortest + 1} tokens, of which windows keep the last {least}: it "
                              f"can be cut to {shortest} or to 0, not to {length}")  # fmt: skip
        return slot, before, int(length)

    def shortest(self, sequence: int) -> int:
        """The least length to which `truncate` cuts a sequence, apart from 0: one less than the longest that it had,
        once that was more than a window keeps. Raises `BoundsError` for one that is not in use."""
        longest = int(self._longest[self._slot(sequence)])
        return longest - 1 if any(0 < ring < longest for ring in self._rings) else 0

    def _taken_block(self) -> int:
        block = self._free.pop()
        self._uses[block] = 1
        return block

    def _let_go(self, block: int) -> None:
        self._uses[block] -= 1
        if not self._uses[block]:
            self._free.append(block)

    def _rows(self, ring: int, slot: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where the states of a layer hold positions ``start`` to ``stop`` of a sequence, as first rows and counts. A
        ring has the last ones only."""
        room = ring or self._room
        at = max(start, int(self._lengths[slot]) - ring) if ring else start
        while at < stop:
            block, offset = divmod(at, room)
            count = min(stop - at, room - offset)
            yield (slot if ring else self._tables[slot][block]) * room + offset, count
            at += count

    def _write(self, each: Tensor, rows: Iterator[tuple[int, int]], values: np.ndarray[Any, Any]) -> None:
        at = 0
        for first, count in rows:
            part = values[at : at + count]
            shape = (count, *each.shape[1:])
            write_state(
                each[first : first + count], Blocks(part, shape, each.dtype) if each.dtype.is_quantized else part
            )
            at += count

    def fork(self, sequence: int, length: int | None = None) -> int:
        """The number of a new sequence that begins as ``sequence`` is now, or with its first ``length`` tokens; both go
        on independently.

        With ``blocks`` the two share all full blocks, so that a common beginning is stored once, and only what fills a
        block in part is copied. Without them, and in rings, keys and values are copied. Waits as `truncate` does.

        Raises:
            BoundsError: no such sequence, no free one, or no free block; a length to which `truncate` would not cut it.
                Nothing has changed.
        """
        length = len(self._tokens[self._slot(sequence)]) if length is None else length
        slot, before, length = self._cut(sequence, length)
        table = self._tables[slot]
        whole = length // self._room if self._paged else 0
        part = table[whole : -(-length // self._room)]
        if part and self._paged and not self._free:
            raise BoundsError(f"sequence {slot} fills a block in part, and none is free for a copy of it")
        new = self.join()
        self._lengths[new], self._tokens[new] = length, self._tokens[slot][:length]
        self._longest[new] = self._longest[slot] if length else 0
        if self._paged:
            self._uses[table[:whole]] += 1
            self._tables[new] = [*table[:whole], *[self._taken_block() for _ in part]]
        try:
            for each, ring in self._states:
                begin = max(0, before - ring) if ring else whole * self._room
                for (first, count), (to, _) in zip(
                    self._rows(ring, slot, begin, length), self._rows(ring, new, begin, length), strict=True
                ):
                    self._write(each, iter([(to, count)]), read_leaf(each[first : first + count]))
        except BaseException:
            self.release(new)
            raise
        return new

    def _layout(self) -> list[list[Any]]:
        return [[*each.shape[1:], each.dtype.name, ring] for each, ring in self._states]

    def save(self, sequence: int, path: str | os.PathLike[str], label: str = "") -> None:
        """Write the tokens of a sequence, their keys and values to a file: for `restore`, also in another process.
        Waits as `truncate` does.

        Args:
            sequence: which one.
            path: of the file.
            label: of the weights that computed it: `restore` takes a file of the same label only.

        Raises:
            BoundsError: no such sequence.
            ExecutionError: a failed run left a state half written.
            OSError: the file cannot be written.
        """
        slot = self._slot(sequence)
        length = int(self._lengths[slot])
        parts = [read_leaf(each[first : first + count]) for each, ring in self._states
                 for first, count in self._rows(ring, slot, 0, length)]  # fmt: skip
        data = b"".join([part.tobytes() for part in parts])
        header = {"sequence": self._tokens[slot], "longest": int(self._longest[slot]), "label": label,
                  "layers": self._layout(), "checksum": crc32(data)}  # fmt: skip
        Path(path).write_bytes(pack(header, [np.frombuffer(data, np.uint8)]))

    def restore(self, path: str | os.PathLike[str], label: str = "") -> int:
        """The number of a new sequence with the tokens, keys and values that `save` wrote.

        Raises:
            FormatError: the file was not written by `save`, or with another label; it is damaged or cut off. Here and
                below nothing has changed.
            ShapeError: it is of a cache with other layers, groups, sizes, dtypes or windows.
            BoundsError: it is longer than the capacity; no sequence or too few blocks are free.
            OSError: the file cannot be read.
        """
        header, data = unpack(Path(path).read_bytes(), f"sequence ({os.fspath(path)})")
        tokens = header.get("sequence")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise FormatError(f"{os.fspath(path)} is no saved sequence")
        if header.get("label") != label:
            raise FormatError(f"{os.fspath(path)} was saved with the label {header.get('label')!r:.60}, not {label!r}")
        length = len(tokens)
        longest = header.get("longest")
        if type(longest) is not int or not length <= longest < 1 << 62:
            raise FormatError(f"{os.fspath(path)} does not say how long its sequence was")
        if header.get("layers") != self._layout():
            raise ShapeError(f"{os.fspath(path)} is of a cache of other layers, groups, sizes, dtypes or windows than "
                             f"{self!r}")  # fmt: skip
        if length > self._capacity:
            raise BoundsError(f"{os.fspath(path)} has {length} tokens, and a sequence here up to {self._capacity}")
        counts = [min(length, ring or length) for _, ring in self._states]
        sizes = [count * (each.nbytes // each.shape[0]) for count, (each, _) in zip(counts, self._states, strict=True)]
        if data.size != sum(sizes) or crc32(data.data) != header.get("checksum"):
            raise FormatError(f"{os.fspath(path)} is damaged or cut off: its bytes are not those that were saved")
        new = self.join()
        try:
            self._grow({new: length})
            self._tokens[new], self._longest[new] = tokens, longest
            at = 0
            for (each, ring), count, size in zip(self._states, counts, sizes, strict=True):
                values = data[at : at + size].view(each.dtype.numpy)
                shape = array_shape((count, *each.shape[1:]), each.dtype)
                self._write(each, self._rows(ring, new, 0, length), values.reshape(shape))
                at += size
        except BaseException:
            self.release(new)
            raise
        return new

    def clear(self) -> None:
        """Release every sequence and fill the states with 0, also those that a failed step left half written."""
        for sequence in np.flatnonzero(self._joined).tolist():
            self.release(sequence)
        for each, _ in self._states:
            zeros = np.zeros(array_shape(each.shape, each.dtype), each.dtype.numpy)
            self._write(each, iter([(0, each.shape[0])]), zeros)

    def feed(self, tokens: Mapping[int, Sequence[int]]) -> Batch:
        """The arguments of a step that appends tokens to sequences, which are longer by these from now on.

        One sequence alone, as a prompt usually comes, makes a batch of one row; several make one of all the cache's
        sequences, in which the others are padding and stay as they are.

        Args:
            tokens: sequence -> ids of its next tokens, at least one.

        Raises:
            BoundsError: a sequence that is not in use, or that becomes longer than the capacity; more blocks are needed
                than are free. Nothing has changed.
            ShapeError: nothing is fed, or no tokens for a sequence.
            DTypeError: tokens that are no integers.
        """
        if not isinstance(tokens, Mapping) or not tokens:
            raise ShapeError("feed takes the next tokens of at least one sequence: {sequence: ids}")
        fed = {self._slot(sequence): _ids(sequence, ids) for sequence, ids in tokens.items()}
        for slot, ids in fed.items():
            if self._lengths[slot] + ids.size > self._capacity:
                raise BoundsError(
                    f"sequence {slot} has {self._lengths[slot]} tokens and gets {ids.size}; the cache takes up to "
                    f"{self._capacity}; release it, or make a cache of more capacity"
                )
        self._grow({slot: ids.size for slot, ids in fed.items()})
        for slot, ids in fed.items():
            self._tokens[slot] += ids.tolist()
        longest = max(self._lengths[slot] for slot in fed)
        reach = next(reach for reach in self.reaches if reach >= longest)
        sequences = list(fed) if len(fed) == 1 else list(range(len(self.lengths)))
        n, width = len(sequences), 1 << (max(ids.size for ids in fed.values()) - 1).bit_length()
        padded, positions = np.zeros((n, width), np.int64), np.full((n, width), self._capacity)
        slots = np.full((n, width), self._count * self._room)
        columns = -(-reach // self._room)
        blocks = np.zeros((n, columns + self._numbered), np.int64)
        last = np.arange(n) * width
        for row, slot in enumerate(sequences):
            if slot in fed:
                ids, table = fed[slot], self._tables[slot]
                at = np.arange(self._lengths[slot] - ids.size, self._lengths[slot])
                padded[row, : ids.size], positions[row, : ids.size] = ids, at
                # Hidden positions are read from the sequence's own last block, never from another sequence's.
                blocks[row, :columns] = table[-1]
                blocks[row, : len(table)] = table
                blocks[row, columns:] = slot
                slots[row, : ids.size] = blocks[row, at // self._room] * self._room + at % self._room
                last[row] += ids.size - 1
        return Batch(padded, positions, slots, blocks, last, reach, {slot: row for row, slot in enumerate(sequences)})

    def specs(self, rows: int, tokens: int, reach: int) -> tuple[Spec | int, ...]:
        """What `feed` gives for batches of so many rows and tokens, as shapes: for ``step.warm``."""
        each, columns = Spec((rows, tokens), i64), -(-reach // self._room) + self._numbered
        return each, each, each, Spec((rows, columns), i64), Spec((rows,), i64), reach

    def _grow(self, counts: Mapping[int, int]) -> None:
        """Make sequences longer by so many tokens, which takes blocks; or raise `BoundsError` and change nothing."""
        needed = {
            slot: -(-(int(self._lengths[slot]) + count) // self._room) - len(self._tables[slot])
            for slot, count in counts.items()
        }  # fmt: skip
        if sum(needed.values()) > self.free_blocks and self._paged:
            raise BoundsError(
                f"these tokens take {sum(needed.values())} more blocks of {self._room} tokens, and of the cache's "
                f"{self._count} blocks {self.free_blocks} are free; release a sequence, or make a cache of more blocks"
            )
        for slot, count in counts.items():
            self._tables[slot] += [self._taken_block() for _ in range(needed[slot])]
            self._lengths[slot] += count
            self._longest[slot] = max(self._longest[slot], self._lengths[slot])

    def _slot(self, sequence: int) -> int:
        try:
            slot = as_index(sequence)
        except TypeError:
            raise BoundsError(f"a sequence is a number that join() gave, not {sequence!r:.60}") from None
        if not 0 <= slot < len(self._lengths) or not self._joined[slot]:
            used = np.flatnonzero(self._joined).tolist()
            raise BoundsError(f"sequence {slot} is not in use (in use: {used}); join() gives a new one")
        return slot

    # --- in a graph -------------------------------------------------------------------------------------------------

    @property
    def _numbered(self) -> int:
        """1 where the block table has a last column with the sequences' numbers, for rings beside shared blocks."""
        return int(self._paged and any(self._rings))

    def _ring(self, layer: int) -> int:
        if not isinstance(layer, int) or not 0 <= layer < len(self.keys):
            raise BoundsError(f"KVCache: there is no layer {layer!r:.60}; there are {len(self.keys)}, from 0 on")
        return self._rings[layer]

    def _in_ring(self, ring: int, positions: Tensor) -> Tensor:
        return ops.embedding(self._places[ring], positions).reshape(positions.shape)

    def _ring_rows(self, ring: int, positions: Tensor, blocks: Tensor) -> Tensor:
        """Which rows of a ring's states take the tokens at ``positions``. Of more tokens than it holds the last ones
        stay; the others, and padding, go to the last row."""
        sequences = len(self._lengths)
        rows, written = self._in_ring(ring, positions), positions < self._capacity
        if sequences > 1:
            rows = rows + blocks[:, -1:] * ring
        if positions.shape[1] > ring:
            last = ops.max(ops.where(written, positions, 0), 1, keepdims=True)
            written = ops.minimum(written, positions + ring > last)  # of bools: both
        return ops.where(written, rows, sequences * ring)

    def update(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        blocks: Tensor,
        reach: int,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of new tokens, and return those that the tokens may see, as `mask` says.

        Args:
            layer: which layer's, from 0.
            k, v: shape (n, groups, T, size), of a float type; they take the cache's dtype.
            slots, blocks, reach, positions: as `feed` gives them; ``positions`` only for a layer with a window. With a
                row for each of the cache's sequences the result is a view, unless they share blocks, are quantized, or
                come from a ring and from several tokens; else it is a copy, which a device that
                ``reads_block_tables`` makes for attention of many queries only.

        Returns:
            Keys and values of shape (n, groups, seen, size): of the first ``reach`` positions; of a ring those it
            holds, in its order, and behind them, if there are several and it is full, the new tokens. Those of a
            quantized cache are decoded, in f32.

        Raises:
            BoundsError: no such layer or reach.
            ShapeError: operands of other shapes, or no positions for a layer with a window.
        """
        ring = self._ring(layer)
        if reach not in self.reaches:
            raise BoundsError(f"KVCache: reach is one of {self.reaches}, not {reach!r:.60}")
        n, tokens = slots.shape if slots.ndim == 2 else (-1, -1)
        columns = -(-reach // self._room)
        groups, size, out = self.keys[layer].shape[1], self.keys[layer].shape[2], self.values[layer].shape[2]
        shapes = (n, groups, tokens, size), (n, groups, tokens, out)
        if blocks.shape != (n, columns + self._numbered) or (k.shape, v.shape) != shapes:
            raise ShapeError(
                f"KVCache: needs k and v (n, {groups}, tokens, {size} and {out}), slots (n, tokens) and "
                f"blocks (n, {columns + self._numbered}), not {k.describe()}, {v.describe()}, {slots.describe()} and "
                f"{blocks.describe()}"
            )
        if ring and (positions is None or positions.shape != slots.shape):
            raise ShapeError(f"KVCache: layer {layer} has a window of {ring}; it needs the positions that feed gives")
        rows = self._ring_rows(ring, positions, blocks) if ring and positions is not None else slots
        count, room = (len(self._lengths), ring) if ring else (self._count, self._room)
        table = blocks[:, -1:] if ring else blocks[:, :columns]
        before, gathers = self._reads_before(ring, tokens, reach), n != count or (self._paged and not ring)
        types = {self.keys[layer].dtype, self.values[layer].dtype}
        computed = types.pop() if len(types) == 1 else f64 if f64 in types else f32
        computed = f32 if computed.is_quantized else computed

        def change(cache: Tensor, new: Tensor) -> Tensor:
            return ops.index_copy(cache, rows.reshape(-1), new.transpose(0, 2, 1, 3).reshape(-1, *cache.shape[1:]))

        caches = (self.keys[layer], k), (self.values[layer], v)
        changed = [change(*each) for each in caches]

        def seen(cache: Tensor, new: Tensor, written: Tensor) -> Tensor:
            version = cache if before else written
            if not before and (gathers or cache.dtype.is_quantized):
                # Both are written before one is read: what decodes or gathers then stands beside the attention.
                version = after(written, changed)
            pool = version[:-1].reshape(count, room, *cache.shape[1:])[:, :reach]
            if gathers:
                pool = ops.embedding(pool, table).reshape(n, -1, *cache.shape[1:])[:, :reach]
            found = pool.transpose(0, 2, 1, 3).astype(computed)
            if not before:
                return found
            return after(ops.concat([found, new.astype(cache.dtype).astype(computed)], 2), [written])

        keys, values = (seen(*each, written) for each, written in zip(caches, changed, strict=True))
        return keys, values

    @staticmethod
    def _reads_before(ring: int, tokens: int, reach: int) -> bool:
        """Several new tokens overwrite in a full ring what the first of them sees, so that it is read before."""
        return 0 < ring < reach and tokens > 1

    def mask(self, positions: Tensor, reach: int, layer: int | None = None) -> Tensor:
        """Which of what `update` returns each token sees: positions up to its own, and not before its window. Bool of
        shape (n, 1, T, seen). (One node for all layers of one window, however often it is built.)

        Args:
            positions, reach: as `feed` gives them.
            layer: whose window counts; ``None``: a layer without one.

        Raises:
            BoundsError: no such layer.
        """
        n, tokens = positions.shape
        ring = 0 if layer is None else self._ring(layer)
        own = positions.reshape(n, 1, tokens, 1)
        if not self._reads_before(ring, tokens, reach):  # a ring that is full has nothing but the window
            return ops.arange(min(reach, ring or reach), dtype=positions.dtype) <= own
        first, at = positions[:, :1].reshape(n, 1, 1, 1), ops.arange(ring, dtype=positions.dtype)
        begin = self._in_ring(ring, first)  # the rows from here on are a window older than those before it
        held = first - begin + at - (at >= begin).astype(positions.dtype) * ring
        new = positions.reshape(n, 1, 1, tokens)
        old = ops.minimum(held >= 0, held > own - ring)  # of bools: both
        return ops.concat([old, ops.minimum(new <= own, new > own - ring)], 3)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        slots: Tensor,
        blocks: Tensor,
        reach: int,
        *,
        mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """`update`, then `opweave.attention` of ``q`` over what it returns, under `mask`.

        Args:
            q: queries, shape (n, heads, T, size), the heads a multiple of the groups.
            layer, k, v: as for `update`.
            positions, slots, blocks, reach: as `feed` gives them.
            mask: which positions a token sees besides, bool, broadcasts to (n, heads, T, reach); not for a layer that
                keeps its window in a ring, where positions move.
            options: those of `opweave.attention`, such as ``scale`` and ``soft_cap``.

        Returns:
            Dtype of ``q``, shape (n, heads, T, size of a value).

        Raises:
            BoundsError: no such layer or reach.
            ShapeError: operands of other shapes.
            DTypeError: quantized queries, a mask that is not bool, or an option that attention does not have or of a
                wrong type.
            LayoutError: a mask for a layer that keeps its window in a ring.
        """
        keys, values = self.update(layer, k, v, slots, blocks, reach, positions)
        seen = self.mask(positions, reach, layer)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype is not bool_:
                raise DTypeError(f"KVCache: a mask is a bool tensor, not {mask!r:.80}")
            if self._rings[layer]:
                raise LayoutError(f"KVCache: layer {layer} keeps its window in a ring, where positions move; mask= is "
                                  "for layers without a window")  # fmt: skip
            seen = ops.minimum(seen, mask)
        if unknown := set(options) - {"scale", "soft_cap", "sinks"}:
            raise DTypeError(f"KVCache: attend has no option {', '.join(sorted(unknown))}; there are scale, soft_cap, "
                             "sinks")  # fmt: skip
        # The mask is made before keys and values are gathered, which then stands beside the attention.
        queries = after(q.astype(keys.dtype), [seen])
        return ops.attention(queries, keys, values, seen, **options).astype(q.dtype)


def _check_counts(**given: Any) -> None:
    for what, number in given.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ShapeError(f"KVCache: {what} is a number from 1 on, not {number!r:.60}")


def _each(what: str, given: Any, layers: int) -> list[Any]:
    """An argument for each layer: a list has one for each, anything else is for all."""
    if not isinstance(given, (list, tuple)):
        return [given] * layers
    if len(given) != layers:
        raise ShapeError(f"KVCache: {len(given)} {what} for {layers} layers; give one for each, or one for all")
    return list(given)


def _stored(given: DTypeLike) -> DType:
    dtype = as_dtype(given)
    if not dtype.is_float and dtype.name not in ENCODED:
        raise DTypeError(f"KVCache: keys and values are f32, f16, bf16, f64 or {', '.join(ENCODED)}, not {dtype}")
    return dtype


def _erase(each: Tensor, first: int, count: int) -> None:
    """Set rows of a state to 0, also one that a failed run left half written. One that no program has placed yet holds
    nothing else."""
    assert each.leaf is not None
    shards = each.leaf.shards
    for part in (each,) if shards is None else shards.parts:
        leaf = part.leaf
        assert leaf is not None
        if leaf.placement is not None:
            buffer, offset, _ = leaf.placement
            row = part.nbytes // part.shape[0]
            buffer.device.synchronize()
            buffer.fill(0, offset + first * row, count * row)
        elif leaf.data is not None:
            leaf.data[first : first + count] = 0


def _ids(sequence: int, tokens: Any) -> Ids:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size:
        raise ShapeError(f"feed: the next tokens of sequence {sequence} are a list of ids, not {tokens!r:.60}")
    if ids.dtype.kind not in "iu":
        raise DTypeError(f"feed: tokens are integers; sequence {sequence} got {ids.dtype}")
    return ids.astype(np.int64)
