"""`Backend` and `Device`: what a plugin registers and what an author implements.

A useful device needs a `KernelTable`, a `kind`, and the four memory methods ``_alloc _free _upload _download``. Every
further underscored method is optional, and overriding it *is* the capability: `Caps` is derived from the class.
Public methods check their arguments; underscored ones may trust what they get.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from opweave.contract.buffer import Buffer, MultiBuffer
from opweave.contract.execution import Stream
from opweave.contract.kernels import KernelTable
from opweave.contract.memory import BufferType, copy_by_host, fill_by_upload
from opweave.contract.space import MemorySpace, Usage, add_queue, as_bytes
from opweave.contract.worker import WorkerStream
from opweave.errors import AllocationError, Broken, Unavailable, UnsupportedOpError, raise_backend_failure
from opweave.graph.layout import nbytes
from opweave.lifecycle import keep_for_ever, told_of_forks

if TYPE_CHECKING:
    from opweave.contract.space import Handle
    from opweave.contract.step import Call, Step
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides

WINDOWS_PER_BUFFER: Final = 16
"""Windows over one mapping begin at least a 16th of the largest buffer apart."""

__all__ = [
    "AbortCallback", "Backend", "Caps", "Device", "DeviceProps", "Features", "Kind", "SetThreads", "SplitBuffers",
]  # fmt: skip

P = TypeVar("P")


class Kind(enum.Enum):
    """What sort of hardware a device is. ``best_device()`` prefers them in this order."""

    GPU = "GPU"
    """A graphics processor with memory of its own."""
    IGPU = "IGPU"
    """A graphics processor that shares the host's memory."""
    ACCEL = "ACCEL"
    """An accelerator beside the CPU, in its memory."""
    CPU = "CPU"
    HOST = "HOST"
    """The core's own device, which runs the references."""


class Caps(NamedTuple):
    """What a device can do beyond the minimum, derived from what its class overrides."""

    fill: bool
    copy: bool
    import_host: bool
    map: bool
    asynchronous: bool
    events: bool
    fuse: bool
    offload: bool
    pinned: bool


class DeviceProps(NamedTuple):
    """A device at a glance. Memory in bytes."""

    name: str
    description: str
    kind: Kind
    hardware_id: str | None
    memory_free: int
    memory_total: int
    caps: Caps


