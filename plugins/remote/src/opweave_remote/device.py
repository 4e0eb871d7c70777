"""`RemoteDevice`: a device of a server, used as if it were here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgpack

from opweave.contract import Arg, Device, Step, Stream, Usage
from opweave.errors import AllocationError, FormatError, OpweaveError
from opweave.graph.precision import PRECISIONS, Precision
from opweave_remote.connection import Connection
from opweave_remote.description import DeviceInfo
from opweave_remote.link import Link, Reply
from opweave_remote.memory import RemoteMemory
from opweave_remote.packing import LARGE, PART, as_sent
from opweave_remote.steps import encode_step
from opweave_remote.stream import RemoteStream
from opweave_remote.wire import Kind, fields
from opweave_remote.wires import same_machine

__all__ = ["RemoteDevice"]

_PACKED_AHEAD: Final = 8
"""Compressed parts of an upload that may be unanswered at a time; the client keeps them until they are answered."""
_FEWEST_CACHED: Final = 1 << 16
"""Bytes of a weight from which on it is looked for in the server's cache."""


class Answer(NamedTuple):
    """What the server's device says of a step.

    Attributes:
        reason: why it does not run the step; ``None``: it does, and only then the other fields have a meaning.
        inplace, workspace, precision, wants, offload: as the hooks of `Device`.
    """

    reason: str | None
    inplace: bool = False
    workspace: int = 0
    precision: Precision = "exact"
    wants: bool = False
    offload: bool = False


