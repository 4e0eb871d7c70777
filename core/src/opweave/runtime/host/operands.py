"""Reading and writing operands, and copying between any two buffers: directly, or by way of the host.

``read``, ``write`` and the copies are complete when they return. `bind_copy` and the other ``bind_`` functions choose
the way beforehand and return calls, which programs run at device boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opweave.contract.step import Arg
from opweave.contract.transfers import BOUNCE_BYTES
from opweave.errors import DTypeError, LayoutError, LifetimeError, ShapeError
from opweave.graph.layout import array_shape, dense_strides
from opweave.runtime.buffer import Buffer
from opweave.runtime.stream import Stream
from opweave.runtime.transfers import copy_bytes, mapped
from opweave.runtime.worker import WorkerStream

if TYPE_CHECKING:
    from opweave.contract.step import Call
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.runtime.host.regions import Rectangles

__all__ = [
    "Adopted", "CallSequence", "bind_copy", "bind_keep", "bind_read", "bind_read_ahead", "bind_selected_copy",
    "bind_write", "copy", "copy_bytes", "read", "write",
]  # fmt: skip

PACKED: Final = 4
"""Windows are transferred with the gaps in them where that makes at most so many times their bytes."""

MOST_GROUPS: Final = 64
"""Operands of more groups of rows are transferred with all bytes between them."""


def read(arg: Arg) -> np.ndarray[Any, Any]:
    """A new dense array with the operand's values; of quantized types a ``uint8`` array of `array_shape`.

    Raises:
        LifetimeError: the operand has no memory, or its buffer was freed.
        BoundsError: the operand extends beyond its buffer.
    """
    buffer = _memory(arg)
    shape = array_shape(arg.shape, arg.dtype)
    if not arg.size:
        return np.empty(shape, arg.dtype.numpy)
    if buffer.is_host:
        buffer.check(arg.offset, arg.span)
        return np.array(arg.view, order="C", copy=True)
    if arg.is_dense:
        out = np.empty(shape, arg.dtype.numpy)
        buffer.download(arg.offset, out)
        return out
    if arg.nbytes * 2 < arg.span and (found := _few_rectangles(arg)) is not None:
        out = np.empty(shape, arg.dtype.numpy)
        for offset, rows in found.of(out):
            buffer.download_2d(offset, found.pitch, rows)
        return out
    raw = buffer.read(arg.offset, arg.span)
    strides = (*arg.strides[:-1], 1) if arg.dtype.block > 1 else arg.strides
    return np.array(np.ndarray(shape, arg.dtype.numpy, raw, 0, strides), order="C", copy=True)


def write(arg: Arg, array: np.ndarray[Any, Any]) -> None:
    """Set the operand to the values of an array of its dtype and shape (`array_shape` for quantized types).

    Raises:
        ShapeError, DTypeError: the array has another shape or dtype.
        LifetimeError: the operand has no memory, or its buffer was freed.
        BoundsError, HazardError: the operand extends beyond its buffer, or the buffer is read-only.
    """
    buffer = _memory(arg)
    if array.shape != array_shape(arg.shape, arg.dtype):
        raise ShapeError(f"an array of shape {array.shape} does not fit {arg!r}")
    if array.dtype != arg.dtype.numpy:
        raise DTypeError(f"an array of {array.dtype} does not fit {arg!r}")
    if not arg.size:
        return
    if buffer.is_host:
        buffer.check(arg.offset, arg.span, write=True)
        np.copyto(arg.view, array)
    elif arg.is_dense:
        buffer.upload(arg.offset, np.ascontiguousarray(array))
    elif (found := _few_rectangles(arg)) is not None:
        for offset, rows in found.of(np.ascontiguousarray(array)):
            buffer.upload_2d(offset, found.pitch, rows)
    else:
        with mapped(buffer, arg.offset, arg.span, write=True) as raw:
            strides = (*arg.strides[:-1], 1) if arg.dtype.block > 1 else arg.strides
            np.copyto(np.ndarray(array.shape, arg.dtype.numpy, raw, 0, strides), array)


def _few_rectangles(arg: Arg) -> Rectangles | None:
    """The operand as groups of rows, ``None`` where it is none or transferring all bytes between them costs less."""
    from opweave.runtime.host.regions import rectangles  # most operands are dense

    try:
        found = rectangles(arg)
    except LayoutError:
        return None
    return found if found.pitch >= found.width and len(found.offsets) <= MOST_GROUPS else None


def copy(dst: Arg, src: Arg) -> None:
    """Copy values between two operands of the same shape and dtype, whatever their layouts and memories.

    Raises:
        ShapeError: shapes or dtypes differ.
        LifetimeError, BoundsError, HazardError: as `copy_bytes`.
    """
    if dst.shape != src.shape or dst.dtype is not src.dtype:
        raise ShapeError(f"cannot copy {src!r} to {dst!r}: shapes and dtypes must be equal")
    to, of = _memory(dst), _memory(src)
    to.check(dst.offset, dst.span, write=True)
    of.check(src.offset, src.span)
    if dst.is_dense and src.is_dense:
        copy_bytes(to, dst.offset, of, src.offset, src.nbytes)
    elif to.is_host and of.is_host:
        np.copyto(dst.view, src.view)
    else:
        write(dst, read(src))


# --- prepared calls -------------------------------------------------------------------------------------------------


class CallSequence:
    """Several calls, made one after the other as one call."""

    __slots__ = ("calls",)

    def __init__(self, calls: tuple[Call, ...]) -> None:
        self.calls: Final = calls

    def __call__(self) -> None:
        for call in self.calls:
            call()


def bind_copy(dst: Arg, stream: Stream, src: Arg) -> tuple[Call, bool]:
    """Prepare a copy of the values of ``src`` to ``dst``. The call must not be made once one of the buffers was freed.

    Args:
        dst, src: bound operands of one shape and dtype.
        stream: a stream of the target's device.

    Returns:
        The call, and whether it queues the copy on ``stream``. If it does, the producer of ``src`` is complete by then
        or ``stream`` waits for it. If not, the calling thread copies, and both operands must be ready.
    """
    if isinstance(stream, WorkerStream):
        call, queued = bind_copy(dst, stream.inner, src)
        return partial(stream.call, call if queued else _when_idle(stream.inner, call)), True
    to, of = _memory(dst), _memory(src)
    dense = dst.is_dense and src.is_dense
    if not stream.device.reaches(to.space) or not (to.type.is_raw and of.type.is_raw):
        return partial(copy, dst, src), False  # memory that the stream does not reach, or that stores whole tensors
    if not stream.is_async:
        return _bind_now(dst, stream, src), False
    if dense and of.is_host and stream.queues_uploads(to):
        return partial(stream.upload, to, dst.offset, of.host_bytes(src.offset, src.nbytes)), True
    if dense and stream.queues_copies(to, of):
        return partial(stream.copy_from, to, dst.offset, of, src.offset, src.nbytes), True
    return partial(copy, dst, src), False


def _bind_now(dst: Arg, stream: Stream, src: Arg) -> Call:
    """The call that copies while it is made, between raw memories that the device of a synchronous stream reaches."""
    to, of = _memory(dst), _memory(src)
    if to.is_host and of.is_host:
        return partial(np.copyto, dst.view, src.view)
    size, kinds = dst.nbytes, (to.type, of.type)
    bounces = kinds[0] is not kinds[1] and not any(kind.can_map or kind.is_typed for kind in kinds)
    if not (dst.is_dense and src.is_dense):
        packs = bounces and dst.is_dense and src.dtype.block == 1 and src.span <= min(PACKED * size, BOUNCE_BYTES)
        return _bind_packing(dst, src) if packs else partial(copy, dst, src)
    if to.type.is_typed or of.type.is_typed:
        return partial(_copy_array, _reader(src), _writer(dst))
    to.check(dst.offset, size, write=True)
    of.check(src.offset, size)
    if of.is_host:
        return to.type._bind_upload(to.handle, dst.offset, of.host_bytes(src.offset, size))
    if to.is_host:
        return of.type._bind_download(of.handle, src.offset, to.host_bytes(dst.offset, size))
    if bounces and size <= BOUNCE_BYTES:
        staging = stream.staging(size)
        down = of.type._bind_download(of.handle, src.offset, staging)
        return CallSequence((down, to.type._bind_upload(to.handle, dst.offset, staging)))
    return partial(copy, dst, src)


def _bind_packing(dst: Arg, src: Arg) -> Call:
    """A copy of a window with gaps to a dense one, by way of the host: all its bytes, and then its elements."""
    to, of = _memory(dst), _memory(src)
    to.check(dst.offset, dst.nbytes, write=True)
    of.check(src.offset, src.span)
    raw, packed, kind = memoryview(bytearray(src.span)), memoryview(bytearray(dst.nbytes)), src.dtype.numpy
    pack = partial(np.copyto, np.ndarray(dst.shape, kind, packed), np.ndarray(src.shape, kind, raw, 0, src.strides))
    down = of.type._bind_download(of.handle, src.offset, raw)
    return CallSequence((down, pack, to.type._bind_upload(to.handle, dst.offset, packed)))


def _copy_array(get: Callable[[], np.ndarray[Any, Any]], put: Callable[..., None]) -> None:
    put(get(), False)


def _writer(dst: Arg) -> Callable[..., None]:
    """A function of a dense array and whether it is borrowed (`DeviceHooks._put`), which writes it to ``dst``."""
    buffer = _memory(dst)
    if not buffer.type.is_typed:
        return lambda array, borrowed: write(dst, array)
    buffer.check(dst.offset, dst.nbytes, write=True)
    return buffer.device._bind_put(buffer.handle, dst.offset, dst.dtype, dst.shape)


def _reader(src: Arg) -> Callable[[], np.ndarray[Any, Any]]:
    """A function that returns the values of ``src``, which must not be written."""
    buffer = _memory(src)
    if not buffer.type.is_typed:
        return (lambda: src.view) if buffer.is_host else partial(read, src)
    buffer.check(src.offset, src.nbytes)
    return buffer.device._bind_get(buffer.handle, src.offset, src.dtype, src.shape)


def bind_selected_copy(
    dst: Arg, stream: Stream, src: Arg, ids: Arg, count: Callable[[int], object] = lambda n: None
) -> tuple[Call, bool]:
    """As `bind_copy`, but only of the rows along the first axis that ``ids`` contain when the call is made.

    Both operands are dense. The other rows of ``dst`` keep their values. ``count`` is called with the number of bytes
    that are copied.
    """
    if isinstance(stream, WorkerStream):
        call, _ = bind_selected_copy(dst, stream.inner, src, ids, count)
        return partial(stream.call, _when_idle(stream.inner, call)), True
    to, of, rows = _memory(dst), _memory(src), dst.shape[0]
    row = dst.nbytes // rows

    def copy_rows() -> None:
        wanted = np.unique(read(ids))
        wanted = wanted[(wanted >= 0) & (wanted < rows)]
        count(wanted.size * row)
        # Consecutive rows are copied together.
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1):
            if run.size:
                start = int(run[0]) * row
                copy_bytes(to, dst.offset + start, of, src.offset + start, run.size * row)

    return copy_rows, False


class Adopted(NamedTuple):
    """An array of another library in a device's memory, imported to be fed. ``buffer`` lies over it and keeps it."""

    buffer: Buffer


