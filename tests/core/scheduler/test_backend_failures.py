"""Failures in a backend's own code while a program is built name the node and the device."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import pytest

import opweave as ow
from opweave.contract import Stream
from opweave.contract.kernels import KernelTable
from opweave.host.device import HostDevice
from opweave.scheduler.target import unbound_step
from tests.support.devices import Separate


def failing(*args, **kwargs):
    raise ZeroDivisionError("no units")


def broke(**members):
    """A device whose code fails: of its kernel for exp, its stream or itself."""
    of_stream: dict[str, object] = {
        name: members.pop(name) for name in ("_bind", "_compile", "_fuse") if name in members
    }
    kernels = KernelTable()
    factory = members.pop("factory", lambda stream, op, out, a: lambda: None)
    kernels("exp", workspace=members.pop("workspace", None))(factory)
    device = type("Broke", (Separate,), {**members, "stream_class": type("Failing", (Stream,), of_stream)})("broke")
    device.kernels = kernels
    return device


@pytest.fixture
def y() -> ow.Tensor:
    return ow.exp(ow.input("of a backend that fails", (4, 4)))


@pytest.mark.parametrize("way", ["factory", "_bind", "_compile", "_fuse", "_inplace"])
def test_a_backend_that_fails_while_a_program_is_built_is_named(y, way: str):
    says = r"broke failed while .*: ZeroDivisionError: no units"
    with ow.Scheduler(broke(**{way: failing})) as scheduler, pytest.raises(ow.ExecutionError, match=says) as caught:
        scheduler.build(y)
    assert caught.value.device == "broke"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert ("exp" in caught.value.node) == (way in ("factory", "_bind", "_inplace"))
    if way == "factory":
        assert "test_backend_failures.py" in str(caught.value), "the place where the node was built"


@pytest.mark.parametrize("way", ["_wants", "_offload"])
def test_an_opinion_that_fails_is_named(y, way: str):
    device = broke(**{way: failing})
    ask = device.wants if way == "_wants" else device.offloads
    with pytest.raises(ow.ExecutionError, match=r"broke failed while saying .* for exp: ZeroDivisionError: no units"):
        ask(unbound_step(y.signature, device))


def test_a_failing_workspace_leaves_the_step_to_another_device(y):
    device = broke(workspace=failing)
    with ow.Scheduler(device) as alone, pytest.raises(ow.UnsupportedOpError, match=r"broke: .*ZeroDivisionError"):
        alone.build(y)
    with ow.Scheduler([device, HostDevice()]) as both:
        assert both.build(y).device_of(y).kind is ow.Kind.HOST