class Device:
    """One piece of hardware. Subclass it; no constructor of it needs to be called.

    Attributes an author may set, on the class or the object:
        kernels: the table of kernels; what the device supports follows from its declarations. Default: an empty one,
            for devices that override ``_why_not`` and bind steps by themselves.
        kind: the sort of hardware.
        id: the part of the name after the colon (``"0"``, ``"cuda:0"``); ``None``: numbered by the registry, or left
            out for an only device.
        description: a short text for people, e.g. the model's name.
        hardware_id: PCI address or UUID, the same through whichever backend the hardware is seen.
        alignment: bytes; buffers begin there and every tensor is placed at a multiple of it.
        max_buffer_size: the largest single allocation in bytes, ``None``: no limit.
        space: the memory space of ordinary buffers; ``None``: a space of its own.
        shared_spaces: further spaces that the device can address.
        dlpack_device: its type and number in DLPack, where it gives and takes arrays in its memory.
        raises_index_errors: whether an index outside of what it indexes is raised, at once or at the next wait, and the
            device goes on; ``False`` where the driver ends the use of the device instead (CUDA's device assertions).
        stream_class: the class of its streams. ``open(**params)`` makes ``stream_class(device, **params)``.
        survives_fork: the device can be used in a child that was forked after it was set up, which no driver of an
            accelerator can. Where it cannot, the child gets `Unavailable`, and its inherited buffers are unusable.
        simulated: it has no memory and computes nothing; schedulers plan with it, building a program refuses it.

    Threads: buffers may be made and freed in any thread; each is used by one thread at a time, in an order that the
    callers see to. ``_alloc _free`` and the memory methods are therefore called from several threads at once, for
    different buffers. A stream is submitted to by one thread at a time.
    """

    kernels: KernelTable
    kind: Kind = Kind.ACCEL
    id: str | None = None
    description: str = ""
    hardware_id: str | None = None
    alignment: int = 64
    max_buffer_size: int | None = None
    space: MemorySpace
    shared_spaces: tuple[MemorySpace, ...] = ()
    dlpack_device: tuple[int, int] | None = None
    raises_index_errors: bool = True
    stream_class: type[Stream] = Stream
    simulated: bool = False
    survives_fork: bool = False

    backend: Backend | None
    _name: str
    _buffers: WeakSet[Buffer]
    _streams: WeakSet[Stream]
    _default_type: BufferType | None
    _lost_by_fork: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Device:
        # State lives here so that authors need not call super().__init__.
        self = super().__new__(cls)
        self.backend = None
        self._name = cls.__name__.lower()
        self._buffers = WeakSet()
        self._streams = WeakSet()
        self._default_type = None
        self._lost_by_fork = False
        told_of_forks(self)
        if not hasattr(cls, "space"):
            self.space = MemorySpace(self._name)
        if not hasattr(cls, "kernels"):
            self.kernels = KernelTable()
        return self

    # --- properties -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """``<entry-point name>:<id>`` once registered."""
        return self._name

    @property
    def caps(self) -> Caps:
        """What the class overrides."""
        return _caps_of(type(self))

    def props(self) -> DeviceProps:
        """Name, description, kind, memory and capabilities in one tuple."""
        free, total = self.mem_info()
        return DeviceProps(self.name, self.description, self.kind, self.hardware_id, free, total, self.caps)

    def mem_info(self) -> tuple[int, int]:
        """Free and total memory in bytes; ``(0, 0)`` where the device does not know. Authors override it."""
        return 0, 0

    def features(self) -> Mapping[str, Any]:
        """Names and values worth showing to people (driver version, instruction sets). Authors override it."""
        return {}

    @property
    def default_buffer_type(self) -> BufferType:
        """The device's ordinary memory."""
        if self._default_type is None:
            self._default_type = BufferType(self)
        return self._default_type

    @property
    def host_buffer_type(self) -> BufferType | None:
        """Host memory from which transfers to this device are fastest (pinned), or ``None``. Authors override it."""
        return None

    @property
    def buffer_types(self) -> Sequence[BufferType]:
        """Every kind of memory that the device offers, the ordinary one first. Authors override it."""
        return (self.default_buffer_type,)

    @property
    def has_own_rules(self) -> bool:
        """Whether the class overrides ``_why_not``: what it supports does not follow from its kernel table alone."""
        return type(self)._why_not is not Device._why_not

    def reaches(self, space: MemorySpace) -> bool:
        """Whether kernels of this device can address ``space``."""
        return space is self.space or space in self.shared_spaces

    def reads(self, kind: BufferType) -> bool:
        """Whether kernels of this device can be given operands in memory of this kind: it reaches the space, and the
        bytes are plain or in a form that it accepts."""
        return self.reaches(kind.space) and (kind.is_raw or self._reads(kind))

    def __repr__(self) -> str:
        return f"<Device {self.name}{': ' + self.description if self.description else ''}>"

    def probe(self) -> None:
        """Find out whether the device works, by what its author's ``_probe`` tries. The registry does it once, when it
        has found the device; one that does not work is listed with the reason, and not among ``ow.devices()``.

        Raises:
            Unavailable: it does not work: why, in the driver's own words, and what to do about it.
        """
        try:
            self._probe()
        except Unavailable:
            raise
        except Exception as error:
            why = f"trying it failed: {type(error).__name__}: {error}"
            raise Unavailable(why, remedy="update its driver, or report it to the authors of the backend") from error

    # --- forked children --------------------------------------------------------------------------------------------

    @property
    def lost_by_fork(self) -> bool:
        """Whether it was set up by the process from which this one was forked, and cannot be used here."""
        return self._lost_by_fork

    def check_process(self) -> None:
        """Raise `Unavailable` if the device is `lost_by_fork`."""
        if self._lost_by_fork:
            raise Unavailable(
                f"{self.name} was set up before this process was forked, which its driver does not survive",
                remedy="start processes with multiprocessing.get_context('spawn'), or fork before devices are used",
            )

    def _inherit(self) -> None:
        if not self.survives_fork:
            self._lost_by_fork = True
            # Giving anything back would ask the driver, whose threads and locks are the parent's.
            buffers = [buffer._inherit() for buffer in list(self._buffers)]
            keep_for_ever([self, *self._streams, *buffers])

    # --- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, size: int, usage: Usage = Usage.ANY) -> Buffer:
        """A buffer of ordinary memory; raises `AllocationError`."""
        return self.default_buffer_type.alloc(size, usage)

    def import_host(self, data: Any, *, max_tensor_size: int | None = None) -> Buffer | MultiBuffer:
        """A buffer over an array's or a mapping's own bytes, without copying. The object is kept alive.

        Read-only arrays and mappings give buffers that nothing may write.

        Args:
            data: a contiguous array or buffer-protocol object.
            max_tensor_size: bytes of the largest tensor in it. A mapping above ``max_buffer_size`` is imported as
                windows that overlap by this much, so that every tensor lies whole in one of them.

        Raises:
            UnsupportedOpError: the device cannot use host memory in place, or not these bytes.
            LayoutError: the bytes do not lie in one piece.
            AllocationError: it is larger than one buffer and ``max_tensor_size`` is missing or too large.
        """
        if not self.caps.import_host:
            raise UnsupportedOpError(f"{self.name} cannot use host memory in place; allocate and upload instead")
        self.check_process()
        view = as_bytes(data)
        size, limit = len(view), self.max_buffer_size
        if size == 0:
            return self.alloc(0)  # drivers refuse to import nothing, and nothing can be told from nothing
        if limit is None or size <= limit:
            return self._import(view)
        detail = f"one buffer has at most {limit:,} bytes"
        if max_tensor_size is None or max_tensor_size < 0:
            raise AllocationError(self.name, size, None, f"{detail}; say max_tensor_size for overlapping windows")
        # Windows begin every `stride` bytes: a tensor begins in one at less than `stride` and ends inside of it.
        stride = (limit - max_tensor_size) // self.alignment * self.alignment
        if stride <= 0 or stride * WINDOWS_PER_BUFFER < limit:
            raise AllocationError(
                self.name, size, None, f"{detail}, too few for windows that overlap by {max_tensor_size:,}"
            )
        starts = list(range(0, max(size - max_tensor_size, 1), stride))
        windows: list[Buffer] = []
        try:
            for start in starts:
                windows.append(self._import(view[start : start + limit]))  # noqa: PERF401 - freed on failure
        except BaseException:
            for window in windows:
                window.free()
            raise
        return MultiBuffer(windows, starts)

    def _import(self, view: memoryview) -> Buffer:
        try:
            handle = self._import_host(view)
        except MemoryError as error:
            if isinstance(error, AllocationError):
                raise
            raise AllocationError(self.name, len(view), None, str(error)) from error
        # The view is kept and not just its object: a mapping with an exported view cannot be closed.
        return Buffer(self.default_buffer_type, handle, len(view), owner=view, readonly=view.readonly)

    def import_dlpack(self, array: Any) -> tuple[Buffer, DType, Shape]:
        """A read-only buffer over another library's dense array in this device's memory; dtype and shape of the array.

        Raises:
            UnsupportedOpError: the device does not take arrays of others, or not this one as it lies.
            DTypeError: a dtype that opweave does not have.
        """
        self.check_process()
        handle, dtype, shape = self._import_dlpack(array)
        size = nbytes(shape, dtype)
        return Buffer(self.default_buffer_type, handle, size, owner=array, readonly=True), dtype, shape

    # --- work -------------------------------------------------------------------------------------------------------

    def open(self, *, worker: bool | str = False, **params: Any) -> Stream:
        """A new stream.

        Args:
            worker: let a thread work it off (`WorkerStream`), so that also a synchronous device runs beside the caller.
            params: the device's own, e.g. ``threads=2``.

        Raises:
            TypeError: parameters that the device does not take.
        """
        self.check_process()
        if str(worker).lower() not in ("", "0", "false"):
            stream: Stream = WorkerStream(self.open(**params))
            self._streams.add(stream)
            add_queue(stream)
            return stream
        try:
            stream = self._open(**params)
        except TypeError as error:
            if params:
                raise TypeError(f"{self.name} does not take {', '.join(params)}: {error}") from error
            raise
        if not isinstance(stream, Stream):
            raise Broken(f"{type(self).__name__}._open must return a Stream, not {stream!r}")
        # Whether steps are fused may be a choice of the caller's; the scheduler asks the stream itself.
        if _abilities(type(stream))[:2] != _abilities(self.stream_class)[:2]:
            raise Broken(
                f"{type(self).__name__}._open returned a {type(stream).__name__}, which can do other things than "
                f"stream_class = {self.stream_class.__name__}",
                remedy=f"set stream_class = {type(stream).__name__} on the device",
            )
        self._streams.add(stream)
        if stream.is_async:
            add_queue(stream)
        return stream

    def synchronize(self) -> None:
        """Wait for all streams of the device; raises the first failure once all are done."""
        streams = [s for s in list(self._streams) if not s.closed]
        for stream in streams:
            stream.settle()
        for stream in streams:
            if stream.failure is not None:
                stream.synchronize()

    def why_not(self, step: Step) -> str | None:
        """Why the device does not run an (unbound) step, or ``None``: it does.

        A check that fails is a reason like any other: the step goes to another device. Sources without elements never
        arrive either.
        """
        if self.kind is not Kind.HOST and any(0 in src.shape for src in step.srcs):
            return "a source has no elements; only the host runs such nodes"
        try:
            why = self._why_not(step)
        except Exception as error:
            return f"its check failed: {type(error).__name__}: {error}"
        if why is None:
            return self._refused_memory(step)
        if isinstance(why, str):
            return why
        return f"its check gave {why!r}; _why_not returns a reason, or None for a step that the device runs"

    def _refused_memory(self, step: Step) -> str | None:
        """Which operand lies in memory that keeps tensors in a form that no kernel here takes, or ``None``."""
        for i, arg in enumerate((step.out, *step.srcs)):
            kind = arg.buffer_type
            if kind is not None and kind is not self._default_type and not kind.is_raw:
                if i == 0:
                    return f"the output lies in {kind.name}, a form that kernels do not write"
                if not self.reads(kind):
                    return f"source {i - 1} lies in {kind.name}, a form that it does not read"
        return None

    def supports(self, step: Step) -> bool:
        """Whether the device runs an (unbound) step."""
        return self.why_not(step) is None

    def offloads(self, step: Step) -> bool:
        """Whether it is worth bringing host weights here to run ``step``."""
        try:
            return self._offload(step)
        except Exception as error:
            raise_backend_failure(error, self.name, "saying whether to bring weights", step.op)

    def wants(self, step: Step) -> bool:
        """Whether it should run ``step`` rather than a device of lower priority that shares its memory."""
        try:
            return self._wants(step)
        except Exception as error:
            raise_backend_failure(error, self.name, "saying whether it wants a step", step.op)

    def inplace(self, step: Step) -> bool:
        """Whether the kernel for ``step`` may be given an output that lies over a source."""
        try:
            return self._inplace(step)
        except Exception as error:
            raise_backend_failure(error, self.name, "saying whether a kernel works in place", step.op)

    # --- what an author implements ----------------------------------------------------------------------------------

    def _alloc(self, size: int, usage: Usage) -> Handle:
        """``size`` > 0 bytes at an aligned place; raises ``MemoryError``."""
        raise NotImplementedError(f"{type(self).__name__} implements no _alloc")

    def _free(self, mem: Handle) -> None:
        """Give back what ``_alloc`` or ``_import_host`` returned. Default: the last reference is enough."""

    def _upload(self, mem: Handle, offset: int, data: memoryview) -> None:
        """Write ``data`` (never empty, in bounds) at byte ``offset``; done when it returns."""
        raise NotImplementedError(f"{type(self).__name__} implements no _upload")

    def _download(self, mem: Handle, offset: int, out: memoryview) -> None:
        """Read ``len(out)`` bytes (never 0, in bounds) from byte ``offset``; done when it returns."""
        raise NotImplementedError(f"{type(self).__name__} implements no _download")

    # --- what an author may override --------------------------------------------------------------------------------

    def _open(self, **params: Any) -> Stream:
        """A stream. Default: one of ``stream_class``."""
        if params and self.stream_class.__init__ is Stream.__init__:
            raise TypeError(f"unknown parameters {sorted(params)}")
        return self.stream_class(self, **params)

    def _probe(self) -> None:
        """Try the device: raise ``Unavailable`` with cause and remedy where it is there but does not work (a driver
        that does not know the hardware, a library without kernels for it). Default: nothing is tried."""

    def _bind_upload(self, mem: Handle, offset: int, data: memoryview) -> Call:
        """``_upload`` as a call that is made many times, of whatever ``data`` holds by then."""
        return partial(self._upload, mem, offset, data)

    def _bind_download(self, mem: Handle, offset: int, out: memoryview) -> Call:
        """``_download`` as a call that is made many times."""
        return partial(self._download, mem, offset, out)

    def _fill(self, mem: Handle, offset: int, size: int, value: int) -> None:
        """Set bytes to ``value``. Default: by uploads."""
        fill_by_upload(self._upload, mem, offset, size, value)

    def _copy(self, dst: Handle, dst_offset: int, src: Handle, src_offset: int, size: int) -> None:
        """Copy within the device's memory, as if by way of a scratch copy. Default: by way of the host."""
        copy_by_host(self._upload, self._download, dst, dst_offset, src, src_offset, size)

    def _import_host(self, data: memoryview) -> Handle:
        """A handle over host bytes, which stay where they are until ``_free``; ``data`` may be read-only.

        Raises ``UnsupportedOpError`` for bytes that the driver does not take (badly aligned, read-only): they are
        copied instead.
        """
        raise NotImplementedError

    def _import_dlpack(self, array: Any) -> tuple[Handle, DType, Shape]:
        """A handle over another library's dense array in this device's memory, which lives until ``_free``; its dtype
        and shape. The array's device is ``dlpack_device``."""
        raise UnsupportedOpError(f"{self.name} takes no arrays of other libraries")

    def _export_dlpack(self, mem: Handle, offset: int, dtype: DType, shape: Shape, strides: Strides) -> Any:
        """An object with ``__dlpack__`` and ``__dlpack_device__`` over a part of this device's memory, which it keeps
        alive. Raises ``BufferError`` where that is not possible."""
        raise BufferError(f"{self.name} shows its memory to no other library")

    def _map(self, mem: Handle, offset: int, size: int) -> memoryview:
        """Device memory as host bytes until ``_unmap``."""
        raise NotImplementedError

    def _unmap(self, mem: Handle, view: memoryview) -> None:
        """End a mapping; what was written there is the device's from now on."""

    def _address(self, mem: Handle) -> int | None:
        """Numeric address of a handle, ``None`` where it has none. Default: that of integers and arrays.

        Override it where handles are integers but not addresses.
        """
        if isinstance(mem, int):
            return mem
        if isinstance(mem, np.ndarray):
            return int(mem.__array_interface__["data"][0])
        return None

    def _why_not(self, step: Step) -> str | None:
        """Default: what the kernel table says. Called with unbound args, once for each signature."""
        return self.kernels.why_not(step)

    def _reads(self, kind: BufferType) -> bool:
        """Whether some kernels read memory of a kind that overrides ``_init``. Default: as kernels were declared
        (``accepts``). Overridden together with ``_why_not``, which then says which steps."""
        return self.kernels.reads(kind)

    def _inplace(self, step: Step) -> bool:
        """Default: as the kernel was declared."""
        kernel = self.kernels.find(step)
        return kernel is not None and kernel.inplace

    def _workspace(self, step: Step) -> int:
        """Bytes of scratch memory that the kernel for ``step`` needs while it runs."""
        return self.kernels.workspace(step)

    def _offload(self, step: Step) -> bool:
        """Whether ``step`` runs so much faster here that its weights should be brought from the host for each run."""
        return False

    def _wants(self, step: Step) -> bool:
        """Whether to take ``step`` over from a device of lower priority of the same memory, because it is large say."""
        return False