def bind_write(dst: Arg, stream: Stream) -> tuple[np.ndarray[Any, Any] | None, Any, bool]:
    """Prepare writing fed arrays of the shape and dtype of ``dst`` to it.

    Returns:
        A NumPy array over ``dst`` to copy into, or ``None``; if ``None``, a function to call with the array, or with an
        `Adopted` one if the device exchanges arrays; and whether that function queues the copy on ``stream``, so that
        it may read the array after it has returned.
    """
    buffer = _memory(dst)
    view, put, queued = _bind_write(buffer, dst, stream)
    if buffer.device.dlpack_device is None or buffer.is_host or isinstance(stream, WorkerStream):
        return view, put, queued
    adopt = _bind_adopt(buffer, dst, stream)
    return None, lambda array: adopt(array) if isinstance(array, Adopted) else put(array), queued


def _bind_write(buffer: Buffer, dst: Arg, stream: Stream) -> tuple[np.ndarray[Any, Any] | None, Any, bool]:
    if isinstance(stream, WorkerStream):
        view, put, queued = bind_write(dst, stream.inner)
        job = partial(np.copyto, view) if view is not None else put
        if not queued:
            job = _when_idle(stream.inner, job)
        return None, lambda array: stream.call(partial(job, array)), True
    if dst.is_dense and stream.queues_uploads(buffer):
        return None, lambda array: stream.upload(buffer, dst.offset, np.ascontiguousarray(array)), True
    if buffer.is_host:
        return dst.view, None, False
    if dst.is_dense and buffer.type.is_typed:
        put = _writer(dst)
        return None, _when_idle(stream, lambda array: put(np.asarray(array, order="C"), True)), False
    return None, partial(write, dst), False


