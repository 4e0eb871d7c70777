"""A device is lost: the others can be used, with the leaves whose values are on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Separate

F = np.float32


class Fragile(Separate):
    """A device that can be lost: from then on nothing works on it any more."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lost = False
        self.kernels("exp", dtypes="f32")(self._exp)

    def _exp(self, stream: Any, op: str, out: Any, x: Any) -> Any:
        def run() -> None:
            self._check()
            np.exp(x.view, out.view)

        return run

    def _check(self) -> None:
        if self.lost:
            raise ow.DeviceLostError(f"{self.name}: it fell off the bus")

    def _download(self, mem: Any, offset: int, out: memoryview) -> None:
        self._check()
        super()._download(mem, offset, out)

    def _upload(self, mem: Any, offset: int, data: memoryview) -> None:
        self._check()
        super()._upload(mem, offset, data)


@pytest.fixture
def model() -> tuple[Fragile, ow.Weights, ow.Tensor, list[ow.Tensor]]:
    device = Fragile("gpu")
    weights = ow.weights({"w": np.full(4, 2, F), "free": np.full(4, 3, F)}, device={"w": device})
    total = ow.state("total", (4,), device=device)
    y = ow.exp(ow.input("x", (4,))) * weights["w"] + weights["free"]
    return device, weights, total, [y, ow.assign(total, total + y)]


@pytest.mark.parametrize("parallel", [False, True])
def test_the_rest_goes_on_and_weights_come_from_the_host(model, parallel):
    device, weights, total, outputs = model
    x = np.zeros(4, F)
    scheduler = ow.Scheduler([device, HostDevice()], parallel=parallel)
    program = scheduler.build(outputs)
    assert program.run(x=x)[1][0] == 5
    device.lost = True
    with pytest.raises(ow.ExecutionError, match="fell off the bus") as caught:
        program.run(x=x)
    assert caught.value.device == "gpu"
    scheduler = scheduler.without(caught.value.device)
    assert [d.name for d in scheduler.devices] == ["hostdevice"]
    assert scheduler.parallel == parallel
    program = scheduler.build(outputs)
    with pytest.raises(ow.ExecutionError, match="total"):
        program.run(x=x)  # the state was on the device, and its value is lost
    ow.write(total, np.full(4, 10, F))
    y, kept = program.run(x=x)
    assert y[0] == 5
    assert kept[0] == 15
    np.testing.assert_array_equal(ow.read(weights["w"]), np.full(4, 2, F))
    scheduler.close()


def test_states_move_while_the_device_can_be_read(model):
    device, _, total, outputs = model
    scheduler = ow.Scheduler([device, HostDevice()])
    scheduler.build(outputs).run(x=np.zeros(4, F))
    with scheduler.without(device) as rest:
        assert ow.read(total)[0] == 5
        assert rest.build(outputs).run(x=np.zeros(4, F))[1][0] == 10
        assert ow.read(total)[0] == 10


def test_weights_that_were_only_there_are_said_to_be_lost():
    device = Fragile("gpu")
    buffer = device.alloc(64)
    buffer.upload(0, np.arange(16, dtype=F))
    w = ow.weights({"w": ow.Spec((16,), ow.as_dtype("f32"))})["w"]
    ow.place(w, buffer)
    scheduler = ow.Scheduler([device, HostDevice()])
    program = scheduler.build(w + 1)
    assert program.run()[3] == 4
    device.lost = True
    with pytest.raises(ow.SchedulerError, match=r"'w'.*gpu.*no longer be read"):
        scheduler.without("gpu")
    device.lost = False
    with scheduler.without("gpu") as rest:
        assert rest.build(w + 1).run()[3] == 4


def test_a_scheduler_is_not_left_without_any_device(model):
    device, _, _, outputs = model
    scheduler = ow.Scheduler([device])
    with pytest.raises(ow.SchedulerError, match="only device"):
        scheduler.without(device)
    with pytest.raises(ow.SchedulerError, match="not a device"):
        scheduler.without("cpu")
    assert scheduler.build(outputs).run(x=np.zeros(4, F))[0][0] == 5


def test_streams_of_the_caller_are_kept(model):
    device, _, _, outputs = model
    with HostDevice().open() as stream:
        scheduler = ow.Scheduler([device, stream])
        scheduler.build(outputs).run(x=np.zeros(4, F))
        with scheduler.without(device) as rest:
            assert rest.streams == (stream,)
        assert not stream.closed


def test_programs_of_other_schedulers_end_with_the_place_of_their_state():
    lost, kept = Separate("lost"), Separate("kept")
    state, x = ow.state("s", (4,), device=lost), ow.input("x", (4,))
    added = ow.assign(state, state + x)
    one, other = ow.Scheduler([lost, kept]), ow.Scheduler([lost, kept])
    first, second = one.build(added), other.build(added)
    for program in (first, second, second):
        program.run(x=np.ones(4, np.float32))
    rest = one.without(lost)
    rest.build(added).run(x=np.ones(4, np.float32))
    with pytest.raises(ow.LifetimeError, match="given up"):
        second.run(x=np.ones(4, np.float32))
    np.testing.assert_array_equal(ow.read(state), np.full(4, 4, np.float32))
