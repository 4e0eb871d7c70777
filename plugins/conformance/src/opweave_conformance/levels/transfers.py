"""Level 1, second part: uploads, downloads, fills and copies, exact to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from opweave.contract import Buffer, mapped
from opweave.errors import BoundsError, HazardError, LayoutError, UnsupportedOpError
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.operands import copy_bytes
from opweave_conformance.checklist import (
    Checklist,
    Inapplicable,
    Subject,
    expect,
    expect_equal,
    expect_raises,
    inapplicable,
)
from opweave_conformance.levels.memory import noise

__all__ = ["CHECKS"]

transfers = Checklist(1, "memory")
CHECKS = transfers.checks

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
TOTAL: Final = 5000
RANGES: Final = (
    (0, TOTAL), (0, 1), (1, 1), (TOTAL - 1, 1), (3, 5), (64, 64), (63, 66), (1, TOTAL - 1), (0, TOTAL - 1),
    (128, 4096), (129, 4097), (7, 1000), (TOTAL - 13, 13),
)  # fmt: skip
"""Offsets and sizes, aligned and not."""


@contextmanager
def _filled(subject: Subject) -> Iterator[tuple[Buffer, Bytes]]:
    """A buffer of random bytes, and what it holds."""
    value = noise(subject, TOTAL)
    with subject.device.alloc(TOTAL) as buffer:
        buffer.upload(0, value)
        yield buffer, value


@transfers("upload")
def _(subject: Subject) -> None:
    """An upload writes its range, at any offset and of any size, and no byte outside of it."""
    with _filled(subject) as (buffer, want):
        for at, size in RANGES:
            piece = noise(subject, size)
            want[at : at + size] = piece
            buffer.upload(at, piece)
            expect_equal(buffer.read(), want, f"after an upload of {size} bytes at {at}")


@transfers("download")
def _(subject: Subject) -> None:
    """A download reads its range, at any offset and of any size, and writes its array only."""
    with _filled(subject) as (buffer, want):
        for at, size in RANGES:
            out = np.full(size + 16, 0xA5, np.uint8)
            buffer.download(at, out[8 : 8 + size])
            expect_equal(out[8 : 8 + size].copy(), want[at : at + size], f"a download of {size} bytes at {at}")
            expect(
                (out[:8] == 0xA5).all() and (out[8 + size :] == 0xA5).all(), "a download writes outside of its array"
            )
        expect_equal(buffer.read(), want, "the buffer after downloads")


@transfers("empty-ranges")
def _(subject: Subject) -> None:
    """Ranges of no bytes are allowed anywhere, at the end too, and change nothing."""
    with _filled(subject) as (buffer, want):
        for at in (0, 17, TOTAL):
            buffer.upload(at, b"")
            buffer.fill(1, at, 0)
            expect(buffer.read(at, 0).size == 0, "a download of no bytes gives some")
            copy_bytes(buffer, at, buffer, 0, 0)
        expect_equal(buffer.read(), want, "the buffer after ranges of no bytes")


@transfers("fill")
def _(subject: Subject) -> None:
    """A fill sets its range, at any offset and of any size, and no byte outside of it."""
    with _filled(subject) as (buffer, want):
        for i, (at, size) in enumerate(RANGES):
            value = (0, 1, 0xA5, 255, 128)[i % 5]
            buffer.fill(value, at, size)
            want[at : at + size] = value
            expect_equal(buffer.read(), want, f"after filling {size} bytes at {at} with {value}")
        buffer.clear()
        expect_equal(buffer.read(), np.zeros(TOTAL, np.uint8), "after clearing")
        expect_raises(BoundsError, "filling with 256", lambda: buffer.fill(256))


@transfers("copy")
def _(subject: Subject) -> None:
    """A copy between two buffers writes its range, from any offset to any other, and no byte outside of it."""
    with _filled(subject) as (source, values), _filled(subject) as (target, want):
        for (at, size), (to, _) in zip(RANGES, reversed(RANGES), strict=True):
            to = min(to, TOTAL - size)
            copy_bytes(target, to, source, at, size)
            want[to : to + size] = values[at : at + size]
            expect_equal(target.read(), want, f"after a copy of {size} bytes from {at} to {to}")
        expect_equal(source.read(), values, "the source of copies")


@transfers("copy-within")
def _(subject: Subject) -> None:
    """A copy within a buffer is right, also where the ranges overlap, forward and backward."""
    with _filled(subject) as (buffer, want):
        for to, at, size in ((0, 2500, 2500), (2501, 1, 2000), (1, 0, 4999), (0, 1, 4999), (100, 163, 777), (9, 9, 99)):
            copy_bytes(buffer, to, buffer, at, size)
            want[to : to + size] = want[at : at + size].copy()
            expect_equal(buffer.read(), want, f"after a copy of {size} bytes from {at} to {to} in one buffer")


@transfers("copy-host")
def _(subject: Subject) -> None:
    """Copies from and to host memory move their range, at odd offsets too."""
    values = noise(subject, TOTAL)
    with HostDevice().alloc(TOTAL) as host, subject.device.alloc(TOTAL) as buffer:
        host.upload(0, values)
        buffer.fill(0)
        copy_bytes(buffer, 33, host, 7, 4001)
        want = np.zeros(TOTAL, np.uint8)
        want[33 : 33 + 4001] = values[7 : 7 + 4001]
        expect_equal(buffer.read(), want, "after a copy from the host")
        copy_bytes(host, 1, buffer, 30, 4100)
        values[1:4101] = want[30:4130]
        expect_equal(host.read(), values, "after a copy to the host")


@transfers("bounds")
def _(subject: Subject) -> None:
    """Ranges outside of a buffer are refused with a BoundsError and nothing is written."""
    with _filled(subject) as (buffer, want):
        for at, size in ((TOTAL, 1), (TOTAL - 1, 2), (-1, 1), (0, TOTAL + 1), (1 << 40, 1)):
            data, out = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
            for what, use in (
                ("an upload", lambda at=at, data=data: buffer.upload(at, data)),
                ("a download", lambda at=at, out=out: buffer.download(at, out)),
                ("a fill", lambda at=at, size=size: buffer.fill(0, at, size)),
                ("a copy", lambda at=at, size=size: copy_bytes(buffer, at, buffer, 0, size)),
            ):
                expect_raises(BoundsError, f"{what} of {size} bytes at {at} of {TOTAL}", use)
        expect_equal(buffer.read(), want, "after ranges that were refused")


@transfers("layout-of-arrays")
def _(subject: Subject) -> None:
    """Host arrays with gaps, and read-only ones to download into, are refused with a LayoutError."""
    with subject.device.alloc(64) as buffer:
        frozen = np.zeros(8, np.uint8)
        frozen.flags.writeable = False
        expect_raises(LayoutError, "uploading an array with gaps", lambda: buffer.upload(0, np.zeros(8, np.uint8)[::2]))
        expect_raises(LayoutError, "downloading into a read-only array", lambda: buffer.download(0, frozen))


@transfers("stream-transfers")
def _(subject: Subject) -> None:
    """Transfers of a stream happen in its order; nothing has to wait in between."""
    with _filled(subject) as (buffer, want), subject.device.open() as stream:
        early, late = np.zeros(TOTAL, np.uint8), np.zeros(TOTAL, np.uint8)
        stream.download(buffer, 0, early)
        pieces = [noise(subject, 100) for _ in range(3)]
        for i, piece in enumerate(pieces):
            stream.upload(buffer, 50 * i + 1, piece)
        stream.download(buffer, 0, late)
        stream.synchronize()
        expect_equal(early, want, "a download that was queued before uploads")
        for i, piece in enumerate(pieces):
            want[50 * i + 1 : 50 * i + 101] = piece
        expect_equal(late, want, "a download that was queued after uploads")


@transfers("stream-keeps-arrays")
def _(subject: Subject) -> None:
    """A queued upload keeps its array alive."""
    with subject.device.alloc(1 << 16) as buffer, subject.device.open() as stream:
        want = np.concatenate([np.full(1 << 12, i, np.uint8) for i in range(16)])
        for i in range(16):
            stream.upload(buffer, i << 12, np.full(1 << 12, i, np.uint8))
        stream.synchronize()
        expect_equal(buffer.read(), want, "after uploads of arrays that were let go")


# --- host memory in place -------------------------------------------------------------------------------------------


def _aligned(subject: Subject, size: int) -> Bytes:
    """A host array that begins at the device's alignment."""
    n = max(subject.device.alignment, 64)
    raw = noise(subject, size + n)
    skip = -raw.__array_interface__["data"][0] % n
    return raw[skip : skip + size]