def _bind_adopt(buffer: Buffer, dst: Arg, stream: Stream) -> Callable[[Adopted], None]:
    """A function that takes an array in the device's memory over to ``dst``: as it is, or by a copy on the device."""
    if buffer.type.is_typed and dst.is_dense:
        put = _when_idle(stream, _writer(dst))
        return lambda adopted: put(adopted.buffer.owner, True)

    def copied(adopted: Adopted) -> None:
        source = adopted.buffer
        if dst.is_dense:
            stream.copy_from(buffer, dst.offset, source, 0, source.size)
            return
        if stream.is_async:
            stream.synchronize()
        copy(dst, dense_arg(source, 0, dst.dtype, dst.shape))

    return copied


def bind_keep(src: Arg, stream: Stream | None = None) -> Call | None:
    """As `bind_read`, but the call returns an array that stays in the device's memory: an object with ``__dlpack__``.

    ``None`` where the device does not export its memory. Arrays that nothing overwrites are not copied.
    """
    buffer = _memory(src)
    if buffer.is_host:
        return bind_read(src, stream)
    device = buffer.device
    if device.dlpack_device is None or src.dtype.block > 1:
        return None
    if device.caps.functional:
        return partial(buffer.exported, src.offset, src.dtype, src.shape, src.strides)

    def call() -> Any:
        own = buffer.type.alloc(src.span)
        copy_bytes(own, 0, buffer, src.offset, src.span)
        return own.exported(0, src.dtype, src.shape, src.strides)

    return _when_idle(stream.inner, call) if isinstance(stream, WorkerStream) else call


