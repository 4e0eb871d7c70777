"""`number_of`: counted things in a sentence."""

__all__ = ["number_of"]


def number_of(count: int, noun: str, plural: str = "") -> str:
    """``"1 copy"``, ``"2,000 copies"``; ``plural``: where that is not ``noun`` and an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
