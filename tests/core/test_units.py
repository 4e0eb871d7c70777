"""Bytes and seconds for people: three digits, and never more before the point than the next unit takes."""

from __future__ import annotations

import pytest

from opweave.units import human_bytes, human_time


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (1024, "1 KiB"), (1536, "1.5 KiB"), (511 << 20, "511 MiB"),
        (1023 << 20, "0.999 GiB"), (8 << 30, "8 GiB"), (7 << 40, "7 TiB"), (3 << 60, "3072 PiB"),
    ],
)  # fmt: skip
def test_bytes(n: int, text: str):
    assert human_bytes(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"), (3.18e-5, "31.8 µs"), (9.994e-4, "999 µs"), (9.996e-4, "1 ms"), (0.0123, "12.3 ms"),
        (0.9996, "1 s"), (2.5, "2.5 s"), (123456.0, "123456 s"),
    ],
)  # fmt: skip
def test_seconds(seconds: float, text: str):
    assert human_time(seconds) == text