def _when_idle(stream: Stream, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that waits until ``stream`` has no work in flight and then calls ``call``."""
    if not stream.is_async:
        return call

    def synchronized(*args: Any) -> Any:
        stream.synchronize()
        return call(*args)

    return synchronized


def bind_read(src: Arg, stream: Stream | None = None) -> Call:
    """Prepare reading: the call returns a new array with the values of ``src``, which must be ready by then.

    Args:
        stream: the stream that computes ``src``; if it is a `WorkerStream`, the call is made by its thread.
    """
    buffer = _memory(src)
    if buffer.type.is_typed and src.is_dense:
        get = _reader(src)

        def copied() -> np.ndarray[Any, Any]:
            return get().copy()

        call: Call = copied
    else:
        call = src.view.copy if buffer.is_host and src.is_dense else partial(read, src)
    # Work that the thread has submitted to an asynchronous inner stream may still be in flight.
    return _when_idle(stream.inner, call) if isinstance(stream, WorkerStream) else call


def bind_read_ahead(src: Arg, stream: Stream) -> Callable[[], np.ndarray[Any, Any]] | None:
    """Prepare queueing the reading of ``src`` on ``stream``: the call returns a new array, filled when the stream
    has done its earlier work. ``None`` for streams that do not read ahead, and for operands that are not dense."""
    buffer = _memory(src)
    queue = stream.inner if isinstance(stream, WorkerStream) else stream
    if not (queue.reads_ahead and queue.is_async and src.is_dense and queue.owns(buffer)):
        return None

    def call() -> np.ndarray[Any, Any]:
        out = np.empty(array_shape(src.shape, src.dtype), src.dtype.numpy)
        stream.download(buffer, src.offset, out)
        return out

    return call


def _memory(arg: Arg) -> Buffer:
    if arg.buffer is None:
        raise LifetimeError(f"{arg!r} has no memory yet")
    return arg.buffer


def dense_arg(buffer: Buffer, offset: int, dtype: DType, shape: Shape, handle: Any = None) -> Arg:
    """A dense (row-major) operand at byte ``offset`` of ``buffer``."""
    return Arg(buffer, offset, dtype, shape, dense_strides(shape, dtype), handle)
