"""`isolated`: a device in a process of its own, so that a crash of its driver ends that process and not this one."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Final

from opweave.concurrency import start_thread
from opweave.lifecycle import close_at_exit, notify_after_fork
from opweave_remote.connection import Connection
from opweave_remote.door import Door, how_it_ended, life_of, start_worker
from opweave_remote.failures import decode_error
from opweave_remote.heartbeat import Life
from opweave_remote.link import Fate
from opweave_remote.wires import tuned

if TYPE_CHECKING:
    from opweave_remote.device import RemoteDevice

__all__ = ["isolated"]

_NUMBERS: Final = count()
_LEAVING: Final = 5.0
"""Seconds that a process gets to end in order."""


def isolated(name: str, *, deadline: float = 10.0) -> RemoteDevice:
    """A device of this machine in a new process, by the protocol of remote devices over a pair of sockets.

    The process lives as long as the device, or until ``device.connection.close()``. It appears here as
    ``remote:isolated:0/<name there>``, a further one with the next number.

    Args:
        name: of a device, as for `opweave.device`.
        deadline: seconds after which a process that is stopped counts as lost.

    Raises:
        PluginError, UnknownNameError: the process cannot be started, or has no such device; as `opweave.device`.
    """
    process, door = start_worker({"devices": [name]})
    child = _Child(process, door)
    try:
        what, value, _ = door.receive()
        if what == "failed":
            raise decode_error(value).error
        connection = Connection(f"isolated:{next(_NUMBERS)}", _PairDial(door), None, deadline)
    except BaseException as error:
        process.kill()
        child.close()
        if isinstance(error, (EOFError, OSError)):
            from opweave.errors import Unavailable

            raise Unavailable(f"the process for {name} ended before it was ready: {how_it_ended(process)}",
                              remedy="its output is on standard error") from error  # fmt: skip
        raise
    fate = connection.fate
    fate.at_end(door.close, door.leave)
    fate.explain = lambda: how_it_ended(process)
    start_thread(_watch, child, fate, deadline, name=f"opweave process of {connection.name}")
    return connection.devices[0]


class _PairDial:
    """Connections to a process by pairs of sockets."""

    def __init__(self, door: Door) -> None:
        self._door: Final = door

    def __call__(self, preamble: bytes) -> socket.socket:
        ours, theirs = map(tuned, socket.socketpair())
        try:
            with theirs:
                self._door.send("connect", None, theirs)
            ours.sendall(preamble)
        except BaseException:
            ours.close()
            raise
        return ours


class _Child:
    """The process of a device. It ends with the one that has started it at the latest, also if it is stopped."""

    def __init__(self, process: subprocess.Popen[bytes], door: Door) -> None:
        self.process: Final = process
        self._door: Final = door
        self._inherited = False
        close_at_exit(self)
        notify_after_fork(self)

    def close(self) -> None:
        """End it: in order if it does that within `_LEAVING` seconds. May be called again, and by several threads."""
        if self._inherited:
            return
        self._door.close()
        if life_of(self.process) is Life.RUNNING:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_LEAVING)
        self.process.kill()
        self.process.wait()

    def after_fork(self) -> None:
        self._inherited = True

    def describe_pending(self) -> str:
        return f"process {self.process.pid}"


def _watch(child: _Child, fate: Fate, deadline: float) -> None:
    """Notice that the process is stopped or gone; end it when it is not needed any more."""
    stopped_since: float | None = None
    while not fate.ended.wait(deadline / 4):
        life = life_of(child.process)
        if life is Life.GONE:
            fate.lose("its process is gone")
        elif life is Life.STOPPED:
            stopped_since = stopped_since or monotonic()
            if monotonic() - stopped_since > deadline / 2:
                fate.lose(f"its process has been stopped for {deadline:g} s")
        else:
            stopped_since = None
    child.close()
