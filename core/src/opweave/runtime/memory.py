"""`BufferType`: the finished methods of a kind of memory, over the hooks of `opweave.contract.memory`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from time import perf_counter_ns
from typing import TYPE_CHECKING

from opweave.contract.memory import BufferTypeHooks, Usage
from opweave.errors import AllocationError, BoundsError, Broken, UnknownNameError, UnsupportedOpError
from opweave.graph.layout import round_up
from opweave.runtime.buffer import Buffer, MultiBuffer
from opweave.runtime.reclaim import reclaim, reclaim_all
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from opweave.contract.step import Step
    from opweave.graph.tensor import Tensor

__all__ = ["BufferType"]


class BufferType(BufferTypeHooks):
    __doc__ = BufferTypeHooks.__doc__

    @cached_property
    def is_host(self) -> bool:
        """Whether the process can read and write tensors there directly."""
        return self.space.host and self.is_raw

    @cached_property
    def is_typed(self) -> bool:
        """Whether whole arrays are written and read by the device's ``_put`` and ``_get``."""
        own = type(self)
        plain = own._upload is BufferType._upload and own._download is BufferType._download and self.is_raw
        return plain and self.device.caps.typed

    @cached_property
    def can_map(self) -> bool:
        """Whether parts of its buffers can be mapped into host memory; see `mapped`."""
        own = type(self)
        if own._map is not BufferType._map:
            return self.is_raw
        plain = own._alloc is BufferType._alloc and own._upload is BufferType._upload and self.is_raw
        return plain and self.device.caps.map

    def why_not(self, tensor: Tensor) -> str | None:
        """Why the memory does not keep ``tensor``, or ``None`` if it does; by its author's ``_why_not``."""
        return self._why_not(tensor.dtype, tensor.shape)

    def check_tensor(self, tensor: Tensor) -> None:
        """Raise `UnsupportedOpError` unless the memory keeps ``tensor``."""
        why = self.why_not(tensor)
        if why is not None:
            raise UnsupportedOpError(f"{self.name} does not keep {tensor.describe()}: {why}")

    def pays(self, step: Step, source: int) -> bool:
        """Whether the scheduler should keep a read-only tensor here by itself, as a further copy, for ``step`` to read
        it as its source of that number; by its author's ``_pays``."""
        arg = step.srcs[source]
        return self._why_not(arg.dtype, arg.shape) is None and self._pays(step, source)

    def holds(self, usage: Usage) -> bool:
        """Whether the memory is for this usage."""
        return usage in self.usages or Usage.ANY in self.usages

    def check_usage(self, usage: Usage) -> None:
        """Raise `UnsupportedOpError` unless the memory is for this usage, `UnknownNameError` if it is no `Usage`."""
        if not isinstance(usage, Usage):
            members = [f"Usage.{member.name}" for member in Usage]
            hint = f"(a usage is a member of opweave.Usage, not an object of type {type(usage).__name__})"
            raise UnknownNameError("usage of memory", f"{usage!s:.60}", members, hint, listed=True)
        if not self.holds(usage):
            known = ", ".join(sorted(f"Usage.{u.name}" for u in self.usages))
            raise UnsupportedOpError(f"{self.name} is memory for {known}, not for Usage.{usage.name}")

    def alloc(self, size: int, usage: Usage = Usage.ANY) -> Buffer:
        """A buffer of ``size`` bytes with undefined contents.

        Raises:
            AllocationError: the device has not enough free memory, or ``size`` is above ``max_size`` (see
                `alloc_chunked`).
            BoundsError: ``size`` is negative.
            UnsupportedOpError: the memory is not for this usage.
            UnknownNameError: ``usage`` is no `Usage`.
            Broken: the author's ``_alloc`` returned an address that is not aligned.
            Unavailable: this process was forked after the device was set up, and its driver does not survive that.
        """
        self.device.check_process()
        if size < 0:
            raise BoundsError(f"cannot allocate {size} bytes")
        self.check_usage(usage)
        self._check_max(size)
        start = perf_counter_ns() if TRACE.listening else 0
        reclaim()
        try:
            try:
                handle = self._alloc(max(size, 1), usage)
            except MemoryError:
                if not reclaim_all(self.space):
                    raise
                handle = self._alloc(max(size, 1), usage)
        except MemoryError as error:
            if isinstance(error, AllocationError):
                raise
            raise self._allocation_error(size, str(error)) from error
        if handle is None:
            raise self._allocation_error(size, "its _alloc returned None")
        buffer = Buffer(self, handle, size, usage)
        if buffer.address is not None and buffer.address % self.alignment:
            buffer.free()
            raise Broken(
                f"{self.name}: _alloc returned {buffer.address}, which is not an address aligned to {self.alignment}",
                remedy="align it; if handles are integers that are not addresses, override _address to return None",
            )
        if TRACE.listening:
            TRACE.emit(
                "alloc", self.name, start, perf_counter_ns(), bytes=size, usage=usage.value, device=self.device.name
            )
        return buffer

    def alloc_chunked(self, sizes: Sequence[int], usage: Usage = Usage.ANY) -> tuple[MultiBuffer, list[int]]:
        """Memory for parts of the given sizes in bytes, in as few buffers as ``max_size`` allows.

        Returns:
            The buffers as one, and the offset of each part in it. No part lies across two buffers.

        Raises:
            AllocationError: the device has not enough free memory, or one part is above ``max_size``. Nothing stays
                allocated.
            BoundsError: a size is negative. Other errors as `alloc`.
        """
        chunks: list[int] = [0]
        positions: list[tuple[int, int]] = []  # chunk and offset in it
        for size in sizes:
            if size < 0:
                raise BoundsError(f"cannot allocate {size} bytes")
            self._check_max(size)
            at = round_up(chunks[-1], self.alignment)
            if self.max_size is not None and chunks[-1] and at + size > self.max_size:
                chunks.append(0)
                at = 0
            positions.append((len(chunks) - 1, at))
            chunks[-1] = at + size
        buffers: list[Buffer] = []
        try:
            for chunk in chunks:
                buffers.append(self.alloc(chunk, usage))  # noqa: PERF401 - freed on failure
        except BaseException:
            for buffer in buffers:
                buffer.free()
            raise
        whole = MultiBuffer(buffers)
        return whole, [whole.starts[chunk] + at for chunk, at in positions]

    def _check_max(self, size: int) -> None:
        if self.max_size is not None and size > self.max_size:
            raise self._allocation_error(size, f"one buffer has at most {self.max_size:,} bytes")

    def _allocation_error(self, size: int, why: str) -> AllocationError:
        try:
            free, total = self.device.mem_info()
        except Exception:
            free = total = 0  # a failing query must not hide the failed allocation
        if self.name != self.device.name:
            why = f"{why} ({self.name})" if why else self.name
        return AllocationError(self.device.name, size, free if total else None, why)
