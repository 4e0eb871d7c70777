"""`Target`: one of the scheduler's devices with its stream, its rank, and what it remembers of signatures."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from opweave.contract.device import Device, Kind
from opweave.contract.execution import Stream
from opweave.contract.step import Arg, Step
from opweave.errors import SchedulerError
from opweave.graph.layout import dense_strides, is_dense

if TYPE_CHECKING:
    from opweave.contract.kernels import Kernel
    from opweave.contract.memory import BufferType
    from opweave.graph.tensor import Signature

__all__ = ["Support", "Target", "unbound_step"]


class Support:
    """What a device says of a signature, asked once.

    Attributes:
        reason: why it does not run the node, ``None``: it does.
        packed: it does once its non-dense sources are packed.
        inplace: its kernel may be given an output over a source.
        workspace: bytes of scratch memory while it runs.
        kernel: the kernel that takes it, where the device uses a plain table.
    """

    __slots__ = ("inplace", "kernel", "packed", "reason", "workspace")

    def __init__(
        self,
        reason: str | None,
        packed: bool = False,
        inplace: bool = False,
        workspace: int = 0,
        kernel: Kernel | None = None,
    ) -> None:
        self.reason = reason
        self.packed = packed
        self.inplace = inplace
        self.workspace = workspace
        self.kernel = kernel


def unbound_step(signature: Signature, device: Device, *, packed: bool = False) -> Step:
    """The step that ``device`` is asked about: no memory yet, every source as and where it would lie there.

    Sources in special memory that the device does not reach would come as copies in its ordinary memory.
    """
    srcs = signature.srcs[1:] if signature.op.writes else signature.srcs
    memories = [m if m is not None and device.reaches(m.space) else None for m in signature.memories]
    if signature.op.writes:
        memories = memories[1:]
    args = [
        Arg(None, 0, dtype, shape, dense_strides(shape, dtype) if packed else strides, None, i + 1, memory)
        for i, ((dtype, shape, strides), memory) in enumerate(zip_longest(srcs, memories))
    ]
    return Step(signature.op.name, Arg(None, 0, *signature.out, None, 0), tuple(args), signature.attrs)


class Target:
    """One device of a scheduler.

    Attributes:
        index: position in the order of priority, 0 first.
        device, stream: where it runs.
        buffer_type: what its temporaries lie in.
        owned: the scheduler opened the stream and closes it.
        copier: a second stream of an asynchronous device, for copies beside its steps (`open_copier`).
    """

    __slots__ = ("buffer_type", "copier", "device", "index", "name", "owned", "space", "stream")

    def __init__(self, index: int, stream: Stream, buffer_type: BufferType | None, owned: bool) -> None:
        self.index: Final = index
        self.stream: Final = stream
        self.device: Final = stream.device
        self.name: Final = stream.device.name
        self.buffer_type: Final = buffer_type or stream.device.default_buffer_type
        self.space: Final = self.buffer_type.space
        self.owned: Final = owned
        self.copier: Stream | None = None
        if not self.device.reaches(self.space):
            raise SchedulerError(f"{self.name} cannot reach the memory of {self.buffer_type!r}")

    def __repr__(self) -> str:
        return f"<Target {self.index}: {self.name}>"

    @property
    def streams(self) -> list[Stream]:
        return [self.stream] if self.copier is None else [self.stream, self.copier]

    def open_copier(self) -> None:
        """Have copies run beside steps, where the device is asynchronous and its streams wait for each other."""
        if self.copier is None and self.stream.is_async and self.stream.has_events:
            self.copier = self.device.open(worker=self.stream.has_thread)

    def close(self) -> None:
        """Close the streams that were opened for the scheduler."""
        if self.copier is not None:
            self.copier.close()
            self.copier = None
        if self.owned:
            self.stream.close()

    def support(self, signature: Signature) -> Support:
        """What the device says of nodes with a signature; remembered on it."""
        known = signature.support.get(self.device)
        if known is None:
            known = signature.support[self.device] = self._ask(signature)
        return known

    def _ask(self, signature: Signature) -> Support:
        if 0 in signature.out[1]:
            return Support(None)  # there is nothing to compute, and nothing will be
        if any(0 in shape for _, shape, _ in signature.srcs) and self.device.kind is not Kind.HOST:
            return Support("a source has no elements; only the host runs such nodes")
        step = unbound_step(signature, self.device)
        reason = self.device.why_not(step)
        packed = False
        if reason is not None and not all(is_dense(s, t, d) for d, s, t in signature.srcs):
            step = unbound_step(signature, self.device, packed=True)
            packed = self.device.why_not(step) is None
        if reason is not None and not packed:
            return Support(reason)
        kernel = self.device.kernels.find(step) if hasattr(self.device, "kernels") else None
        try:
            workspace = self.device._workspace(step)
        except Exception as error:  # as a check that fails: another device may run it
            return Support(f"its workspace failed: {type(error).__name__}: {error}")
        return Support(None, packed, self.device.inplace(step), workspace, kernel)
