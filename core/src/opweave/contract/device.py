"""What the author of a device implements and may override (`DeviceHooks`), and what a device is (`Kind`, `Caps`).

A useful device needs a `KernelTable` and the memory methods ``_alloc _upload _download``; ``_free`` too, where dropping
a handle does not free its memory. Every further underscored method is optional. Overridden hooks define the
capabilities (`Caps`). Public methods of `Device` check their arguments before they call a hook; hooks may rely on
that.
"""

from __future__ import annotations

import enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from opweave.contract.stream import StreamHooks
from opweave.contract.transfers import Rows, copy_by_host, download_rows, fill_by_upload, upload_rows
from opweave.errors import UnknownNameError, UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opweave.contract.kernels import KernelTable
    from opweave.contract.memory import Handle, MemorySpace, Usage
    from opweave.contract.step import Call, Step
    from opweave.contract.tunable import Limit, Tunable
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape, Strides
    from opweave.graph.precision import Precision
    from opweave.runtime.memory import BufferType
    from opweave.runtime.stream import Stream

__all__ = ["Caps", "DeviceHooks", "DeviceProps", "Kind"]


class Kind(enum.Enum):
    """The sort of hardware of a device, in the order in which devices are preferred."""

    GPU = "GPU"
    """A graphics processor with its own memory."""
    IGPU = "IGPU"
    """An integrated graphics processor that shares the host's memory."""
    ACCEL = "ACCEL"
    """Any other accelerator, in memory of its own or the host's."""
    CPU = "CPU"
    """The processors that the host runs on."""
    HOST = "HOST"
    """The device built into the core, which runs the references."""

    @property
    def rank(self) -> int:
        """Position in the order of preference, 0 first."""
        return list(Kind).index(self)

    @classmethod
    def named(cls, name: Kind | str) -> Kind:
        """The kind called ``name``, without regard to case; raises `UnknownNameError` if there is none."""
        if isinstance(name, Kind):
            return name
        try:
            return cls[str(name).upper()]
        except KeyError:
            raise UnknownNameError("kind of device", str(name), [kind.name for kind in cls]) from None


class Caps(NamedTuple):
    """What a device can do beyond the minimum, derived from the methods that its class overrides.

    Attributes:
        fill: sets bytes without an upload (``_fill``).
        copy: copies within its memory without the host (``_copy``).
        import_host: uses host memory in place (``_import_host``).
        map: shows its memory as host bytes (``_map``).
        asynchronous: its streams return before the work is complete (``Stream._synchronize``).
        events: waiting for a point of a stream does not wait for all of its work (``Stream._record``).
        fuse: its streams compute several steps as one (``Stream._fuse``).
        offload: chooses steps for which weights are copied to it for each run (``_offload``).
        pinned: offers host memory for fast transfers (``host_buffer_type``).
        functional: its streams compute by functions of immutable arrays (``Stream._compile_functional``).
        typed: whole arrays are transferred (``_put``, ``_get``).
    """

    fill: bool
    copy: bool
    import_host: bool
    map: bool
    asynchronous: bool
    events: bool
    fuse: bool
    offload: bool
    pinned: bool
    functional: bool
    typed: bool


class DeviceProps(NamedTuple):
    """A summary of a device. Made by `Device.props`.

    Attributes:
        name, description, kind, hardware_id: as the attributes of `Device`.
        memory_free, memory_total: bytes; 0 where the device does not know.
        caps: its capabilities.
    """

    name: str
    description: str
    kind: Kind
    hardware_id: str | None
    memory_free: int
    memory_total: int
    caps: Caps


