"""Devices and backends: overridden hooks define capabilities; wrong values are typed errors; optional procedures."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import gc
from typing import Protocol, runtime_checkable

import pytest

from opweave.contract import (
    HOST_SPACE,
    Arg,
    Backend,
    BufferType,
    Caps,
    Device,
    Features,
    Kind,
    MemorySpace,
    SetThreads,
    Step,
    Stream,
)
from opweave.contract.kernels import KernelTable
from opweave.errors import Broken, ExecutionError
from opweave.graph.dtypes import f32
from opweave.runtime.host.device import HostBackend, HostDevice
from tests.support.async_device import AsyncDevice, FusingThreadStream, ThreadStream
from tests.support.example_backend import ExampleDevice


def step(op="add", shape=(4,), sources=2):
    args = [Arg(None, 0, f32, shape, (4,) * len(shape), None, i) for i in range(sources + 1)]
    return Step(op, args[0], tuple(args[1:]), {})


# --- capabilities -----------------------------------------------------------------------------------------------------


def test_what_is_overridden_is_what_it_can():
    assert ExampleDevice().caps == Caps(*[False] * 11)
    assert HostDevice().caps == Caps(*[False] * 11)._replace(fill=True, copy=True, import_host=True, map=True)
    assert AsyncDevice().caps == Caps(*[False] * 11)._replace(copy=True, asynchronous=True, events=True)

    class More(AsyncDevice):
        stream_class = FusingThreadStream

        def _offload(self, step):
            return step.op == "linear"

        def _wants(self, step):
            return step.out.size > 2

        @property
        def host_buffer_type(self):
            return BufferType(self, "pinned", space=HOST_SPACE)

    device = More()
    assert device.caps == AsyncDevice().caps._replace(fuse=True, offload=True, pinned=True)
    assert device.offloads(step("linear"))
    assert not device.offloads(step("add"))
    assert device.wants(step())
    assert not ExampleDevice().offloads(step("linear"))
    assert not ExampleDevice().wants(step())


def test_taking_an_ability_away_takes_the_capability():
    class Apart(HostDevice):
        _import_host = Device._import_host
        _map = Device._map

    assert not Apart().caps.import_host
    assert not Apart().caps.map


def test_properties_in_one_tuple():
    props = HostDevice().props()
    assert (props.name, props.kind, props.hardware_id) == ("hostdevice", Kind.HOST, None)
    assert 0 < props.memory_free <= props.memory_total
    assert props.caps is HostDevice().caps
    assert ExampleDevice().props().memory_total == 0


def test_authors_need_not_call_super():
    class Own(Device):
        def __init__(self, number):
            self.id = str(number)
            self.alignment = 256

    device = Own(3)
    assert device.backend is None
    assert device.default_buffer_type.alignment == 256
    assert device.default_buffer_type is device.default_buffer_type
    assert device.buffer_types == (device.default_buffer_type,)


def test_each_device_has_a_space_of_its_own_unless_it_says_otherwise():
    a, b, host = ExampleDevice(), ExampleDevice(), HostDevice()
    assert a.space is not b.space
    assert host.space is HostDevice().space is HOST_SPACE
    assert not a.reaches(b.space)
    assert not a.reaches(HOST_SPACE)
    pool = MemorySpace("pool")
    a.shared_spaces = (pool,)
    assert a.reaches(pool)
    assert a.reaches(a.space)


def test_a_device_that_implements_no_memory_says_so():
    with pytest.raises(NotImplementedError, match="Device implements no _alloc"):
        Device().alloc(8)


# --- asking -----------------------------------------------------------------------------------------------------------


def test_reasons():
    device = ExampleDevice()
    assert device.why_not(step()) is None
    assert device.supports(step())
    assert device.why_not(step("tanh")) == "no kernel for tanh"
    assert not device.supports(step("tanh"))
    assert device.why_not(step("add", (0,))) == "a source has no elements; only the host runs such nodes"
    assert HostDevice().why_not(step("add", (0,))) is None
    assert Device().why_not(step()) == "it has no kernels"
    assert HostDevice().why_not(step("nonsense")) == "no definition of nonsense"


def test_a_check_that_fails_is_a_reason():
    class Faulty(ExampleDevice):
        def _why_not(self, step):
            return 1 / 0

    device = Faulty()
    assert device.why_not(step()) == "its check failed: ZeroDivisionError: division by zero"
    assert not device.supports(step())


@pytest.mark.parametrize("answer", [True, False, 0, b""])
def test_a_check_that_answers_nonsense_is_a_refusal(answer):
    class Faulty(ExampleDevice):
        def _why_not(self, step):
            return answer

    assert f"gave {answer!r}" in str(Faulty().why_not(step()))

    class FaultyTable(ExampleDevice):
        kernels = KernelTable()

    FaultyTable.kernels("add", when=lambda step: answer)(lambda *args: None)
    assert "must return a reason for refusing add, or None" in str(FaultyTable().why_not(step()))


# --- streams ----------------------------------------------------------------------------------------------------------


def test_streams_are_known_to_their_device():
    device = AsyncDevice()
    stream = device.open()
    assert isinstance(stream, ThreadStream)
    assert stream in device.live_streams
    stream.close()
    assert stream not in device.live_streams
    device.open()
    gc.collect()
    assert not list(device.live_streams)


def test_parameters_of_a_stream():
    with AsyncDevice().open(delay=0.5) as stream:
        assert isinstance(stream, ThreadStream)
        assert stream.delay == 0.5
    for device in (AsyncDevice(), ExampleDevice(), HostDevice()):
        with pytest.raises(TypeError, match=f"{device.name} does not take speed"):
            device.open(speed=3)


def test_an_open_that_returns_nonsense():
    class Nonsense(ExampleDevice):
        def _open(self, **params):
            return "a stream"

    with pytest.raises(Broken, match="must return a Stream"):
        Nonsense().open()

    class Hidden(ExampleDevice):
        def _open(self, **params):
            return ThreadStream(AsyncDevice())

    with pytest.raises(Broken, match=r"(?s)capabilities differ.*set stream_class = ThreadStream"):
        Hidden().open()


def test_a_stream_ends_with_its_block():
    with ExampleDevice().open() as stream:
        assert not stream.closed
    assert stream.closed
    assert "closed" in repr(stream)


def test_failures_in_one_stream_do_not_concern_another():
    class Lost(ThreadStream):
        def _synchronize(self):
            raise OSError("lost")

    class LostDevice(AsyncDevice):
        stream_class = Lost

    bad, good = LostDevice(), AsyncDevice()
    lost = bad.open()
    with pytest.raises(ExecutionError, match="lost"):
        lost.synchronize()
    with good.open() as stream:
        stream.synchronize()
        good.alloc(8).free()
    with pytest.raises(ExecutionError):
        bad.synchronize()
    lost.close()
    bad.synchronize()


# --- optional procedures ----------------------------------------------------------------------------------------------


@runtime_checkable
class Tune(Protocol):
    def tune(self, seconds: float) -> str: ...


class Tuner:
    def tune(self, seconds: float) -> str:
        return f"tuned for {seconds} s"


class Extended(HostBackend):
    threads = 0

    def set_threads(self, n: int) -> None:
        self.threads = n

    def features(self):
        return {"driver": "1.0"}

    def extensions(self):
        return (Tuner(),)


@runtime_checkable
class Absent(Protocol):
    def absent(self) -> int: ...


def test_optional_procedures_are_found_by_protocol_and_by_name():
    backend = Extended()
    backend.extension(SetThreads).set_threads(3)
    assert backend.threads == 3
    backend.extension("set_threads")(4)
    assert backend.threads == 4
    assert backend.extension(Features).features() == {"driver": "1.0"}
    assert backend.extension(Tune).tune(1) == backend.extension("tune")(1) == "tuned for 1 s"
    for missing in (
        Absent,
        "absent",
        "nonsense",
        "_private",
        "name",
    ):
        assert backend.extension(missing) is None
    assert HostBackend().extension(SetThreads) is None


def test_a_backend_says_which_devices_are_here():
    (device,) = HostBackend().devices()
    assert isinstance(device, HostDevice)
    with pytest.raises(NotImplementedError):
        Backend().devices()
    assert repr(Extended()) == "<Backend host>"
    assert Stream(device).device is device
