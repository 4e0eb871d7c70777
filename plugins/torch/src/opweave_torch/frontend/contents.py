"""`Contents`: whether tensors were written since somebody copied them.

torch counts what is written through a tensor (``Tensor._version``), but not what is written through ``.data``, through
an array of NumPy over the same memory, or by another library. The only thing that tells is the memory itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from opweave_torch.frontend.values import Array, array_of

__all__ = ["COMPARED", "Contents"]

COMPARED: Final = 1 << 22
"""Bytes of all tensors together up to which each byte is compared."""
SAMPLES: Final = 1 << 16
"""Bytes of larger ones that are compared, evenly spread: each of them costs a line of the cache."""
AT_ONCE: Final = 1 << 18
"""Bytes that are compared at once, so that the result of the comparison stays in the cache."""


class Contents:
    """What tensors contain now.

    Args:
        tensors: the tensors.
        compared: bytes of all of them together up to which each byte is compared; of more, samples are.

    Attributes:
        exact: whether `changed` notices each change.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], compared: int = COMPARED) -> None:
        total = sum([t.nbytes for t in tensors])
        self._step: Final = 1 if total <= compared else -(-total // SAMPLES)
        # Reading memory of an accelerator takes a copy of it.
        here = [t for t in tensors if t.device.type == "cpu" and t.numel()]
        self.exact: Final = self._step == 1 and len(here) == len([t for t in tensors if t.numel()])
        self._tensors: Final = here
        self._known: Final = [self._bytes(t).copy() for t in here]

    def _bytes(self, tensor: torch.Tensor) -> Array:
        found: Array = array_of(tensor).reshape(-1).view(np.uint8)[:: self._step]
        return found

    def changed(self) -> bool:
        """Whether one of the tensors was written, as far as is compared."""
        return any(_differ(self._bytes(t), known) for t, known in zip(self._tensors, self._known, strict=True))


def _differ(a: Array, b: Array) -> Any:
    if a.strides == b.strides and not a.size % 8:
        a, b = a.view(np.uint64), b.view(np.uint64)
    size = AT_ONCE // a.itemsize
    return any((a[at : at + size] != b[at : at + size]).any() for at in range(0, a.size, size))
