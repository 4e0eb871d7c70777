"""The codebooks of the block types iq1, iq2 and iq3: the group of levels for each index.

An entry of iq1 and iq2 is a group of 8 levels out of 3, of iq3 a group of 4 levels out of 8. Read as digits in base 3
or 8, the first level the lowest, the levels of an entry are a number. Entries are sorted by this number, so that one
bit for each possible number defines a codebook. The entries are part of the format of GGUF. (This module is imported
when the first tensor of such a type is decoded.)
"""

from __future__ import annotations

import zlib
from base64 import b85decode
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

import numpy as np

__all__ = ["SIGN_BYTES", "codebook"]

Array = np.ndarray[Any, Any]

_LEVELS: Final = {
    "iq1": (-1, 0, 1),
    "iq2_xxs": (8, 25, 43),
    "iq2_xs": (8, 25, 43),
    "iq2_s": (8, 25, 43),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15),
}

SIGN_BYTES: Final = np.array([n | n.bit_count() % 2 << 7 for n in range(128)], np.uint8)
"""The signs of 8 values for each number of 7 bits: the eighth bit is set where the number of the others is odd."""


@lru_cache
def codebook(name: str) -> Array:
    """All entries of a codebook: int8, shape (entries, 8), for iq3 (entries, 4). Read-only.

    Args:
        name: ``iq1`` (of iq1_s and iq1_m), else the name of the block type.
    """
    result = np.array(_LEVELS[name], np.int8)[_digits(name)]
    result.flags.writeable = False
    return result


@lru_cache
def _members() -> dict[str, str]:
    """For each codebook a bit for each number, the lowest of the first byte first; compressed with zlib, as base 85."""
    lines = files("opweave.ops").joinpath("codebooks.txt").read_text("ascii").splitlines()
    return dict(line.split(" ") for line in lines)


def _digits(name: str) -> Array:
    base = len(_LEVELS[name])
    members = zlib.decompress(b85decode(_members()[name]))
    numbers = np.flatnonzero(np.unpackbits(np.frombuffer(members, np.uint8), bitorder="little"))
    digits: Array = numbers[:, None] // base ** np.arange(8 if base == 3 else 4) % base
    return digits
