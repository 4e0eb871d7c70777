"""`KVCache`: the keys and values of the sequences that a decoder continues, and which position each token has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index as as_index
from typing import Any, Final, NamedTuple

import numpy as np

from opweave import ops
from opweave.contract import Device
from opweave.errors import BoundsError, DTypeError, ShapeError
from opweave.graph.dtypes import DTypeLike, as_dtype, bool_, f32
from opweave.graph.tensor import Tensor
from opweave.leaves import Where, state, write_state

__all__ = ["Batch", "KVCache"]

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Batch(NamedTuple):
    """The arguments of one step: tokens of n sequences, padded to T tokens each. Made by `KVCache.feed`.

    Attributes:
        tokens: ids, i64 of shape (n, T); 0 where there is padding.
        positions: of the tokens in their sequences, i64 of shape (n, T); the cache's capacity where there is padding.
        slots: the sequence of each row, i64 of shape (n,): either all of the cache in order, or one.
        last: for each row, the number of its last token among all n · T, i64 of shape (n,).
        reach: a Python int: attention reads the first ``reach`` positions of the cache.
    """

    tokens: Ids
    positions: Ids
    slots: Ids
    last: Ids
    reach: int

    @property
    def rows(self) -> dict[int, int]:
        """Sequence -> the row of the batch, and of what is computed from it."""
        return {int(slot): row for row, slot in enumerate(self.slots)}


class KVCache:
    """Keys and values of up to ``sequences`` sequences of up to ``capacity`` tokens, for the layers of a decoder.

    Each layer has two states of shape (sequences, capacity + 1, groups, size); the last position takes what padding
    writes. A step feeds tokens of any of the sequences (`feed`), writes their keys and values where positions say, and
    lets each token attend to those up to its own (`attend`). Sequences come (`join`) and go (`release`) between
    steps, while others go on.

    Shapes in a graph depend on numbers of tokens and on ``reach`` only, which are rounded up: tokens to a power of two,
    ``reach`` to one of `reaches`. So a function compiled by `opweave.compile` is traced a few times, and from then on a
    step plans nothing::

        @ow.compile
        def step(tokens, positions, slots, last, reach): ...

        batch = cache.feed({first: prompt, second: [token]})
        logits = step(*batch)[batch.rows[first]]

    Args:
        layers: how many layers there are.
        sequences: how many sequences at a time.
        capacity: tokens of the longest one.
        groups: heads of keys and values in a layer.
        size: elements of a key and of a value.
        dtype: of the states: f32, f16, bf16 or f64. Attention is computed with operands of this type.
        device: where the states lie: a device or its name for all layers, one for each layer, or ``None``: where the
            first program that uses a state places it.
        block: the shortest reach.
        name: the states are called ``name.layer.keys`` and ``name.layer.values``.

    Attributes:
        keys, values: the states, one for each layer.
        lengths: tokens of each sequence so far, i64 of shape (sequences,); 0 of those that are free. Read only.
        reaches: the values that ``reach`` takes: ``block``, doubled up to ``capacity``.

    Raises:
        ShapeError: a number below 1, or not as many devices as layers.
        DTypeError: a dtype that is no float type.
        UnknownNameError, AllocationError: as of `opweave.state`.
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
        device: Where | Sequence[Where] = None,
        block: int = 64,
        name: str = "cache",
    ) -> None:
        given = {"layers": layers, "sequences": sequences, "capacity": capacity, "groups": groups, "size": size,
                 "block": block}  # fmt: skip
        for what, number in given.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ShapeError(f"KVCache: {what} is a number from 1 on, not {number!r:.60}")
        self._dtype: Final = as_dtype(dtype)
        if not self._dtype.is_float or self._dtype.is_quantized:
            raise DTypeError(f"KVCache: keys and values are f32, f16, bf16 or f64, not {self._dtype}")
        devices = [device] * layers if device is None or isinstance(device, (str, Device)) else list(device)
        if len(devices) != layers:
            raise ShapeError(f"KVCache: {len(devices)} devices for {layers} layers; give one for each, or one for all")
        self._capacity: Final = capacity
        self._shape: Final = sequences, capacity + 1, groups, size

        def states(kind: str) -> tuple[Tensor, ...]:
            return tuple([
                state(f"{name}.{i}.{kind}", self._shape, self._dtype, device=where) for i, where in enumerate(devices)
            ])  # fmt: skip

        self.keys: Final = states("keys")
        self.values: Final = states("values")
        self.lengths: Final = np.zeros(sequences, np.int64)
        self._joined: Final = np.zeros(sequences, np.bool_)
        reaches = [min(block, capacity)]
        while reaches[-1] < capacity:
            reaches.append(min(2 * reaches[-1], capacity))
        self.reaches: Final = tuple(reaches)

    def __repr__(self) -> str:
        sequences, _, groups, size = self._shape
        return (
            f"<KVCache {len(self.keys)} layers of {groups} x {size} {self._dtype}, {self._joined.sum()} of {sequences} "
            f"sequences of up to {self._capacity} tokens>"
        )

    # --- sequences --------------------------------------------------------------------------------------------------

    def join(self) -> int:
        """The number of a new, empty sequence; raises `BoundsError` where none is free."""
        free = np.flatnonzero(~self._joined)
        if not free.size:
            raise BoundsError(f"all {len(self.lengths)} sequences of the cache are in use; release one first")
        self._joined[free[0]] = True
        return int(free[0])

    def release(self, sequence: int) -> None:
        """End a sequence. Its number is free for another one, which overwrites what it left."""
        slot = self._slot(sequence)
        self._joined[slot], self.lengths[slot] = False, 0

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens of a sequence from ``length`` on: those of a step that failed, or that were only tried.

        Raises:
            BoundsError: no such sequence, or a length above its own.
        """
        slot = self._slot(sequence)
        if not 0 <= length <= self.lengths[slot]:
            raise BoundsError(f"sequence {slot} has {self.lengths[slot]} tokens; it cannot be cut to {length!r:.60}")
        self.lengths[slot] = length

    def clear(self) -> None:
        """Release every sequence and fill the states with 0. Needed only after infinities or NaN were written: what a
        mask hides has the weight 0 in attention, but 0 · NaN is NaN."""
        self._joined[:], self.lengths[:] = False, 0
        zeros = np.broadcast_to(np.zeros((), self._dtype.numpy), self._shape)
        for each in (*self.keys, *self.values):
            write_state(each, zeros)

    def feed(self, tokens: Mapping[int, Sequence[int]]) -> Batch:
        """The arguments of a step that appends tokens to sequences, which are longer by these from now on.

        One sequence alone, as a prompt usually comes, makes a batch of one row; several make one of all the cache's
        sequences, in which the others are padding and stay as they are.

        Args:
            tokens: sequence -> ids of its next tokens, at least one.

        Raises:
            BoundsError: a sequence that is not in use, or that becomes longer than the capacity. Nothing has changed.
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
        slots = np.array(list(fed)) if len(fed) == 1 else np.arange(len(self.lengths))
        width = 1 << (max(ids.size for ids in fed.values()) - 1).bit_length()
        padded = np.zeros((slots.size, width), np.int64)
        positions = np.full((slots.size, width), self._capacity)
        last = np.arange(slots.size) * width
        for row, slot in enumerate(slots.tolist()):
            if slot in fed:
                count, start = fed[slot].size, self.lengths[slot]
                padded[row, :count] = fed[slot]
                positions[row, :count] = np.arange(start, start + count)
                last[row] += count - 1
                self.lengths[slot] += count
        longest = self.lengths[list(fed)].max()
        return Batch(padded, positions, slots, last, next(reach for reach in self.reaches if reach >= longest))

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
        self, layer: int, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, reach: int
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values of new tokens, and return those of the sequences up to ``reach``.

        Args:
            layer: which layer's, from 0.
            k, v: shape (n, groups, T, size); they take the cache's dtype.
            positions, slots, reach: as `feed` gives them. With as many slots as the cache has sequences they are all of
                them in order, and the result is a view; of fewer it is a copy.

        Returns:
            Keys and values of shape (n, groups, reach, size).

        Raises:
            BoundsError: no such layer or reach.
            ShapeError: operands of other shapes.
        """
        sequences, room, groups, size = self._shape
        if not 0 <= layer < len(self.keys):
            raise BoundsError(f"KVCache: there is no layer {layer!r:.60}; there are {len(self.keys)}, from 0 on")
        if not isinstance(reach, int) or not 1 <= reach <= self._capacity:
            raise BoundsError(f"KVCache: reach is a number from 1 to {self._capacity}, not {reach!r:.60}")
        n, tokens = positions.shape if positions.ndim == 2 else (-1, -1)
        if slots.shape != (n,) or k.shape != (n, groups, tokens, size) or v.shape != k.shape:
            raise ShapeError(
                f"KVCache: needs k and v (n, {groups}, tokens, {size}), positions (n, tokens) and slots (n,), not "
                f"{k.describe()}, {v.describe()}, {positions.describe()} and {slots.describe()}"
            )
        rows = (slots.reshape(n, 1) * room + positions).reshape(-1)

        def written(cache: Tensor, new: Tensor) -> Tensor:
            flat = new.transpose(0, 2, 1, 3).reshape(-1, groups, size)
            seen = ops.index_copy(cache.reshape(-1, groups, size), rows, flat)[:, :reach]
            return (seen if n == sequences else ops.embedding(seen, slots)).transpose(0, 2, 1, 3)

        return written(self.keys[layer], k), written(self.values[layer], v)

    def mask(self, positions: Tensor, reach: int) -> Tensor:
        """What each token sees: 0 at positions up to its own, -inf behind. Shape (n, 1, T, reach), of the cache's
        dtype. (One node, however often it is built.)"""
        n, tokens = positions.shape
        behind = ops.step(ops.arange(reach, dtype=positions.dtype) - positions.reshape(n, 1, tokens, 1))
        hidden = ops.full((), -np.inf, self._dtype)
        return ops.where(ops.cast(behind, bool_), hidden, ops.full((), 0.0, self._dtype))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, reach: int, **options: Any
    ) -> Tensor:
        """`update`, then `opweave.attention` of ``q`` over what it returns, under `mask`.

        Args:
            q: queries, shape (n, heads, T, size), the heads a multiple of the groups.
            layer, k, v, positions, slots, reach: as for `update`.
            options: those of `opweave.attention`, such as ``scale`` and ``soft_cap``.

        Returns:
            Shape and dtype of ``q``.

        Raises:
            BoundsError, ShapeError: as `update` and `opweave.attention`.
        """
        keys, values = self.update(layer, k, v, positions, slots, reach)
        mixed = ops.attention(q.astype(self._dtype), keys, values, self.mask(positions, reach), **options)
        return mixed.astype(q.dtype)


def _ids(sequence: int, tokens: Any) -> Ids:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size:
        raise ShapeError(f"feed: the next tokens of sequence {sequence} are a list of ids, not {tokens!r:.60}")
    if ids.dtype.kind not in "iu":
        raise DTypeError(f"feed: tokens are integers; sequence {sequence} got {ids.dtype}")
    return ids.astype(np.int64)