class DeviceHooks:
    """One piece of hardware as its author sees it. Subclass `opweave.contract.Device`, which has the finished
    methods too; ``super().__init__()`` need not be called.

    An author may set its attributes, on the class or the object.

    Attributes:
        kernels: the table of kernels, whose declarations define what the device supports. Default: an empty table, for
            devices that override ``_why_not`` and whose streams bind steps without a table.
        kind: the sort of hardware.
        id: the part of the name after the colon (``"0"``, ``"cuda:0"``). ``None``: the registry numbers the devices,
            or leaves the part out if there is only one.
        description: a short text for people, e.g. the name of the model.
        hardware_id: PCI address or UUID; equal for every backend that offers the same hardware. ``None``: unknown.
        alignment: bytes, a power of two; buffers begin at a multiple of it, and so does each tensor in them.
        max_buffer_size: the largest single allocation in bytes; ``None``: no limit.
        space: the memory space of ordinary buffers. Default: a space that belongs to this device only.
        shared_spaces: further spaces that its kernels can address.
        dlpack_device: its device type and number in DLPack if it exchanges arrays in its memory; ``None``: it does not.
        raises_index_errors: ``True``: an index outside of its axis raises an error, at once or at the next wait, and
            the device remains usable. ``False``: the driver then makes the device unusable (CUDA's device assertions).
        stream_class: the class of its streams. ``open(**params)`` makes ``stream_class(device, **params)``.
        survives_fork: whether the device can be used in a child process that was forked after it was set up; drivers
            of accelerators cannot. If not, using it there raises `Unavailable`, and inherited buffers are unusable.
        simulated: it has no memory and computes nothing: schedulers plan with it, but build no program for it.
        threaded: its streams compute in threads of this process, and take ``threads``: a number or a
            `opweave.ThreadPool`.

    Threads: buffers may be made and freed in any thread; each buffer is used by one thread at a time, which the callers
    make sure of. ``_alloc _free`` and the memory methods are therefore called from several threads at once, for
    different buffers. One thread at a time submits to a stream.
    """

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
    simulated: bool = False
    threaded: bool = False
    survives_fork: bool = False

    kernels: KernelTable
    stream_class: type[Stream]
    name: str
    """``<entry-point name>:<id>`` once registered; the registry sets it."""

    @property
    def default_buffer_type(self) -> BufferType:
        """The device's ordinary memory."""
        raise NotImplementedError

    def mem_info(self) -> tuple[int, int]:
        """Free and total memory in bytes; ``(0, 0)`` where the device does not know. Authors override it."""
        return 0, 0

    def features(self) -> Mapping[str, Any]:
        """Names and values worth showing to people (driver version, instruction sets). Authors override it."""
        return {}

    @property
    def host_buffer_type(self) -> BufferType | None:
        """Host memory from which transfers to this device are fastest (pinned), or ``None``. Authors override it."""
        return None

    @property
    def buffer_types(self) -> Sequence[BufferType]:
        """Every kind of memory that the device offers, the ordinary one first. Authors override it."""
        return (self.default_buffer_type,)

    @property
    def tunables(self) -> Sequence[Tunable]:
        """Numbers of its kernels that are measured on each machine: the same objects in each call. Authors override
        it."""
        return ()

    @property
    def limits(self) -> Sequence[Limit]:
        """Every number by which its kernels choose their paths, the tunables among them: the same objects in each call.
        The conformance suite sets each to small and large values. Authors override it."""
        return self.tunables

    @property
    def alive(self) -> bool:
        """Whether the device can still be used, as far as is known; `opweave.devices` leaves out those that cannot.
        Authors of devices that may go away override it."""
        return True

    @property
    def reads_block_tables(self) -> bool:
        """Whether attention of few queries reads keys and values by a block table where they lie, although a graph has
        `embedding` put the blocks of each sequence side by side: a step over an `opweave.KVCache` with ``blocks`` then
        copies none of them. Authors override it."""
        return False

    # --- what an author implements ----------------------------------------------------------------------------------

    def _alloc(self, size: int, usage: Usage) -> Handle:
        """A handle of ``size`` > 0 new bytes, aligned to ``alignment``; raises ``MemoryError`` if there are not
        enough."""
        raise NotImplementedError(f"{type(self).__name__} implements no _alloc")

    def _free(self, mem: Handle) -> None:
        """Free what ``_alloc`` or ``_import_host`` returned. Default: nothing; dropping the handle frees it."""

    def _upload(self, mem: Handle, offset: int, data: memoryview) -> None:
        """Write ``data`` (not empty, within bounds) at byte ``offset``. Complete when it returns."""
        raise NotImplementedError(f"{type(self).__name__} implements no _upload")

    def _download(self, mem: Handle, offset: int, out: memoryview) -> None:
        """Read ``len(out)`` bytes (not 0, within bounds) from byte ``offset``. Complete when it returns."""
        raise NotImplementedError(f"{type(self).__name__} implements no _download")

    # --- what an author may override --------------------------------------------------------------------------------

    def _open(self, **params: Any) -> Stream:
        """A new stream. Default: ``stream_class(self, **params)``."""
        if params and self.stream_class.__init__ is StreamHooks.__init__:
            raise TypeError(f"unknown parameters {sorted(params)}")
        return self.stream_class(self, **params)

    def _probe(self) -> None:
        """Try out the device; raise ``Unavailable`` with cause and remedy if it is present but does not work (a driver
        that does not know the hardware, a library without kernels for it). Default: no check."""

    def _bind_upload(self, mem: Handle, offset: int, data: memoryview) -> Call:
        """A function that calls ``_upload`` and is called many times; it writes what ``data`` holds at that time."""
        return partial(self._upload, mem, offset, data)

    def _bind_download(self, mem: Handle, offset: int, out: memoryview) -> Call:
        """A function that calls ``_download`` and is called many times."""
        return partial(self._download, mem, offset, out)

    def _upload_2d(self, mem: Handle, offset: int, pitch: int, rows: Rows) -> None:
        """Write rows of bytes, row ``i`` at byte ``offset + i * pitch``. Default: by ``_download`` and ``_upload`` of
        the range, or row by row where that is large.

        Args:
            rows: ``uint8`` array of two axes with at least one element. Each row is contiguous; ``rows.strides[0]`` is
                the distance between them in host memory (`flat_rows` gives the bytes from the first to the last one).
        """
        upload_rows(self._upload, self._download, mem, offset, pitch, rows)

    def _download_2d(self, mem: Handle, offset: int, pitch: int, out: Rows) -> None:
        """Read rows of bytes: the counterpart of ``_upload_2d``. Default: by ``_download``."""
        download_rows(self._download, mem, offset, pitch, out)

    def _put(self, mem: Handle, offset: int, dtype: DType, shape: Shape, array: Any, borrowed: bool) -> None:
        """Write a whole dense array, so that a device that keeps arrays need not make one of bytes. Optional, with
        ``_get``.

        Args:
            array: a C-contiguous NumPy array of that dtype and shape (of quantized types the bytes), or an array in
                this device's memory that ``_import_dlpack`` took.
            borrowed: the array stays unchanged until the run for which it is written has ended, and may be used where
                it lies. If not, it may be changed when this returns.
        """
        raise NotImplementedError

    def _get(self, mem: Handle, offset: int, dtype: DType, shape: Shape) -> np.ndarray[Any, Any]:
        """Read a whole dense array, which must not be written: it may show memory of the device."""
        raise NotImplementedError

    def _bind_put(self, mem: Handle, offset: int, dtype: DType, shape: Shape) -> Callable[[Any, bool], None]:
        """A function of ``array`` and ``borrowed`` that calls ``_put`` and is called many times."""
        return partial(self._put, mem, offset, dtype, shape)

    def _bind_get(self, mem: Handle, offset: int, dtype: DType, shape: Shape) -> Callable[[], np.ndarray[Any, Any]]:
        """A function that calls ``_get`` and is called many times."""
        return partial(self._get, mem, offset, dtype, shape)

    def _fill(self, mem: Handle, offset: int, size: int, value: int) -> None:
        """Set ``size`` bytes from ``offset`` on to ``value`` (0 .. 255). Default: by uploads."""
        fill_by_upload(self._upload, mem, offset, size, value)

    def _copy(self, dst: Handle, dst_offset: int, src: Handle, src_offset: int, size: int) -> None:
        """Copy within the device's memory. The ranges may overlap: the result is as if all bytes were read first.
        Default: by way of the host."""
        copy_by_host(self._upload, self._download, dst, dst_offset, src, src_offset, size)

    def _import_host(self, data: memoryview) -> Handle:
        """A handle over host bytes, which stay at their address until ``_free``; ``data`` may be read-only.

        Raises ``UnsupportedOpError`` for bytes that the driver cannot use (alignment, read-only); callers then copy
        them.
        """
        raise NotImplementedError

    def _import_dlpack(self, array: Any) -> tuple[Handle, DType, Shape]:
        """A handle over another library's dense array in this device's memory, valid until ``_free``; dtype and shape
        of the array. The device of the array is ``dlpack_device``."""
        raise UnsupportedOpError(f"{self.name} does not import arrays of other libraries")

    def _export_dlpack(self, mem: Handle, offset: int, dtype: DType, shape: Shape, strides: Strides) -> Any:
        """An object with ``__dlpack__`` and ``__dlpack_device__`` over a part of this device's memory, which it keeps
        alive. ``offset`` and ``strides`` are in bytes. Raises ``BufferError`` where that is not possible."""
        raise BufferError(f"{self.name} does not export its memory to other libraries")

    def _map(self, mem: Handle, offset: int, size: int) -> memoryview:
        """Show ``size`` bytes of device memory as host memory until ``_unmap``."""
        raise NotImplementedError

    def _unmap(self, mem: Handle, view: memoryview) -> None:
        """End a mapping. What was written to it is in the device's memory when this returns."""

    def _address(self, mem: Handle) -> int | None:
        """The numeric address of a handle, ``None`` if it has none. Default: that of integers and NumPy arrays.

        Override it if handles are integers that are not addresses.
        """
        if isinstance(mem, int):
            return mem
        if isinstance(mem, np.ndarray):
            return int(mem.__array_interface__["data"][0])
        return None

    def _why_not(self, step: Step) -> str | None:
        """Why the device does not run ``step``, or ``None`` if it does. Default: the answer of the kernel table. Called
        with unbound args, once for each signature."""
        return self.kernels.why_not(step)

    def _why_not_many(self, steps: Sequence[Step]) -> Sequence[str | None]:
        """`_why_not` of many steps at once, for devices where a question takes long. Default: one after the other.

        A device that overrides it is asked about all nodes of a graph at once when the graph is built; it should keep
        what it learns, to answer the single questions that follow.
        """
        return [self._why_not(step) for step in steps]

    def _reads(self, kind: BufferType) -> bool:
        """Whether some kernel reads tensors in ``kind``, which overrides ``_init``. Default: as declared by the kernels
        (``accepts``). Override it together with ``_why_not``, which then decides for each step."""
        return self.kernels.reads(kind)

    def _inplace(self, step: Step) -> bool:
        """Whether the output may be the same memory as a source. Default: as declared by the kernel."""
        kernel = self.kernels.find(step)
        return kernel is not None and kernel.inplace

    def _precision(self, step: Step) -> Precision:
        """The precision in which the device computes ``step``, ``step.precision`` or finer. Default: as declared by the
        kernel. Override it together with ``_why_not``."""
        kernel = self.kernels.find(step)
        return "exact" if kernel is None else kernel.precision

    def _workspace(self, step: Step) -> int:
        """Bytes of scratch memory that the kernel for ``step`` needs while it runs. Default: as declared by the
        kernel."""
        return self.kernels.workspace(step)

    def _offload(self, step: Step) -> bool:
        """Whether ``step`` is so much faster here that its weights should be copied from host memory for each run; see
        `Offloading`."""
        return False

    def _packed_bytes(self, step: Step, source: int) -> int:
        """Bytes that the device's library takes for itself to pack a read-only source of ``step``, which is then read
        no more. Plans count them before anything is packed; `StreamHooks.repack` limits them. Default: 0."""
        return 0

    def _wants(self, step: Step) -> bool:
        """Whether to run ``step`` instead of a device of lower priority that shares the memory, e.g. because the step
        is large."""
        return False
