"""Comparing printed text."""

from __future__ import annotations


def words(text: str) -> str:
    """Text without the line breaks and spaces that a table puts into it."""
    return "".join(text.split())
