"""Level 4, second part: values that several devices of a backend exchange by its `Collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract import Collectives, Usage
from opweave.contract.collectives import CollectiveKind
from opweave.errors import Unavailable
from opweave.graph.dtypes import DType, bf16, f16, f32, f64, i32
from opweave.runtime.host.operands import dense_arg
from opweave.runtime.host.sums import bind_collective
from opweave_conformance.checklist import Checklist, Subject, expect, expect_equal, inapplicable

if TYPE_CHECKING:
    from opweave.contract import Arg, Call, Device, Stream

__all__ = ["CHECKS"]

Array = np.ndarray[Any, Any]

SIZE: Final = 6 * 5 * 4 * 3
"""Elements of the parts: 2 to 6 devices share them equally."""

MOST: Final = 6
GUARD: Final = 64
DTYPES: Final = (f32, f64, f16, bf16, i32)
KINDS: Final[tuple[CollectiveKind, ...]] = ("all_reduce", "all_gather", "reduce_scatter")

ROUNDOFFS: Final = 4
"""Allowed error of sums in another order: so many unit roundoffs of the sum of the magnitudes, times the parts."""

exchange = Checklist(4, "collective", per_device=False)
CHECKS = exchange.checks


def _add(kind: CollectiveKind) -> None:
    def check(subject: Subject) -> None:
        found = subject.backend.extension(Collectives)
        devices = [device for device in subject.devices if device.backend is subject.backend][:MOST]
        if found is None:
            inapplicable("the backend brings no collectives of its own")
        if len(devices) < 2:
            inapplicable("it takes two devices of the backend")
        done = 0
        for group in dict.fromkeys((tuple(devices[:2]), tuple(devices))):
            for dtype in DTYPES:
                done += _exchange(subject, found, kind, group, dtype)
        if not done:
            inapplicable(f"it does no {kind} itself")

    check.__doc__ = (
        f"{kind}: every device gets the right values, all of them in equal bits; parts and other bytes stay."
    )
    exchange(kind.replace("_", "-"))(check)


def _exchange(
    subject: Subject, found: Collectives, kind: CollectiveKind, devices: Sequence[Device], dtype: DType
) -> bool:
    """Do a collective twice, with different values; returns whether the backend does it."""
    support = found.collective_support(kind, devices, dtype, SIZE)
    if support is None:
        return False
    n, what = len(devices), f"{kind} of {dtype} over {len(devices)} devices"
    sizes = {"all_reduce": SIZE, "all_gather": n * SIZE, "reduce_scatter": SIZE // n}
    with ExitStack() as stack:
        try:
            streams = [stack.enter_context(device.open()) for device in devices]
        except Unavailable as why:
            inapplicable(str(why))
        parts = [_operand(stack, device, dtype, SIZE) for device in devices]
        outs = [_operand(stack, device, dtype, sizes[kind]) for device in devices]
        calls: list[tuple[Stream, Call]] = []
        for i, stream in enumerate(streams):
            if support.together:
                if i == 0:
                    calls.append((stream, bind_collective(kind, found, stream, outs, parts)[0]))
                continue
            share = list(parts)
            if kind == "reduce_scatter":
                step = sizes[kind]
                share = [_window(part, i * step, step) for part in parts]
            calls.append((stream, bind_collective(kind, found, stream, [outs[i]], share)[0]))
        for _ in range(2):
            values = [_values(subject.rng, dtype) for _ in devices]
            for part, array in zip(parts, values, strict=True):
                _fill(part, array)
            for out in outs:
                _fill(out, None)
            _make(streams, calls)
            for part, array in zip(parts, values, strict=True):
                _expect_bytes(part, array, f"{what}: a part")
            _judge(kind, support.order == "shards", outs, values, what)
    return True


def _operand(stack: ExitStack, device: Device, dtype: DType, size: int) -> Arg:
    buffer = stack.enter_context(device.alloc(size * dtype.itemsize + 2 * GUARD, Usage.COMPUTE))
    return dense_arg(buffer, GUARD, dtype, (size,))


def _window(whole: Arg, start: int, size: int) -> Arg:
    assert whole.buffer is not None
    return dense_arg(whole.buffer, whole.offset + start * whole.dtype.itemsize, whole.dtype, (size,))


def _values(rng: np.random.Generator, dtype: DType) -> Array:
    """Values of very different magnitudes, so that another order gives other sums."""
    if not dtype.is_float:
        return rng.integers(-1000, 1000, SIZE).astype(dtype.numpy)
    return (rng.standard_normal(SIZE) * 2.0 ** rng.integers(-6, 7, SIZE)).astype(dtype.numpy)


def _fill(arg: Arg, array: Array | None) -> None:
    """Set an operand to an array, and the bytes around it to a pattern; with ``None`` the operand too."""
    assert arg.buffer is not None
    raw = np.full(arg.buffer.size, 0xA5, np.uint8)
    if array is not None:
        raw[arg.offset : arg.offset + arg.nbytes] = array.view(np.uint8)
    arg.buffer.upload(0, raw)


def _expect_bytes(arg: Arg, array: Array, what: str) -> None:
    assert arg.buffer is not None
    raw = np.full(arg.buffer.size, 0xA5, np.uint8)
    raw[arg.offset : arg.offset + arg.nbytes] = array.view(np.uint8)
    expect_equal(arg.buffer.read(), raw, what)


def _make(streams: Sequence[Stream], calls: Sequence[tuple[Stream, Any]]) -> None:
    for _, call in calls:
        call()
    for stream in streams:
        stream.synchronize()


def _judge(kind: CollectiveKind, ordered: bool, outs: Sequence[Arg], values: Sequence[Array], what: str) -> None:
    got = []
    for i, out in enumerate(outs):
        assert out.buffer is not None
        raw = np.frombuffer(out.buffer.read(), np.uint8)
        around = np.concatenate((raw[: out.offset], raw[out.offset + out.nbytes :]))
        expect((around == 0xA5).all(), f"{what}: it writes around the result of device {i}")
        got.append(raw[out.offset : out.offset + out.nbytes].copy())
    if kind != "reduce_scatter":
        for i, other in enumerate(got[1:], 1):
            expect_equal(other, got[0], f"{what}: the result of device {i}, against that of device 0")
    if kind == "all_gather":
        expect_equal(got[0], np.concatenate(values).view(np.uint8), what)
        return
    joined = np.concatenate(got) if kind == "reduce_scatter" else got[0]
    dtype = values[0].dtype
    exact = not np.issubdtype(dtype, np.inexact) and dtype.kind in "iu"
    wide = np.float32 if dtype.itemsize < 4 and not exact else dtype
    total = values[0].astype(wide)
    for value in values[1:]:
        total = total + value.astype(wide)
    want = total.astype(dtype)
    if ordered or exact:
        expect_equal(joined, want.view(np.uint8), f"{what}, added in the order of the devices")
        return
    sums = np.add.reduce([np.abs(value.astype(np.float64)) for value in values])
    precision = 2.0 ** -{2: 8 if dtype.kind == "V" else 11, 4: 24, 8: 53}[dtype.itemsize]
    off = np.abs(joined.view(dtype).astype(np.float64) - np.add.reduce([v.astype(np.float64) for v in values]))
    worst = float((off / (sums * precision * len(values) + 1e-300)).max())
    expect(worst <= ROUNDOFFS, f"{what}: it is off by {worst:.1f} times the rounding of a sum in any order")


for _kind in KINDS:
    _add(_kind)
