"""`KVCache`: the keys and values of the sequences that a decoder continues, and which position each token has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import Any, Final

import numpy as np

from opweave import ops
from opweave.errors import BoundsError, DTypeError, LayoutError, ShapeError
from opweave.graph.blocks import Blocks
from opweave.graph.dtypes import DTypeLike, as_dtype, f32
from opweave.graph.tensor import Tensor
from opweave.leaf_memory import write_state
from opweave.leaves import Where, state
from opweave.ops.encoding import ENCODED
from opweave.runtime.device import Device
from opweave.runtime.host.storage import array_shape
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
        blocks: the block table: which blocks of the states hold each sequence, in order, i64 of shape (n, m).
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
    Management for Large Language Model Serving with PagedAttention", 2023). A step then gathers the blocks of each
    sequence, where it otherwise reads keys and values of all sequences in place.

    Shapes in a graph depend on numbers of tokens and on ``reach`` only, which are rounded up: tokens to a power of two,
    ``reach`` to one of `reaches`. So a function compiled by `opweave.compile` is traced a few times, and from then on a
    step plans nothing::

        @ow.compile
        def step(tokens, positions, slots, blocks, last, reach): ...

        batch = cache.feed({first: prompt, second: [token]})
        logits = step(*batch)[batch.rows[first]]

    Args:
        layers: how many layers there are.
        sequences: how many sequences at a time.
        capacity: tokens of the longest one.
        groups: heads of keys and values in a layer.
        size: elements of a key and of a value.
        dtype: of the states: f32, f16, bf16 or f64, and attention is computed with operands of this type; or a block
            type that values are quantized to (`opweave.quantize`), such as q8_0 or q4_0: keys and values are quantized
            when they are written, and attention is computed in f32.
        device: where the states lie: a device or its name for all layers, one for each layer, or ``None``: where the
            first program that uses a state places it. An `opweave.Sharded` along axis 1 splits them by heads, as it
            splits the projections of keys and values whose output features lie on the same devices.
        block: the shortest reach, and the tokens of a block.
        blocks: how many blocks all sequences share; ``None``: each sequence has its own memory.
        name: the states are called ``name.layer.keys`` and ``name.layer.values``.

    Attributes:
        keys, values: the states, one for each layer, of shape (slots + 1, groups, size). There are sequences · capacity
            slots, or blocks · block. Those without a token are 0; the last row takes what padding writes.
        lengths: tokens of each sequence so far, i64 of shape (sequences,); 0 of those that are free. Read only.
        reaches: the values that ``reach`` takes: ``block``, doubled up to ``capacity`` (in whole blocks with
            ``blocks``).

    Raises:
        ShapeError: a number below 1, or not as many devices as layers.
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
        groups: int,
        size: int,
        dtype: DTypeLike = f32,
        *,
        device: Where | Sharded | Sequence[Where | Sharded] = None,
        block: int = 64,
        blocks: int | None = None,
        name: str = "cache",
    ) -> None:
        given = {"layers": layers, "sequences": sequences, "capacity": capacity, "groups": groups, "size": size,
                 "block": block, "blocks": 1 if blocks is None else blocks}  # fmt: skip
        for what, number in given.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ShapeError(f"KVCache: {what} is a number from 1 on, not {number!r:.60}")
        self._dtype: Final = as_dtype(dtype)
        if not self._dtype.is_float and self._dtype.name not in ENCODED:
            raise DTypeError(
                f"KVCache: keys and values are f32, f16, bf16, f64 or {', '.join(ENCODED)}, not {self._dtype}"
            )
        self._computed: Final = f32 if self._dtype.is_quantized else self._dtype
        devices = [device] * layers if device is None or isinstance(device, (str, Device, Sharded)) else list(device)
        if len(devices) != layers:
            raise ShapeError(f"KVCache: {len(devices)} devices for {layers} layers; give one for each, or one for all")
        for where in devices:
            if isinstance(where, Sharded) and where.axis != 1:
                raise LayoutError(f"KVCache: states are split by heads, along axis 1, not as {where!r} says")
        self._capacity: Final = capacity
        self._paged: Final = blocks is not None
        # Without paging, each sequence has one block of its own, which has room for all of it.
        self._count: Final = sequences if blocks is None else blocks
        self._room: Final = capacity if blocks is None else block
        self._shape: Final = self._count * self._room + 1, groups, size

        def states(kind: str) -> tuple[Tensor, ...]:
            return tuple([
                state(f"{name}.{i}.{kind}", self._shape, self._dtype, device=where) for i, where in enumerate(devices)
            ])  # fmt: skip

        self.keys: Final = states("keys")
        self.values: Final = states("values")
        self.lengths: Final = np.zeros(sequences, np.int64)
        self._joined: Final = np.zeros(sequences, np.bool_)
        self._tables: Final[list[list[int]]] = [[] if self._paged else [i] for i in range(sequences)]
        self._free: Final = list(reversed(range(self._count))) if self._paged else []
        longest = -(-capacity // block) * block if self._paged else capacity
        reaches = [min(block, longest)]
        while reaches[-1] < longest:
            reaches.append(min(2 * reaches[-1], longest))
        self.reaches: Final = tuple(reaches)

    def __repr__(self) -> str:
        _, groups, size = self._shape
        paged = f", {self.free_blocks} of {self._count} blocks of {self._room} tokens free" if self._paged else ""
        return (
            f"<KVCache {len(self.keys)} layers of {groups} x {size} {self._dtype}, {self._joined.sum()} of "
            f"{len(self.lengths)} sequences of up to {self._capacity} tokens{paged}>"
        )

    # --- sequences --------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence has taken; 0 of a cache that was made without ``blocks``."""
        return len(self._free)

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
            BoundsError: no such sequence, or a length above its own.
        """
        slot = self._slot(sequence)
        before, table = int(self.lengths[slot]), self._tables[slot]
        if not isinstance(length, (int, np.integer)) or not 0 <= length <= before:
            raise BoundsError(f"sequence {slot} has {before} tokens; it cannot be cut to {length!r:.60}")
        for i in range(length // self._room, -(-before // self._room)):
            start, stop = max(length, i * self._room), min(before, (i + 1) * self._room)
            self._erase((table[i] - i) * self._room + start, stop - start)
        self.lengths[slot] = length
        if self._paged:
            kept = -(-length // self._room)
            self._free.extend(reversed(table[kept:]))
            del table[kept:]

    def _erase(self, first: int, count: int) -> None:
        """Set rows of all states to 0. States that no program has placed yet hold nothing else."""
        for each in (*self.keys, *self.values):
            assert each.leaf is not None
            shards = each.leaf.shards
            for part in (each,) if shards is None else shards.parts:
                leaf = part.leaf
                assert leaf is not None
                if leaf.placement is not None:
                    buffer, offset, _ = leaf.placement
                    row = part.nbytes // self._shape[0]
                    buffer.device.synchronize()
                    buffer.fill(0, offset + first * row, count * row)
                elif leaf.data is not None:
                    leaf.data[first : first + count] = 0

    def clear(self) -> None:
        """Release every sequence and fill the states with 0, also those that a failed step left half written."""
        for sequence in np.flatnonzero(self._joined).tolist():
            self.release(sequence)
        zeros = np.zeros(array_shape(self._shape, self._dtype), self._dtype.numpy)
        for each in (*self.keys, *self.values):
            write_state(each, Blocks(zeros, self._shape, self._dtype) if self._dtype.is_quantized else zeros)

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
            if self.lengths[slot] + ids.size > self._capacity:
                raise BoundsError(
                    f"sequence {slot} has {self.lengths[slot]} tokens and gets {ids.size}; the cache takes up to "
                    f"{self._capacity}; release it, or make a cache of more capacity"
                )
        self._grow(fed)
        longest = max(self.lengths[slot] for slot in fed)
        reach = next(reach for reach in self.reaches if reach >= longest)
        sequences = list(fed) if len(fed) == 1 else list(range(len(self.lengths)))
        n, width = len(sequences), 1 << (max(ids.size for ids in fed.values()) - 1).bit_length()
        padded, positions = np.zeros((n, width), np.int64), np.full((n, width), self._capacity)
        slots, blocks = np.full((n, width), self._shape[0] - 1), np.zeros((n, -(-reach // self._room)), np.int64)
        last = np.arange(n) * width
        for row, slot in enumerate(sequences):
            if slot in fed:
                ids, table = fed[slot], self._tables[slot]
                at = np.arange(self.lengths[slot] - ids.size, self.lengths[slot])
                padded[row, : ids.size], positions[row, : ids.size] = ids, at
                # Hidden positions are read from the sequence's own last block, never from another sequence's.
                blocks[row] = table[-1]
                blocks[row, : len(table)] = table
                slots[row, : ids.size] = blocks[row, at // self._room] * self._room + at % self._room
                last[row] += ids.size - 1
        return Batch(padded, positions, slots, blocks, last, reach, {slot: row for row, slot in enumerate(sequences)})

    def _grow(self, fed: Mapping[int, Ids]) -> None:
        """Make sequences longer by their new tokens, which takes blocks; or raise `BoundsError` and change nothing."""
        needed = {
            slot: -(-int(self.lengths[slot] + ids.size) // self._room) - len(self._tables[slot])
            for slot, ids in fed.items()
        }  # fmt: skip
        if sum(needed.values()) > self.free_blocks:
            raise BoundsError(
                f"these tokens take {sum(needed.values())} more blocks of {self._room} tokens, and of the cache's "
                f"{self._count} blocks {self.free_blocks} are free; release a sequence, or make a cache of more blocks"
            )
        for slot, ids in fed.items():
            self._tables[slot] += [self._free.pop() for _ in range(needed[slot])]
            self.lengths[slot] += ids.size

    def _slot(self, sequence: int) -> int:
        try:
            slot = as_index(sequence)
        except TypeError:
            raise BoundsError(f"a sequence is a number that join() gave, not {sequence!r:.60}") from None
        if not 0 <= slot < len(self.lengths) or not self._joined[slot]:
            used = np.flatnonzero(self._joined).tolist()
            raise BoundsError(f"sequence {slot} is not in use (in use: {used}); join() gives a new one")
        return slot

    # --- in a graph -------------------------------------------------------------------------------------------------

    def update(
        self, layer: int, k: Tensor, v: Tensor, slots: Tensor, blocks: Tensor, reach: int
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of new tokens, and return those of the sequences up to ``reach``.

        Args:
            layer: which layer's, from 0.
            k, v: shape (n, groups, T, size), of a float type; they take the cache's dtype.
            slots, blocks, reach: as `feed` gives them. With a row for each of the cache's sequences the result is a
                view, unless they share blocks or are quantized; else it is a copy.

        Returns:
            Keys and values of shape (n, groups, reach, size); those of a quantized cache decoded, in f32.

        Raises:
            BoundsError: no such layer or reach.
            ShapeError: operands of other shapes.
        """
        _, groups, size = self._shape
        if not 0 <= layer < len(self.keys):
            raise BoundsError(f"KVCache: there is no layer {layer!r:.60}; there are {len(self.keys)}, from 0 on")
        if reach not in self.reaches:
            raise BoundsError(f"KVCache: reach is one of {self.reaches}, not {reach!r:.60}")
        n, tokens = slots.shape if slots.ndim == 2 else (-1, -1)
        columns = -(-reach // self._room)
        if blocks.shape != (n, columns) or k.shape != (n, groups, tokens, size) or v.shape != k.shape:
            raise ShapeError(
                f"KVCache: needs k and v (n, {groups}, tokens, {size}), slots (n, tokens) and blocks (n, {columns}), "
                f"not {k.describe()}, {v.describe()}, {slots.describe()} and {blocks.describe()}"
            )

        def written(cache: Tensor, new: Tensor) -> Tensor:
            flat = new.transpose(0, 2, 1, 3).reshape(-1, groups, size)
            pool = ops.index_copy(cache, slots.reshape(-1), flat)[:-1].reshape(self._count, self._room, groups, size)
            seen = pool[:, :reach]
            if self._paged or n != self._count:
                seen = ops.embedding(seen, blocks).reshape(n, reach, groups, size)
            return seen.transpose(0, 2, 1, 3).astype(self._computed)

        return written(self.keys[layer], k), written(self.values[layer], v)

    def mask(self, positions: Tensor, reach: int) -> Tensor:
        """Which of the first ``reach`` positions each token sees: those up to its own. Bool of shape (n, 1, T, reach).
        (One node, however often it is built.)"""
        n, tokens = positions.shape
        return ops.arange(reach, dtype=positions.dtype) <= positions.reshape(n, 1, tokens, 1)

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
        **options: Any,
    ) -> Tensor:
        """`update`, then `opweave.attention` of ``q`` over what it returns, under `mask`.

        Args:
            q: queries, shape (n, heads, T, size), the heads a multiple of the groups.
            layer, k, v: as for `update`.
            positions, slots, blocks, reach: as `feed` gives them.
            options: those of `opweave.attention`, such as ``scale`` and ``soft_cap``.

        Returns:
            Shape and dtype of ``q``.

        Raises:
            BoundsError: no such layer or reach.
            ShapeError: operands of other shapes.
            DTypeError: quantized queries, or an option of a wrong type.
        """
        keys, values = self.update(layer, k, v, slots, blocks, reach)
        mixed = ops.attention(q.astype(self._computed), keys, values, self.mask(positions, reach), **options)
        return mixed.astype(q.dtype)


def _ids(sequence: int, tokens: Any) -> Ids:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size:
        raise ShapeError(f"feed: the next tokens of sequence {sequence} are a list of ids, not {tokens!r:.60}")
    if ids.dtype.kind not in "iu":
        raise DTypeError(f"feed: tokens are integers; sequence {sequence} got {ids.dtype}")
    return ids.astype(np.int64)