class RemoteDevice(Device):
    """A device of a server. Made by a `Connection`.

    Attributes:
        connection: to the server.
        remote_name: its name there.
    """

    stream_class: type[Stream] = RemoteStream

    def __init__(self, connection: Connection, info: DeviceInfo) -> None:
        self.connection: Final = connection
        self.remote_name: Final = info.name
        self.id = f"{connection.name}/{info.name}"
        self.name = f"remote:{self.id}"
        self.kind = info.kind
        self.description = info.description
        if info.hardware_id is not None:
            # Beside a device of this machine it is the same piece of hardware, if the server runs here too.
            here = connection.info.machine == same_machine()
            self.hardware_id = info.hardware_id if here else f"{connection.info.machine}/{info.hardware_id}"
        self.alignment = info.alignment
        self.max_buffer_size = info.max_buffer_size
        self.raises_index_errors = info.raises_index_errors
        self.space = connection.space(info.space, self.name)
        self.shared_spaces = tuple([connection.space(n, f"{connection.name}#{n}") for n in info.shared_spaces])
        self._features: Final = info.features
        self._answers: Final[dict[bytes, Answer]] = {}

    @property
    def alive(self) -> bool:
        """Whether its server is alive, as far as is known."""
        return self.connection.alive

    def mem_info(self) -> tuple[int, int]:
        """Free and total bytes there, as far as this client may use them; ``(0, 0)`` once it is lost."""
        if not self.alive:
            return 0, 0
        self.connection.send_dropped()
        free, total = fields(self._call(Kind.INFO, self.remote_name), "uu", "the memory of a device")
        return min(free, total), total

    def features(self) -> Mapping[str, Any]:
        """Those of the device on its server, and opweave's version there."""
        return {"opweave": self.connection.info.version, **self._features}

    # --- memory -------------------------------------------------------------------------------------------------------

    def _call(self, kind: Kind, *args: Any, into: memoryview | None = None) -> Any:
        return self._ask(kind, *args, into=into).result()

    def _ask(self, kind: Kind, *args: Any, data: memoryview | None = None, into: memoryview | None = None) -> Reply:
        return self.connection.control.ask(kind, *args, data=data, into=into)

    def _alloc(self, size: int, usage: Usage) -> RemoteMemory:
        connection = self.connection
        connection.send_dropped()
        number = connection.number()
        try:
            self._call(Kind.ALLOC, self.remote_name, number, size, usage.value)
        except AllocationError as error:
            raise AllocationError(self.name, size, error.free, "its server has no more for this client") from error
        return RemoteMemory(connection, number, size, usage)

    def _free(self, mem: RemoteMemory) -> None:
        mem.connection.dropped.append(mem.number)

    def _address(self, mem: Any) -> None:
        return None

    def _upload(self, mem: RemoteMemory, offset: int, data: memoryview) -> None:
        size, info = len(data), self.connection.info
        if info.cache and mem.usage is Usage.WEIGHTS and size >= _FEWEST_CACHED:
            digest = sha256(data).digest()
            if self._call(Kind.HAVE, mem.number, offset, size, digest) is True:
                return
        carrier = self.connection.carrier
        if carrier is None or size < carrier.least or not carrier.upload(self, mem, offset, data):
            self.send(mem, offset, data)

    def send(self, mem: RemoteMemory, offset: int, data: memoryview) -> None:
        """Write bytes to a buffer by the connection's sockets, compressed if that pays."""
        packer = self.connection.packing.chosen(data)
        replies: list[Reply] = []
        for link, at, piece in self._pieces(data):
            part, how = as_sent(packer, piece)
            kind = Kind.WRITE_PACKED if how else Kind.WRITE
            replies.append(link.ask(kind, mem.number, offset + at, *how, data=part))
            if packer is not None:
                link.flush()
                if len(replies) >= _PACKED_AHEAD:
                    replies[-_PACKED_AHEAD].wait()
        _wait_for(replies)

    def _download(self, mem: RemoteMemory, offset: int, out: memoryview) -> None:
        self.fetch(mem, offset, out)

    def fetch(self, mem: RemoteMemory, offset: int, out: memoryview) -> None:
        """Read bytes of a buffer, by the carrier of the connection if they are many enough."""
        carrier = self.connection.carrier
        if carrier is None or len(out) < carrier.least or not carrier.download(self, mem, offset, out):
            self.receive(mem, offset, out)

    def receive(self, mem: RemoteMemory, offset: int, out: memoryview) -> None:
        """Read bytes of a buffer by the connection's sockets."""
        _wait_for([link.ask(Kind.READ, mem.number, offset + at, len(piece), into=piece)
                   for link, at, piece in self._pieces(out)])  # fmt: skip

    def _pieces(self, data: memoryview) -> list[tuple[Link, int, memoryview]]:
        """The parts of a transfer: over which link, from which byte on, which bytes."""
        size = len(data)
        if size < LARGE:
            return [(self.connection.control, 0, data)]
        links = self.connection.bulk()
        piece = min(PART, self.connection.info.max_data)
        return [(links[i % len(links)], at, data[at : at + piece]) for i, at in enumerate(range(0, size, piece))]

    def _fill(self, mem: RemoteMemory, offset: int, size: int, value: int) -> None:
        self._call(Kind.FILL, mem.number, offset, size, value)

    def _copy(self, dst: RemoteMemory, dst_offset: int, src: RemoteMemory, src_offset: int, size: int) -> None:
        self._call(Kind.COPY, dst.number, dst_offset, src.number, src_offset, size)

    # --- what it runs -------------------------------------------------------------------------------------------------

    def _why_not(self, step: Step) -> str | None:
        return self._why_not_many([step])[0]

    def _why_not_many(self, steps: Sequence[Step]) -> list[str | None]:
        keys = [_key(step) for step in steps]
        new = [key for key in dict.fromkeys(keys) if type(key) is bytes and key not in self._answers]
        if new:
            rows = [msgpack.unpackb(key, use_list=True) for key in new]
            told = self._call(Kind.ASK, self.remote_name, rows)
            if type(told) is not list or len(told) != len(new):
                raise FormatError(f"{self.name} was asked about {len(new)} steps, and answers {told!r:.60}")
            for key, row in zip(new, told, strict=True):
                self._answers[key] = _answer(row)
        return [key if isinstance(key, str) else self._answers[key].reason for key in keys]

    def _answer(self, step: Step) -> Answer:
        key = _key(step)
        if isinstance(key, str):
            return Answer(key)
        if key not in self._answers:
            self._why_not_many([step])
        return self._answers[key]

    def _inplace(self, step: Step) -> bool:
        return self._answer(step).inplace

    def _precision(self, step: Step) -> Precision:
        return self._answer(step).precision

    def _workspace(self, step: Step) -> int:
        return self._answer(step).workspace

    def _wants(self, step: Step) -> bool:
        return self._answer(step).wants

    def _offload(self, step: Step) -> bool:
        return self._answer(step).offload


def _key(step: Step) -> bytes | str:
    """What the server is asked about a step, equal for steps that differ only in where their operands lie; or why it
    cannot be asked."""
    out = _unbound(step.out, 0)
    srcs = tuple([_unbound(arg, i) for i, arg in enumerate(step.srcs, 1)])
    try:
        row = encode_step(step._replace(out=out, srcs=srcs, live=True, label=""))
        packed: bytes = msgpack.packb(row)
    except (OpweaveError, OverflowError, TypeError, ValueError) as error:
        return f"it cannot be sent to another process: {error}"
    return packed


def _unbound(arg: Arg, value: int) -> Arg:
    return Arg(None, 0, arg.dtype, arg.shape, arg.strides, None, value)


def _answer(row: Any) -> Answer:
    reason, inplace, workspace, precision, wants, offload = fields(row, "*?us??", "an answer about a step")
    if not (reason is None or type(reason) is str) or precision not in PRECISIONS:
        raise FormatError(f"an answer about a step is {row!r:.100}")
    return Answer(reason, inplace, workspace, precision, wants, offload)


def _wait_for(replies: Sequence[Reply]) -> None:
    """Wait for all answers, then raise the first failure."""
    for reply in replies:
        reply.link.flush()
    for reply in replies:
        reply.wait()
    for reply in replies:
        reply.result()
