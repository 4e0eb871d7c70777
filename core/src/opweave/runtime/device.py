"""`Device`: the finished methods of a device, over the hooks of its author (`opweave.contract.device`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from opweave.contract.device import Caps, DeviceHooks, DeviceProps, Kind
from opweave.contract.kernels import KernelTable
from opweave.contract.memory import MemorySpace, Usage, as_bytes
from opweave.errors import (
    AllocationError,
    Broken,
    Cancelled,
    LifetimeError,
    Unavailable,
    UnknownNameError,
    UnsupportedOpError,
    chain_of,
    raise_backend_failure,
)
from opweave.graph.layout import nbytes
from opweave.graph.precision import check_precision, is_within
from opweave.lifecycle import keep_forever, notify_after_fork
from opweave.runtime.buffer import Buffer, MultiBuffer
from opweave.runtime.memory import BufferType
from opweave.runtime.reclaim import add_queue
from opweave.runtime.stream import Stream
from opweave.runtime.worker import WorkerStream

if TYPE_CHECKING:
    from opweave.contract.backend import Backend
    from opweave.contract.step import Step
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Tensor

__all__ = ["Device", "StreamCaps", "caps_of", "stream_caps"]

T = TypeVar("T")

WINDOWS_PER_BUFFER: Final = 16
"""A mapping above ``max_buffer_size`` is imported as windows; each begins at least a 16th of that size after the
last."""


class Device(DeviceHooks):
    __doc__ = DeviceHooks.__doc__

    stream_class: type[Stream] = Stream

    backend: Backend | None
    live_buffers: WeakSet[Buffer]
    live_streams: WeakSet[Stream]
    _default_type: BufferType | None
    _lost_by_fork: bool
    tuned: bool  # whether the tunables have values that were measured on this machine
    artefacts: dict[Any, Any]  # what its streams have compiled, see `Stream.artefact`

    def __new__(cls, *args: Any, **kwargs: Any) -> Device:
        # State lives here so that authors need not call super().__init__.
        self = super().__new__(cls)
        self.backend = None
        self.name = cls.__name__.lower()
        self.live_buffers = WeakSet()
        self.live_streams = WeakSet()
        self._default_type = None
        self._lost_by_fork = False
        self.tuned = False
        self.artefacts = {}
        notify_after_fork(self)
        if not hasattr(cls, "space"):
            self.space = MemorySpace(self.name)
        if not hasattr(cls, "kernels"):
            self.kernels = KernelTable()
        return self

    # --- properties -------------------------------------------------------------------------------------------------

    @property
    def caps(self) -> Caps:
        """The capabilities, derived from the methods that the class overrides."""
        return caps_of(type(self), Device)

    def props(self) -> DeviceProps:
        """Name, description, kind, memory and capabilities in one tuple. The memory figures are current."""
        free, total = self.mem_info()
        return DeviceProps(self.name, self.description, self.kind, self.hardware_id, free, total, self.caps)

    @property
    def default_buffer_type(self) -> BufferType:
        """The device's ordinary memory."""
        if self._default_type is None:
            self._default_type = BufferType(self)
        return self._default_type

    @property
    def answers_many(self) -> bool:
        """Whether the class overrides ``_why_not_many``: it is asked about all nodes of a graph at once."""
        return type(self)._why_not_many is not Device._why_not_many

    @property
    def has_own_rules(self) -> bool:
        """Whether the class overrides ``_why_not``: what it supports does not follow from its kernel table alone."""
        return type(self)._why_not is not Device._why_not

    def reaches(self, space: MemorySpace) -> bool:
        """Whether kernels of this device can address ``space``."""
        return space is self.space or space in self.shared_spaces

    def reads(self, kind: BufferType) -> bool:
        """Whether kernels of this device accept operands in memory of this kind: the device reaches its space, and
        stores tensors there as plain bytes or in a format that some kernel accepts."""
        return self.reaches(kind.space) and (kind.is_raw or self._reads(kind))

    @property
    def has_repacked(self) -> bool:
        """Whether the device offers memory that stores tensors in a format of its own."""
        if type(self).buffer_types is Device.buffer_types:
            return False
        return not all(kind.is_raw for kind in self.buffer_types)

    def keeps_repacked(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the device offers memory that stores one of these tensors in a format of its own."""
        kinds = [kind for kind in self.buffer_types if not kind.is_raw]
        return any(kind.why_not(tensor) is None for kind in kinds for tensor in tensors)

    def repacks(self, step: Step, whole: Collection[int]) -> dict[int, BufferType]:
        """In which special memory the device would rather read sources of an unbound ``step``: position -> buffer type.

        Args:
            whole: positions of the sources that are whole read-only tensors, of which a copy can be made once.
        """
        kinds = [kind for kind in self.buffer_types if not kind.is_raw]
        found = {}
        for i in whole if kinds else ():
            best = next((kind for kind in kinds if kind.pays(step, i)), None)
            if best is not None:
                found[i] = best
        return found

    def packed_bytes(self, step: Step, source: int) -> int:
        """Bytes of the copy that the device's library packs of a read-only source of an unbound ``step``."""
        return self._packed_bytes(step, source)

    def buffer_type(self, name: str) -> BufferType:
        """The kind of memory with a name: ``"cpu.decoded"``, or that without the device's name, ``"decoded"``.

        Raises:
            UnknownNameError: the device offers no such memory.
        """
        for kind in self.buffer_types:
            if name.lower() in (kind.name.lower(), kind.name.lower().removeprefix(f"{self.name.lower()}.")):
                return kind
        raise UnknownNameError(f"kind of memory of {self.name}", name, [kind.name for kind in self.buffer_types])

    def __copy__(self) -> Self:
        return self  # a second object would give back the same memory

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise LifetimeError(f"{self!r} cannot be pickled: it belongs to this process; pickle its name, {self.name!r}, "
                            "and let opweave.device(name) find it where it is needed")  # fmt: skip

    def __repr__(self) -> str:
        return f"<Device {self.name}{': ' + self.description if self.description else ''}>"

    def probe(self) -> None:
        """Check that the device works, by its author's ``_probe``. The registry calls it once when it has found the
        device. One that does not work is missing in ``ow.devices()``; ``opweave devices`` shows it with the reason.

        Raises:
            Unavailable: it does not work; carries the driver's message and a remedy.
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
        """Whether the device was set up before this process was forked, and therefore cannot be used here."""
        return self._lost_by_fork

    def check_process(self) -> None:
        """Raise `Unavailable` if the device is `lost_by_fork`."""
        if self._lost_by_fork:
            raise Unavailable(
                f"{self.name} was set up before this process was forked, which its driver does not survive",
                remedy="start processes with multiprocessing.get_context('spawn'), or fork before devices are used",
            )

    def after_fork(self) -> None:
        if not self.survives_fork:
            self._lost_by_fork = True
            # Freeing anything would call the driver, whose threads and locks exist in the parent only.
            buffers = [buffer.after_fork() for buffer in list(self.live_buffers)]
            keep_forever([self, *self.live_streams, *buffers])

    # --- memory -----------------------------------------------------------------------------------------------------

    def alloc(self, size: int, usage: Usage = Usage.ANY) -> Buffer:
        """A buffer of ``size`` bytes of ordinary memory with undefined contents; raises what `BufferType.alloc`
        does."""
        return self.default_buffer_type.alloc(size, usage)

    def import_host(self, data: Any, *, max_tensor_size: int | None = None) -> Buffer | MultiBuffer:
        """A buffer over the bytes of a host array or a mapped file, without copying. The buffer keeps the object alive.

        A buffer over a read-only array or mapping is read-only.

        Args:
            data: a contiguous array or buffer-protocol object.
            max_tensor_size: bytes of the largest tensor in it. Data above ``max_buffer_size`` is imported as windows
                that overlap by this size, so that each tensor lies completely in one window.

        Returns:
            A `Buffer`; a `MultiBuffer` of windows if the data is larger than ``max_buffer_size``.

        Raises:
            UnsupportedOpError: the device cannot use host memory in place, or cannot use these bytes.
            LayoutError: the bytes are not contiguous.
            AllocationError: the data is larger than one buffer, and ``max_tensor_size`` is missing or too large.
            Unavailable: see `check_process`.
        """
        if not self.caps.import_host:
            raise UnsupportedOpError(f"{self.name} cannot use host memory in place; allocate and upload instead")
        return self.import_bytes(as_bytes(data), max_tensor_size)

    def import_bytes(self, view: memoryview, max_tensor_size: int | None = None) -> Buffer | MultiBuffer:
        """`import_host` of flat bytes, on a device that is known to import."""
        self.check_process()
        size, limit = len(view), self.max_buffer_size
        if size == 0:
            return self.alloc(0)  # drivers refuse to import 0 bytes, and an empty buffer shares no bytes anyway
        if limit is None or size <= limit:
            return self._import(view)
        detail = f"one buffer has at most {limit:,} bytes"
        if max_tensor_size is None or max_tensor_size < 0:
            raise AllocationError(self.name, size, None, f"{detail}; pass max_tensor_size for overlapping windows")
        # Windows begin every `stride` bytes: each tensor begins in some window below `stride`, and so ends inside of
        # it.
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
        """A read-only buffer over another library's dense array in this device's memory, without copying.

        Args:
            array: an object with ``__dlpack__``, on the device ``dlpack_device``. The buffer keeps it alive.

        Returns:
            The buffer, and dtype and shape of the array.

        Raises:
            UnsupportedOpError: the device does not import arrays, or not one with this layout.
            DTypeError: a dtype that opweave does not have.
            Unavailable: see `check_process`.
        """
        self.check_process()
        handle, dtype, shape = self._import_dlpack(array)
        size = nbytes(shape, dtype)
        return Buffer(self.default_buffer_type, handle, size, owner=array, readonly=True), dtype, shape

    # --- work -------------------------------------------------------------------------------------------------------

    def open(self, *, worker: bool | str = False, **params: Any) -> Stream:
        """A new stream.

        Args:
            worker: let a thread of its own do the work (`WorkerStream`), so that even a synchronous device computes
                while the caller goes on.
            params: parameters of the device, e.g. ``threads=2``.

        Raises:
            TypeError: the device does not have such parameters.
            Broken: the backend's ``_open`` returned something else than a stream like ``stream_class``.
            Unavailable: see `check_process`.
        """
        self.check_process()
        if str(worker).lower() not in ("", "0", "false"):
            stream: Stream = WorkerStream(self.open(**params))
            self.live_streams.add(stream)
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
        # Not compared: `fuse`, which may depend on a parameter; the scheduler looks at the stream itself.
        if stream_caps(type(stream))._replace(fuse=False) != stream_caps(self.stream_class)._replace(fuse=False):
            raise Broken(
                f"{type(self).__name__}._open returned a {type(stream).__name__}, whose capabilities differ from those "
                f"of stream_class = {self.stream_class.__name__}",
                remedy=f"set stream_class = {type(stream).__name__} on the device",
            )
        stream.opened_with = params
        self.live_streams.add(stream)
        if stream.is_async:
            add_queue(stream)
        return stream

    def synchronize(self) -> None:
        """Wait for all streams of the device, then raise the first failure as `ExecutionError`, if there is one. Work
        that was ended on purpose (`Cancelled`) is none: whoever waits for that work is told."""
        streams = [s for s in list(self.live_streams) if not s.closed]
        for stream in streams:
            stream.settle()
        for stream in streams:
            failure = stream.failure
            if failure is not None and not any(isinstance(reason, Cancelled) for reason in chain_of(failure)):
                stream.synchronize()

    def why_not(self, step: Step) -> str | None:
        """Why the device does not run an (unbound) step, or ``None`` if it does.

        If the author's ``_why_not`` raises, the exception is the reason, and the step goes to another device. Sources
        without elements are refused for every device but the host.
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
        """Which operand lies in a buffer type whose format no kernel of the device accepts, or ``None``."""
        for i, arg in enumerate((step.out, *step.srcs)):
            kind = arg.buffer_type
            if kind is not None and kind is not self._default_type and not kind.is_raw:
                if i == 0:
                    return f"the output lies in {kind.name}, a format that kernels do not write"
                if not self.reads(kind):
                    return f"source {i - 1} lies in {kind.name}, a format that it does not read"
        return None

    def ask_ahead(self, steps: Sequence[Step]) -> list[bool]:
        """Ask about many (unbound) steps at once, where the author overrides ``_why_not_many``: single questions about
        these take no time then. Returns for each step whether the device runs it; ``False`` for all if the author's
        method raises, because the single questions then give the reason."""
        try:
            return [why is None for why in self._why_not_many(steps)]
        except Exception:
            return [False] * len(steps)

    def supports(self, step: Step) -> bool:
        """Whether the device runs an (unbound) step."""
        return self.why_not(step) is None

    def offloads(self, step: Step) -> bool:
        """Whether to run ``step`` here although its weights are in host memory and have to be copied for each run."""
        return self._asked(self._offload, step, "saying whether to bring weights")

    def wants(self, step: Step) -> bool:
        """Whether this device should run ``step`` instead of a device of lower priority that shares its memory."""
        return self._asked(self._wants, step, "saying whether it wants a step")

    def inplace(self, step: Step) -> bool:
        """Whether the output of ``step`` may be the same memory as one of its sources."""
        return self._asked(self._inplace, step, "saying whether a kernel works in place")

    def precision(self, step: Step) -> Precision:
        """The precision in which the device computes ``step``; raises `Broken` where it is rougher than the step
        allows."""
        found = self._asked(self._precision, step, "saying in which precision it computes")
        if not is_within(check_precision(found), step.precision):
            raise Broken(f"{self.name} computes {step.op} in {found}, and {step.precision} is asked for")
        return found

    def _asked(self, hook: Callable[[Step], T], step: Step, doing: str) -> T:
        try:
            return hook(step)
        except Exception as error:
            raise_backend_failure(error, self.name, doing, step.op)


class StreamCaps(NamedTuple):
    """Which hooks the streams of a class override; see `Caps`."""

    asynchronous: bool
    events: bool
    fuse: bool
    functional: bool


_CAPS: Final[WeakKeyDictionary[type[Device], Caps]] = WeakKeyDictionary()


def caps_of(cls: type[Device], base: type[Device]) -> Caps:
    """The capabilities of a class of devices: what it overrides of ``base``, which is `Device`."""
    caps = _CAPS.get(cls)
    if caps is None:

        def has(name: str) -> bool:
            return getattr(cls, name) is not getattr(base, name)

        streams = stream_caps(cls.stream_class)
        caps = _CAPS[cls] = Caps(
            fill=has("_fill"),
            copy=has("_copy"),
            import_host=has("_import_host"),
            map=has("_map"),
            asynchronous=streams.asynchronous,
            events=streams.events,
            fuse=streams.fuse,
            offload=has("_offload"),
            pinned=has("host_buffer_type"),
            functional=streams.functional,
            typed=has("_put") and has("_get"),
        )
    return caps


def stream_caps(cls: type[Stream]) -> StreamCaps:
    """The capabilities of a class of streams."""
    functional = cls._compile_functional is not Stream._compile_functional
    return StreamCaps(
        asynchronous=cls._synchronize is not Stream._synchronize,
        events=cls._record is not Stream._record,
        fuse=functional or cls._fuse is not Stream._fuse,
        functional=functional,
    )