def _imported(subject: Subject, array: Bytes) -> Buffer:
    """The buffer over ``array``; skips the check if the device uses no host memory in place, or refuses these bytes, as
    drivers may."""
    if not subject.device.caps.import_host:
        inapplicable("it cannot use host memory in place")
    try:
        buffer = subject.device.import_host(array)
    except UnsupportedOpError as error:
        raise Inapplicable(f"it does not take these bytes: {error}") from None
    assert isinstance(buffer, Buffer)
    return buffer


@transfers("import")
def _(subject: Subject) -> None:
    """Imported host memory is shared with the array: changes show on both sides, and the array outlives the buffer."""
    if not subject.device.caps.import_host:
        error = expect_raises(
            UnsupportedOpError, "importing", lambda: subject.device.import_host(np.zeros(64, np.uint8))
        )
        inapplicable(str(error).splitlines()[0])
    array = _aligned(subject, 4096)
    want = array.copy()
    with _imported(subject, array) as buffer:
        expect_equal(buffer.read(), want, "an imported array")
        array[100:200] = want[100:200] = 7
        expect_equal(buffer.read(), want, "an imported array that the host changed")
        buffer.upload(31, np.full(33, 9, np.uint8))
        want[31:64] = 9
        expect_equal(array.copy(), want, "an array after an upload to the buffer over it")
    expect_equal(array.copy(), want, "an array after its buffer was freed")


