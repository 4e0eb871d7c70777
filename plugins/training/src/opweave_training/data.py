"""`Dataset`: examples in arrays, in memory, in mapped files or in several shards, and batches of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from opweave.errors import FormatError, SchedulerError, ShapeError

__all__ = ["Batch", "Dataset"]

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]
"""Name -> the values of the examples of a batch, along the first axis."""


class Dataset:
    """Examples: arrays whose first axes run over the same examples.

    Args:
        arrays: name -> array; or shards, a sequence of such mappings, whose examples follow one another. Arrays of
            mapped files (``numpy.load(path, mmap_mode="r")``) stay there: a batch reads the examples that it needs. The
            files must not become shorter meanwhile.

    Attributes:
        names: of the arrays.

    Raises:
        ShapeError: first axes of different lengths, shards that differ in names, dtypes or further axes, no examples.
    """

    def __init__(self, arrays: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        given = [arrays] if isinstance(arrays, Mapping) else list(arrays) if isinstance(arrays, Sequence) else []
        if not all(isinstance(shard, Mapping) for shard in given):
            raise ShapeError(f"a data set is a mapping of names to arrays, or a sequence of them, not {arrays!r:.60}")
        self._shards: Final = [{name: np.asanyarray(a) for name, a in shard.items()} for shard in given]
        if not self._shards or not self._shards[0]:
            raise ShapeError("a data set needs at least one array")
        self.names: Final = tuple(self._shards[0])
        lengths = []
        for shard in self._shards:
            found = {len(a) if a.ndim else -1 for a in shard.values()}
            if len(found) != 1 or -1 in found:
                shapes = {name: a.shape for name, a in shard.items()}
                raise ShapeError(f"arrays of a data set run over the same examples along the first axis, not {shapes}")
            if self._kind(shard) != self._kind(self._shards[0]):
                raise ShapeError(f"shards have the same arrays: {self._kind(self._shards[0])} and {self._kind(shard)}")
            lengths.append(found.pop())
        self._ends: Final = np.cumsum(lengths)
        mapped = [a for shard in self._shards for a in shard.values() if isinstance(a, np.memmap)]
        self._files: Final = {str(a.filename): os.path.getsize(a.filename) for a in mapped if a.filename is not None}
        if not len(self):
            raise ShapeError("a data set needs at least one example")

    @staticmethod
    def _kind(shard: Mapping[str, Array]) -> dict[str, tuple[Any, ...]]:
        return {name: (str(a.dtype), a.shape[1:]) for name, a in shard.items()}

    def __len__(self) -> int:
        """The number of examples."""
        return int(self._ends[-1])

    def __repr__(self) -> str:
        kinds = ", ".join(
            f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in self._kind(self._shards[0]).items()
        )
        return f"<Dataset of {len(self)} examples: {kinds}>"

    def take(self, ids: Array) -> Batch:
        """The examples with these numbers, in this order, as new arrays.

        Raises:
            FormatError: a mapped file is shorter than when the data set was made. (Reading behind its end would end the
                process.)
        """
        for file, size in self._files.items():
            if (now := os.path.getsize(file)) < size:
                raise FormatError(f"{file} had {size} bytes when the data set was made, and has {now}")
        if len(self._shards) == 1:
            return {name: np.asarray(a[ids]) for name, a in self._shards[0].items()}
        places = np.searchsorted(self._ends, ids, "right")
        batch: Batch = {}
        for name, first in self._shards[0].items():
            batch[name] = out = np.empty((len(ids), *first.shape[1:]), first.dtype)
            for i in np.unique(places):
                here = places == i
                out[here] = self._shards[i][name][ids[here] - (self._ends[i - 1] if i else 0)]
        return batch

    def order(self, seed: int, epoch: int, first: int | bool = True) -> Array:
        """The numbers of all examples in the order of an epoch; it follows from seed and epoch alone.

        Args:
            seed, epoch: integers of at least 0.
            first: so many of the first examples change places among each other; True: all, False: none. So a part for
                training, in front, is shuffled apart from the rest.
        """
        n = len(self)
        mixed = n if first is True else min(int(first), n)
        return np.concatenate([np.random.default_rng([seed, epoch]).permutation(mixed), np.arange(mixed, n)])

    def batches(
        self, size: int, order: Array | None = None, start: int = 0, *, keep_rest: bool = False
    ) -> Iterator[Batch]:
        """Batches, each taken by a thread while the caller works with the one before.

        Args:
            size: examples of a batch.
            order: numbers of examples; ``None``: all as they are.
            start: number of the first batch, to go on within an epoch.
            keep_rest: also return the remaining examples, fewer than ``size``, as the last batch.

        Raises:
            SchedulerError: ``size`` is not positive, or there are fewer examples than a batch without ``keep_rest``.
            FormatError: as `take`.
        """
        ids = np.arange(len(self)) if order is None else order
        if size < 1 or (size > len(ids) and not keep_rest):
            raise SchedulerError(f"a batch has 1 .. {len(ids)} examples of {self!r}, not {size}")
        end = len(ids) if keep_rest else len(ids) // size * size
        parts = [ids[at : at + size] for at in range(start * size, end, size)]
        return self._ahead(parts)

    def _ahead(self, parts: Sequence[Array]) -> Iterator[Batch]:
        with ThreadPoolExecutor(1, "opweave-batches") as pool:
            waiting: Future[Batch] | None = pool.submit(self.take, parts[0]) if parts else None
            for following in (*parts[1:], None):
                if waiting is None:
                    return
                batch = waiting.result()
                waiting = None if following is None else pool.submit(self.take, following)
                yield batch