_CAPS: Final[WeakKeyDictionary[type[Device], Caps]] = WeakKeyDictionary()


def _caps_of(cls: type[Device]) -> Caps:
    caps = _CAPS.get(cls)
    if caps is None:

        def has(name: str) -> bool:
            return getattr(cls, name) is not getattr(Device, name)

        asynchronous, events, fuse = _abilities(cls.stream_class)
        caps = _CAPS[cls] = Caps(
            fill=has("_fill"),
            copy=has("_copy"),
            import_host=has("_import_host"),
            map=has("_map"),
            asynchronous=asynchronous,
            events=events,
            fuse=fuse,
            offload=has("_offload"),
            pinned=has("host_buffer_type"),
        )
    return caps


def _abilities(stream: type[Stream]) -> tuple[bool, bool, bool]:
    """Whether streams of a class are asynchronous, make events, fuse."""
    return (
        stream._synchronize is not Stream._synchronize,
        stream._record is not Stream._record,
        stream._fuse is not Stream._fuse,
    )


class Backend:
    """What a plugin registers: a named family of devices. The entry point's name becomes the backend's.

    Attributes an author may set:
        priority: among backends that show the same hardware, the higher one is used by default.
        version: for people; default: the distribution's.
    """

    priority: int = 0
    name: str = ""
    version: str = ""

    def devices(self) -> Sequence[Device]:
        """The devices that are here now, also those of which ``_probe`` finds out that they do not work.

        Raises:
            Unavailable: no hardware, driver or library here; say which and how to get it.
        """
        raise NotImplementedError

    def extensions(self) -> Sequence[object]:
        """Objects with optional procedures beside the backend itself. Authors override it."""
        return ()

    def extension(self, which: type[P] | str) -> Any:
        """An optional procedure: the object that implements a protocol, or a callable by its name; else ``None``.

        ``backend.extension(SetThreads)`` gives an object with ``set_threads``; ``backend.extension("set_threads")``
        gives the bound method.
        """
        for candidate in (self, *self.extensions()):
            if isinstance(which, str):
                found = None if which.startswith("_") else getattr(candidate, which, None)
                if callable(found):
                    return found
            elif isinstance(candidate, which):
                return candidate
        return None

    def __repr__(self) -> str:
        return f"<Backend {self.name or type(self).__name__}>"


@runtime_checkable
class SetThreads(Protocol):
    """Set how many threads the backend's kernels use."""

    def set_threads(self, n: int) -> None: ...


@runtime_checkable
class AbortCallback(Protocol):
    """Set a function that running work asks now and then whether to end early (``True``: end)."""

    def set_abort_callback(self, callback: Any) -> None: ...


@runtime_checkable
class SplitBuffers(Protocol):
    """A buffer type whose tensors lie in shards over several devices, by the given shares."""

    def split_buffer_type(self, shares: Sequence[float]) -> BufferType: ...


@runtime_checkable
class Features(Protocol):
    """Names and values about the backend as a whole."""

    def features(self) -> Mapping[str, Any]: ...
