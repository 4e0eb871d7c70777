"""Failures in a backend's own code while a program is built name the node and the device."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import pytest

import opweave as ow
from opweave.contract import Stream
from opweave.contract.kernels import KernelTable
from opweave.runtime.host.device import HostDevice
from opweave.scheduler.place.support import unbound_step
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
    assert ("exp" in caught.value.node) == (way != "_fuse")
    if way in ("factory", "_bind", "_compile"):
        assert "test_backend_failures.py" in str(caught.value), "the place where the node was built"


def compile_as_base(stream, groups):
    return Stream._compile(stream, groups)


@pytest.mark.parametrize("override", [{}, {"_compile": compile_as_base}], ids=["kernel by kernel", "own _compile"])
@pytest.mark.parametrize("error", [SystemExit("no more"), GeneratorExit("no more")], ids=repr)
def test_a_kernel_that_ends_the_process_while_it_is_prepared_is_named(y, override, error: BaseException):
    def factory(stream, op, out, a):
        raise error

    says = rf"broke failed while preparing a kernel for exp.*test_backend_failures\.py.*{type(error).__name__}: no more"
    with ow.Scheduler(broke(factory=factory, **override)) as scheduler:
        with pytest.raises(ow.ExecutionError, match=says) as caught:
            scheduler.build(y)
        assert caught.value.__cause__ is error


@pytest.mark.parametrize("override", [{}, {"_compile": compile_as_base}], ids=["kernel by kernel", "own _compile"])
def test_an_interrupt_while_a_kernel_is_prepared_stays_one(y, override):
    def factory(stream, op, out, a):
        raise KeyboardInterrupt

    with ow.Scheduler(broke(factory=factory, **override)) as scheduler, pytest.raises(KeyboardInterrupt):
        scheduler.build(y)


@pytest.mark.parametrize("override", [{}, {"_compile": compile_as_base}], ids=["kernel by kernel", "own _compile"])
def test_a_typed_error_of_a_kernel_says_in_a_note_which_node_was_prepared(y, override):
    def factory(stream, op, out, a):
        raise ow.ExecutionError("no registers")

    device = broke(factory=factory, **override)
    with ow.Scheduler(device) as scheduler, pytest.raises(ow.ExecutionError, match="no registers") as caught:
        scheduler.build(y)
    (note,) = caught.value.__notes__
    assert note.startswith("broke was preparing a kernel for exp")
    assert caught.value.node in note
    assert "test_backend_failures.py" in caught.value.node
    assert caught.value.device == "broke"


def test_of_several_nodes_the_failing_one_is_named_by_a_stream_with_its_own_compile():
    def bind(stream, group):
        if group.steps[0].label == "second":
            raise ZeroDivisionError("no units")
        return Stream._bind(stream, group)

    x = ow.input("x", (4, 4))
    first = ow.exp(x).named("first")
    second = ow.exp(first).named("second")
    with (
        ow.Scheduler(broke(_bind=bind)) as scheduler,
        pytest.raises(ow.ExecutionError, match="ZeroDivisionError") as caught,
    ):
        scheduler.build(ow.exp(second))
    assert caught.value.node == second.describe()


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
