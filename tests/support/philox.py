"""Philox4x32-10 in Python's integers, after Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011."""

from __future__ import annotations

MASK = 2**32 - 1


def philox_block(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The four words for a counter of four words and a key of two, low ones first."""
    for _ in range(10):
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            high >> 32 ^ counter[1] ^ key[0], high & MASK, low >> 32 ^ counter[3] ^ key[1], low & MASK,
        )  # fmt: skip
        key = (key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK
    return counter


def philox_words(key: int, counter: int, n: int) -> list[int]:
    """The first ``n`` words of a stream of `opweave.uniform`."""
    words: list[int] = []
    for block in range(-(-n // 4)):
        four = (block & MASK, block >> 32, counter & MASK, counter >> 32 & MASK)
        words += philox_block(four, (key & MASK, key >> 32 & MASK))
    return words[:n]
