"""The sink of trace events: without listeners it costs nothing, and every listener gets every event."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import pytest

from opweave.errors import Cancelled
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.operands import copy_bytes
from opweave.tracing import TRACE, Sink, TraceEvent


def test_listeners_hear_what_happens_while_they_listen():
    sink, first, second = Sink(), [], []
    sink.emit("run", "before", 0, 0)
    with sink.listen(first.append):
        assert sink.listening
        sink.emit("run", "a", 1, 5, bytes=3)
        with sink.listen(second.append):
            sink.emit("copy", "b", 6, 7)
        sink.emit("run", "c", 8, 9)
    assert not sink.listening
    sink.emit("run", "after", 0, 0)
    assert first == [
        TraceEvent("run", "a", 1, 5, {"bytes": 3}),
        TraceEvent("copy", "b", 6, 7, {}),
        TraceEvent("run", "c", 8, 9, {}),
    ]
    assert [h.name for h in second] == ["b"]


def test_listening_may_end_in_any_order():
    sink, heard = Sink(), []
    first, second = sink.listen(heard.append), sink.listen(heard.append)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sink.listening
    sink.emit("run", "x", 0, 0)
    second.__exit__(None, None, None)
    assert not sink.listening
    assert len(heard) == 1


def test_listening_ends_with_an_error():
    sink = Sink()
    with pytest.raises(ZeroDivisionError), sink.listen(print):
        raise ZeroDivisionError
    assert not sink.listening


def test_a_listener_can_end_what_it_hears_of():
    """A listener is called after the action, which is complete even if the listener raises."""
    device = HostDevice()
    a, b = device.alloc(8), HostDevice().alloc(8)
    a.clear(1)

    def cancel(event):
        raise Cancelled("enough")

    with TRACE.listen(cancel):
        with pytest.raises(Cancelled):
            copy_bytes(b, 0, a, 0, 8)
        with pytest.raises(Cancelled):
            a.free()
    assert (b.read() == 1).all()
    assert a.freed


def test_times_are_in_order():
    seen = []
    with TRACE.listen(seen.append):
        a, b = HostDevice().alloc(1000), HostDevice().alloc(1000)
        copy_bytes(a, 0, b, 0, 1000)
    assert [h.kind for h in seen] == ["alloc", "alloc", "copy"]
    assert all(h.start <= h.end for h in seen)
    assert seen[-1].data == {"bytes": 1000}