@transfers("import-readonly")
def _(subject: Subject) -> None:
    """Read-only host memory can be read and not written, or is refused with an UnsupportedOpError."""
    array = _aligned(subject, 4096)
    want = array.copy()
    array.flags.writeable = False
    with _imported(subject, array) as buffer:
        expect(buffer.readonly, "a buffer over a read-only array does not say so")
        expect_equal(buffer.read(), want, "a read-only array")
        expect_raises(HazardError, "an upload to a read-only buffer", lambda: buffer.upload(0, b"x"))
        expect_raises(HazardError, "a fill of a read-only buffer", buffer.clear)


@transfers("import-odd")
def _(subject: Subject) -> None:
    """Importing host memory at an odd address and of an odd size works, or raises UnsupportedOpError."""
    array = _aligned(subject, 4096)[1:1000]
    want = array.copy()
    with _imported(subject, array) as buffer:
        expect_equal(buffer.read(), want, "an array at an odd address")
        expect_equal(buffer.read(17, 100), want[17:117], "a part of an array at an odd address")


@transfers("map")
def _(subject: Subject) -> None:
    """Mapped memory shows its bytes at any offset, and what is written there is there afterwards."""
    if not subject.device.caps.map:
        inapplicable("it does not map its memory")
    for _ in range(2):
        with _filled(subject) as (buffer, want):
            for at, size in RANGES:
                with mapped(buffer, at, size) as view:
                    expect_equal(bytes(view), want[at : at + size], f"{size} mapped bytes at {at}")
                piece = noise(subject, size)
                with mapped(buffer, at, size, write=True) as view:
                    view[:] = piece.data
                want[at : at + size] = piece
                expect_equal(buffer.read(), want, f"after writing {size} mapped bytes at {at}")
