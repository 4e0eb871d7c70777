"""Level 1, first part: allocating and freeing memory, and buffer types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import numpy as np

from opweave.contract import Arg, Buffer, BufferType, Device, MultiBuffer, Step, Usage
from opweave.errors import LifetimeError
from opweave.graph.dtypes import f32
from opweave.graph.tensor import input as leaf
from opweave.ops import contiguous
from opweave_conformance.checklist import Checklist, Subject, expect, expect_equal, expect_raises, inapplicable

__all__ = ["CHECKS", "noise"]

memory = Checklist(1, "memory")
CHECKS = memory.checks

SIZES: Final = (0, 1, 2, 3, 7, 63, 64, 65, 255, 4096, 4097, 1 << 20)
BIG: Final = 64 << 20


def noise(subject: Subject, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes."""
    return subject.rng.integers(0, 256, size, np.uint8)


def _largest(subject: Subject, want: int) -> int:
    """``want`` bytes, or less if the largest buffer or the device's free memory is smaller."""
    free, total = subject.device.mem_info()
    limit = subject.device.max_buffer_size or want
    return max(min(want, limit, free // 4 if total else want), 1)


@contextmanager
def _buffers(device: Device, sizes: Iterable[int] = ()) -> Iterator[list[Buffer]]:
    """Buffers of the given sizes. Those in the list, to which more may be added, are freed at the end."""
    buffers = [device.alloc(size) for size in sizes]
    try:
        yield buffers
    finally:
        for buffer in buffers:
            buffer.free()


# --- allocating and freeing -----------------------------------------------------------------------------------------


@memory("sizes")
def _(subject: Subject) -> None:
    """Buffers of 0, of 1 and of odd sizes hold what they are given, at aligned addresses, and do not overlap."""
    limit = subject.device.max_buffer_size
    with _buffers(subject.device, [n for n in SIZES if limit is None or n <= limit]) as buffers:
        values = [noise(subject, b.size) for b in buffers]
        for buffer, n, value in zip(buffers, SIZES, values, strict=False):
            expect(buffer.size == n, f"a buffer of {n} bytes says it has {buffer.size}")
            _expect_aligned(buffer)
            buffer.upload(0, value)
        for buffer, value in zip(buffers, values, strict=True):
            expect_equal(buffer.read(), value, f"a buffer of {buffer.size} bytes beside others")
        _expect_apart(buffers)


@memory("alignment")
def _(subject: Subject) -> None:
    """Addresses, where memory has them, are multiples of the alignment, whatever was allocated before."""
    with _buffers(subject.device, range(1, 66)) as buffers:
        if all(b.address is None for b in buffers):
            inapplicable("its memory has no addresses")
        for buffer in buffers:
            _expect_aligned(buffer)


def _expect_aligned(buffer: Buffer) -> None:
    at, need = buffer.address, buffer.type.alignment
    expect(at is None or at % need == 0, f"{buffer!r} lies at {at}, which is no multiple of {need}")


def _expect_apart(buffers: list[Buffer]) -> None:
    ranges = sorted((b.address, b.size) for b in buffers if b.address is not None and b.size)
    for (a, size), (b, _) in pairwise(ranges):
        expect(a + size <= b, f"two buffers overlap: {size} bytes at {a}, and one at {b}")


@memory("big")
def _(subject: Subject) -> None:
    """A buffer of 64 MiB (or the largest there is) can be written and read at both ends and in the middle."""
    size = _largest(subject, BIG)
    with subject.device.alloc(size) as buffer:
        piece = noise(subject, min(4099, size))
        for at in (0, (size - piece.size) // 2 | 1, size - piece.size):
            at = min(at, size - piece.size)
            buffer.upload(at, piece)
            expect_equal(buffer.read(at, piece.size), piece, f"byte {at:,} of a buffer of {size:,}")


@memory("many")
def _(subject: Subject) -> None:
    """A thousand small buffers keep their values."""
    values = noise(subject, 1000 * 16).reshape(1000, 16)
    with _buffers(subject.device, [16] * len(values)) as buffers:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.upload(0, value)
        for i, (buffer, value) in enumerate(zip(buffers, values, strict=True)):
            expect_equal(buffer.read(), value, f"buffer {i} of 1000")


@memory("reuse")
def _(subject: Subject) -> None:
    """Freed memory that is allocated again belongs to one buffer only; buffers that stayed keep their values."""
    device = subject.device
    values: list[np.ndarray[Any, Any]] = []
    with _buffers(device) as kept:
        for _ in range(4):
            fresh = [device.alloc(256) for _ in range(8)]
            kept += fresh[1::2]
            for buffer in fresh[::2]:
                buffer.free()
            again = [device.alloc(256) for _ in range(6)]
            kept += again
            for buffer in kept[len(values) :]:
                values.append(noise(subject, 256))
                buffer.upload(0, values[-1])
        for i, (buffer, value) in enumerate(zip(kept, values, strict=True)):
            expect_equal(buffer.read(), value, f"buffer {i} after others were freed")


@memory("freed")
def _(subject: Subject) -> None:
    """Every use of a freed buffer raises LifetimeError; freeing it twice does nothing."""
    device = subject.device
    value = noise(subject, 64)
    with _buffers(device, [64, 64]) as buffers:
        buffer, other = buffers
        other.upload(0, value)
        buffer.free()
        buffer.free()
        expect(buffer.freed, "a freed buffer does not say so")
        buffers.append(device.alloc(64))
        for what, use in {
            "uploading to": lambda: buffer.upload(0, value),
            "downloading from": lambda: buffer.read(0, 1),
            "filling": lambda: buffer.fill(0, 0, 1),
        }.items():
            expect_raises(LifetimeError, f"{what} a freed buffer", use)
        with device.open() as stream:
            arg, source = (Arg(b, 0, f32, (4,), (4,)) for b in (buffer, other))
            step = Step("copy", source, (arg,), {})
            expect_raises(LifetimeError, "compiling with a freed buffer", lambda: stream.compile([step]))
            expect_raises(LifetimeError, "a queued upload to a freed buffer", lambda: stream.upload(buffer, 0, value))
        buffer.free()
        expect_equal(other.read(), value, "another buffer after one was freed twice")


@memory("survival")
def _(subject: Subject) -> None:
    """Values stay when streams come and go and other memory is used."""
    device = subject.device
    value = noise(subject, 1000)
    with device.alloc(1000) as buffer:
        buffer.upload(0, value)
        for _ in range(3):
            device.open().close()
            with device.alloc(1000) as other:
                other.fill(0xFF)
        expect_equal(buffer.read(), value, "a buffer that nobody touched")


@memory("threads")
def _(subject: Subject) -> None:
    """Buffers may be made, used and freed in several threads at once."""
    values = noise(subject, 4 * 512).reshape(4, 512)

    def work(value: np.ndarray[Any, Any]) -> bool:
        same = True
        for _ in range(25):
            with subject.device.alloc(512) as buffer:
                buffer.upload(0, value)
                same = same and bytes(buffer.read()) == value.tobytes()
        return same

    with ThreadPoolExecutor(4) as pool:
        expect(all(pool.map(work, values)), "buffers of different threads disturb each other")


@memory("chunks")
def _(subject: Subject) -> None:
    """Parts that do not fit into one buffer lie in several, each at an aligned offset, and keep their values."""
    kind = BufferType(subject.device, "chunks", max_size=1024)
    sizes = [1, 1000, 24, 1024, 0, 513, 511]
    if subject.device.max_buffer_size is not None and subject.device.max_buffer_size < 1024:
        inapplicable("its largest buffer is smaller than the parts")
    whole, offsets = kind.alloc_chunked(sizes)
    with whole:
        expect(isinstance(whole, MultiBuffer) and len(whole.buffers) > 2, f"{sum(sizes)} bytes became {whole!r}")
        values = [noise(subject, n) for n in sizes]
        places = [whole.locate(at, n) for at, n in zip(offsets, sizes, strict=True)]
        for (buffer, at), value in zip(places, values, strict=True):
            expect(at % kind.alignment == 0, f"a part lies at {at}, which is no multiple of {kind.alignment}")
            buffer.upload(at, value)
        for (buffer, at), value in zip(places, values, strict=True):
            expect_equal(buffer.read(at, value.size), value, f"a part of {value.size} bytes in {whole!r}")


# --- usages and buffer types ----------------------------------------------------------------------------------------


@memory("usage")
def _(subject: Subject) -> None:
    """Buffers of every usage work alike, and the usage can be changed."""
    for usage in Usage:
        with subject.device.alloc(100, usage) as buffer:
            expect(buffer.usage is usage, f"a buffer for {usage} says {buffer.usage}")
            value = noise(subject, 100)
            buffer.upload(0, value)
            for other in Usage:
                buffer.usage = other
                expect_equal(buffer.read(), value, f"a buffer for {usage} that became one for {other}")


@memory("buffer-types")
def _(subject: Subject) -> None:
    """Every buffer type has a unique name, an alignment that is a power of two, and keeps the values of tensors."""
    kinds = list(subject.device.buffer_types)
    expect(
        kinds and kinds[0] is subject.device.default_buffer_type, "the first of buffer_types is not the ordinary one"
    )
    names = [kind.name for kind in kinds]
    expect(len(set(names)) == len(names), f"two kinds of memory have one name: {names}")
    tensors = [contiguous(leaf(f"t{i}", shape)) for i, shape in enumerate([(1,), (3, 5), (64, 33)])]
    for kind in kinds:
        n = kind.alignment
        expect(n > 0 and n & (n - 1) == 0, f"{kind.name}: the alignment {n} is no power of two")
        for tensor in tensors:
            if kind.why_not(tensor) is not None:
                continue
            size = kind.alloc_size(tensor)
            expect(size >= tensor.nbytes, f"{kind.name}: alloc_size gives {size} bytes for {tensor.nbytes}")
            with kind.alloc(size, next(iter(kind.usages))) as buffer:
                _expect_aligned(buffer)
                value = subject.rng.standard_normal(tensor.shape).astype(np.float32)
                for _ in range(2):
                    buffer.init(tensor, 0)
                    buffer.upload(0, value)
                    got = np.empty_like(value)
                    buffer.download(0, got)
                    expect_equal(got.tobytes(), value.tobytes(), f"{kind.name}: a tensor of {tensor.shape}")
                    buffer.reset()


@memory("host-buffer-type")
def _(subject: Subject) -> None:
    """Host memory for transfers can be addressed by the process and goes to the device and back."""
    kind, device = subject.device.host_buffer_type, subject.device
    if kind is None:
        inapplicable("it has no host memory of its own")
    expect(kind.is_host, f"{kind.name} is no host memory")
    value = noise(subject, 1001)
    with kind.alloc(1001) as staged, device.alloc(1001) as there, device.open() as stream:
        view = np.frombuffer(staged.host_bytes(0, 1001), np.uint8)
        view[:] = value
        stream.upload(there, 0, staged.host_bytes(0, 1001))
        stream.synchronize()
        view[:] = 0
        stream.download(there, 0, staged.host_bytes(0, 1001))
        stream.synchronize()
        expect_equal(view, value, f"bytes that went from {kind.name} to the device and back")
        del view
