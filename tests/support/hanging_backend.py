"""A backend whose streams hang when they are aborted, with a thread that would keep the process from ending."""

from __future__ import annotations

import threading

from opweave.contract import Backend, Device, Kind, Stream
from opweave.runtime.host.memory import HostMemory
from tests.support.devices import table


class Hanging(Stream):
    def _abort(self) -> None:
        threading.Thread(target=threading.Event().wait).start()
        threading.Event().wait()


class HangingDevice(HostMemory):
    kind = Kind.ACCEL
    stream_class = Hanging
    kernels = table()


class HangingBackend(Backend):
    def devices(self) -> list[Device]:
        return [HangingDevice()]
