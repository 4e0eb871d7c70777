"""`PackedWeight`: a matrix of weights packed by oneDNN, by itself or in one piece with others (`merged_weight`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opweave_torch.native import packed_linear

__all__ = ["PackedWeight", "merged_weight"]


class _Part(NamedTuple):
    """Some rows of a packed matrix that holds several weights, one below the other."""

    whole: Tensor
    first: int


class PackedWeight:
    """What `opweave_torch.packed.PackedType` makes of a tensor.

    Programs that multiply the same rows by several weights keep these in one packed matrix, which then takes the place
    of the single ones. A product with one of them alone packs it again.

    Attributes:
        form: the packed matrix, or where it lies in that of several weights.

    Args:
        dense: the matrix, f32 or bf16.
        blocks: the bytes of a quantized tensor, which its decoded values do not tell; else ``None``.
    """

    __slots__ = ("blocks", "form", "nbytes", "rows")

    def __init__(self, dense: Tensor, blocks: np.ndarray[Any, Any] | None = None) -> None:
        self.blocks: Final = blocks
        self.rows: Final = len(dense)
        self.nbytes: Final = dense.nbytes
        self.form: Tensor | _Part = packed_linear(dense)

    @property
    def packed(self) -> Tensor:
        """The matrix alone, in the layout of oneDNN."""
        form = self.form
        if isinstance(form, _Part):
            form = self.form = packed_linear(self.dense())
        return form

    def dense(self) -> Tensor:
        """The values, a new tensor."""
        form = self.form
        if isinstance(form, _Part):
            return form.whole.to_dense()[form.first : form.first + self.rows]
        return form.to_dense()

    def is_in(self, whole: Tensor) -> bool:
        """Whether it is kept in that packed matrix and nowhere else."""
        return isinstance(self.form, _Part) and self.form.whole is whole


def merged_weight(weights: Sequence[PackedWeight]) -> Tensor:
    """The weights one below the other as one packed matrix, in which they are kept from then on. Weights that are kept
    so already are not packed again."""
    firsts = [sum(weight.rows for weight in weights[:i]) for i in range(len(weights) + 1)]
    forms = [weight.form for weight in weights]
    form = forms[0]
    if isinstance(form, _Part) and len(form.whole) == firsts[-1]:
        whole = form.whole
        if all(
            isinstance(f, _Part) and f.whole is whole and f.first == at for f, at in zip(forms, firsts, strict=False)
        ):
            return whole
    whole = packed_linear(torch.cat([weight.dense() for weight in weights]))
    for weight, first in zip(weights, firsts, strict=False):
        weight.form = _Part(whole, first)
    return whole
