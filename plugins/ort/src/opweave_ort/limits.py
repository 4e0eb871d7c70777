"""The numbers by which the plugin chooses between ways to run a step; each is declared where it decides."""

from __future__ import annotations

from typing import Final

from opweave.contract import Limits

__all__ = ["limit"]

limit: Final = Limits()
"""Declares a number, see `opweave.contract.Limit`."""
