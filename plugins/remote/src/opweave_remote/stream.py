"""`RemoteStream`: a queue of work on a device of a server, over a connection of its own.

Nothing is waited for until somebody asks for an event: the messages for uploads, plans, copies and downloads of one run
leave together, that for its event last. The next event reports what failed on the way, together with the plan and
the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, cast

from opweave.contract import Buffer, Call, Group, Launch, Plan, Range, Step, StepError, Stream
from opweave.errors import DeviceLostError, FormatError
from opweave_remote.failures import Failure
from opweave_remote.link import CARRYING, Link, Reply
from opweave_remote.memory import RemoteMemory
from opweave_remote.packing import PART, as_sent
from opweave_remote.steps import encode_group, encode_step
from opweave_remote.wire import Kind, encode, encode_again, fields

if TYPE_CHECKING:
    from opweave_remote.device import RemoteDevice

__all__ = ["RemoteStream"]


_FEWEST_PULLED: Final = 1 << 20
"""Bytes from which on a server fetches from another one itself; fewer go faster by way of the client, by one question
and one message that is queued: a grant, a connection and its proofs take some milliseconds."""


class RemoteCall:
    """Runs a plan that the server keeps, until this object is gone.

    Attributes:
        number: of the plan.
        remark, library_bytes: the remarks and library memory (bytes) of its calls there.
    """

    __slots__ = ("_dropped", "_frame", "_link", "library_bytes", "number", "remark")

    def __init__(self, link: Link, dropped: deque[int], number: int, remark: str, library_bytes: int) -> None:
        self.number: Final = number
        self.remark: Final = remark
        self.library_bytes: Final = library_bytes
        self._frame: Final = encode(Kind.RUN, number)
        self._link: Final = link
        self._dropped: Final = dropped

    def __call__(self) -> None:
        self._link.post(self._frame)

    def __del__(self) -> None:
        # The next message tells the server, because finalisers may run within any call.
        if hasattr(self, "_dropped"):  # an interrupt may end `__init__` before
            self._dropped.append(self.number)


class RemoteLaunch:
    """Runs a plan with what it is fed and gives, by one message there and one back.

    Attributes:
        plan: what runs.
        sent, received: the memory of what is fed, and of what comes back.
    """

    __slots__ = ("_message", "_number", "_stream", "_ticket", "plan", "received", "sent")

    def __init__(self, stream: RemoteStream, plan: Plan, number: int, writes: Sequence[Range], reads: Sequence[Range]):
        self.plan: Final = plan
        self._stream: Final = stream
        self._number: Final = number
        self._ticket: Final = stream.ticket()
        sizes = [size for _, _, size in writes]
        head = encode(Kind.LAUNCH, self._ticket, number, size=sum(sizes))
        self._message: Final = memoryview(bytearray(head) + bytearray(sum(sizes)))
        self.sent: Final = _cut(self._message[len(head) :], sizes)
        sizes = [size for _, _, size in reads]
        self.received: Final = memoryview(bytearray(sum(sizes)))

    def __call__(self) -> None:
        self._stream.launch_again(self._ticket, self._message, self.received)

    def __del__(self) -> None:
        if hasattr(self, "_number"):  # an interrupt may end `__init__` before
            self._stream.drop(self._number)


def _cut(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Parts of these sizes, one behind the other."""
    return [memory[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]


class RemoteStream(Stream):
    """A queue of work on a device of a server. The server's stream does the work.

    Args:
        device: the device here.
        params: parameters of the device there.

    Raises:
        TypeError: the device there takes no such parameters.
        DeviceLostError: the server is lost.
        Unavailable: this client has as many connections as it may.
    """

    reads_ahead = True  # one round trip for a run

    def __init__(self, device: RemoteDevice, **params: Any) -> None:
        super().__init__(device)
        connection = device.connection
        self.number: Final = connection.number()
        self._plans: Final = connection.plans
        self._connection: Final = connection
        self._dropped: Final[deque[int]] = deque()
        self._known = 0  # the latest failure that a caller has received
        self._control: Final = connection.control
        self._link: Final = connection.open_link("stream", device.name)
        try:
            opened = self._link.call(Kind.OPEN, self.number, device.remote_name, params)
            self._fuses, self._lists = fields(opened, "??", "an opened stream")
        except BaseException:
            self.closed = True  # there is nothing that the finaliser could close
            self._link.close()
            raise

    # --- preparing work -----------------------------------------------------------------------------------------------

    @property
    def lists_operands(self) -> bool:
        """Whether the server's stream uses the operands of groups."""
        return bool(self._lists)

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        if not self._fuses or not steps:
            return super()._fuse(steps)
        found = self._link.call(Kind.FUSE, [encode_step(step) for step in steps])
        if type(found) is not list:
            raise FormatError(f"{self.device.name} groups steps as {found!r:.60}")
        rows = [fields(row, "Uu", "a group of steps") for row in found]
        if any(i >= len(steps) for indices, _ in rows for i in indices):
            raise FormatError(f"{self.device.name} groups steps that it was not given")
        return [Group(tuple([steps[i] for i in indices]), workspace) for indices, workspace in rows]

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        if not groups:
            return []
        number = self._connection.number()
        self._drop_plans()
        made = self._link.call(Kind.COMPILE, number, [encode_group(group) for group in groups])
        remark, library_bytes = fields(made, "su", "a compiled plan")
        return [RemoteCall(self._link, self._dropped, number, remark, library_bytes)]

    def _compiled(self, plan: Plan) -> None:
        for call in plan.calls:
            if isinstance(call, RemoteCall):
                self._plans[call.number] = plan

    def _bind_launch(self, writes: Sequence[Range], plan: Plan, reads: Sequence[Range]) -> Launch | None:
        calls = [call for call in plan.calls if isinstance(call, RemoteCall)]
        number = self._connection.number()
        rows = [[[b.handle.number, offset, size] for b, offset, size in ranges] for ranges in (writes, reads)]
        self._link.call(Kind.BIND, number, rows[0], [call.number for call in calls], rows[1])
        launch = RemoteLaunch(self, plan, number, writes, reads)
        return launch, launch.sent, _cut(launch.received, [size for _, _, size in reads])

    def ticket(self) -> int:
        """A ticket for a message that is sent again and again."""
        return self._link.ticket()

    def launch_again(self, ticket: int, message: memoryview, into: memoryview) -> None:
        """Send the message of a `RemoteLaunch`, and wait for its answer, which is received into ``into``."""
        if self._dropped:
            self._drop_plans()
        reply = self._link.ask_again(ticket, message, into)
        self._link.wait_for(reply)
        if reply.failure is not None:
            self._raise(reply.failure)

    def drop(self, number: int) -> None:
        """Have the server forget a plan or a launch, with the next message; from any thread."""
        self._dropped.append(number)

    def _drop_plans(self) -> None:
        numbers = []
        while self._dropped:
            numbers.append(self._dropped.popleft())
        if numbers:
            self._link.post(encode(Kind.DROP, numbers))

    # --- order --------------------------------------------------------------------------------------------------------

    def _record(self) -> Reply:
        if self._dropped:
            self._drop_plans()
        reply = self._link.ask(Kind.RECORD, event=self.number)
        self._link.flush()
        return reply

    def _wait(self, handle: Any) -> bool:
        if not isinstance(handle, Reply) or handle.link.fate is not self._link.fate:
            return False  # an event of another server
        self._link.post(encode_again(Kind.WAIT, handle.stream, handle.number))
        return True

    def _join(self, handle: Reply) -> None:
        handle.wait()
        self._raise(handle.failure)

    def _query(self, handle: Reply) -> bool:
        if not handle.link.query(handle):
            return False
        self._raise(handle.failure)
        return True

    def _synchronize(self) -> None:
        if CARRYING.active:
            return  # a finaliser: nobody needs what is under way, and this thread may be the one that it waits for
        known = self._known
        reply = self._link.ask(Kind.SYNC)
        self._link.flush()
        reply.wait()
        if reply.failure is not None and (not reply.failure.number or reply.failure.number != known):
            self._raise(reply.failure)

    def _raise(self, failure: Failure | None) -> None:
        """Raise what failed on the server: of a run, with its plan and its step."""
        if failure is None:
            return
        self._known = failure.number
        plan = self._plans.get(failure.plan) if failure.plan >= 0 else None
        if plan is not None:
            raise StepError(failure.step if failure.step >= 0 else None, failure.error, plan) from failure.error
        raise failure.error

    def _abort(self) -> None:
        with suppress(DeviceLostError):  # then all has ended
            self._control.post(encode(Kind.ABORT, self.number))
            self._control.flush()

    def _close(self) -> None:
        self._link.close()

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _upload(self, buffer: Buffer, offset: int, data: memoryview) -> None:
        number, most = buffer.handle.number, buffer.handle.connection.info.max_data
        packer = self._connection.packing.chosen(data)
        if packer is not None:
            most = min(most, PART)
        for at in range(0, len(data), most):
            part, how = as_sent(packer, data[at : at + most])
            if how:
                self._link.post(encode(Kind.UPLOAD_PACKED, number, offset + at, *how, size=len(part)), part)
            else:
                self._link.post(encode_again(Kind.UPLOAD, number, offset + at, size=len(part)), part)

    def _download(self, buffer: Buffer, offset: int, out: memoryview) -> None:
        number, most = buffer.handle.number, buffer.handle.connection.info.max_data
        for at in range(0, len(out), most):
            piece = out[at : at + most]
            self._link.ask(Kind.DOWNLOAD, number, offset + at, len(piece), into=piece)

    def _copy_from(self, dst: Buffer, dst_offset: int, src: Buffer, src_offset: int, size: int) -> bool:
        source, target = src.handle, dst.handle
        if not isinstance(source, RemoteMemory):
            return False
        if source.connection is not target.connection:
            if size > self._connection.info.max_data:
                return False
            if size < _FEWEST_PULLED or not target.connection.copies_from(source.connection):
                # The source is written by now: events of another server were waited for.
                data = memoryview(bytearray(size))
                cast("RemoteDevice", src.device).fetch(source, src_offset, data)
                self._upload(dst, dst_offset, data)
                return True
            grant = source.connection.control.call(Kind.GRANT, source.number, src_offset, size)
            where = str(source.connection.address)
            self._link.post(encode(Kind.PULL, target.number, dst_offset, where, grant, size))
            return True
        self._link.post(encode_again(Kind.MOVE, target.number, dst_offset, source.number, src_offset, size))
        return True
