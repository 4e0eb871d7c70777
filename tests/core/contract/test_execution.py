"""Streams, plans, events: order, failure, life times, threads. Asynchronous ones run on a thread of their own."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Event, Group, Plan, Step, StepError, Stream, pointwise_groups
from opweave.contract.kernels import KernelTable
from opweave.errors import (
    BoundsError,
    Broken,
    ExecutionError,
    HazardError,
    LayoutError,
    LifetimeError,
    UnsupportedOpError,
)
from opweave.graph.dtypes import f32, u8
from opweave.graph.layout import dense_strides
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.operands import read, write
from tests.support.async_device import AsyncDevice, Boom, FusingThreadStream, OtherAsyncDevice, ThreadStream, vector
from tests.support.example_backend import ExampleDevice

ONES = np.ones(16, np.float32)


class Failing(HostDevice):
    """A synchronous device, some kernels of which fail."""

    kernels = KernelTable("f32", "strided")

    def _why_not(self, step):
        return self.kernels.why_not(step)

    def _inplace(self, step):
        return False

    def _workspace(self, step):
        return self.kernels.workspace(step)

    def _open(self, **params):
        return Stream(self)


@Failing.kernels("add")
def _add(stream, op, out, a, b):
    return lambda: np.add(a.view, b.view, out.view)


@Failing.kernels("exp")
def _fail(stream, op, out, x):
    def fail():
        raise Boom("planted")

    return fail


@Failing.kernels("mul", workspace=lambda step: step.out.nbytes)
def _mul(stream, op, out, a, b, workspace):
    assert workspace.size == out.nbytes
    scratch = workspace.view.view(np.float32)

    def call():
        scratch[:] = a.view
        np.multiply(scratch, b.view, out.view)

    return call


@pytest.fixture
def device():
    return AsyncDevice()


@pytest.fixture
def stream(device):
    with device.open(delay=0.002) as stream:
        yield stream
        stream.recover()


def three(device):
    """Two operands of ones and a result of zeros."""
    a, b, out = (vector(device.alloc(64)) for _ in range(3))
    write(a, ONES)
    write(b, ONES)
    out.buffer.clear()
    return a, b, out


def unbound(value, shape=(16,), strides=None, offset=0):
    return Arg(None, offset, f32, shape, strides or dense_strides(shape, f32), None, value)


# --- args and steps ---------------------------------------------------------------------------------------------------


def test_an_arg_says_where_and_what_it_is():
    buffer = HostDevice().alloc(256)
    arg = Arg(buffer, 64, f32, (4, 3), (16, 4))
    assert (arg.size, arg.nbytes, arg.span, arg.is_dense) == (12, 48, 60, False)
    assert arg.address == buffer.address + 64
    assert arg.mem is buffer.handle
    assert arg.view.shape == (4, 3)
    assert arg.view is arg.view
    assert arg == Arg(buffer, 64, f32, (4, 3), (16, 4))
    assert hash(arg) == hash(Arg(buffer, 64, f32, (4, 3), (16, 4)))
    assert arg != Arg(buffer, 64, f32, (4, 3), (12, 4))
    assert "f32[4, 3]" in repr(arg)


def test_what_an_arg_cannot_say():
    free = unbound(0)
    for attempt in (lambda: free.mem, lambda: free.view, lambda: free.address):
        with pytest.raises(LifetimeError, match="no memory yet"):
            attempt()
    opaque = vector(ExampleDevice().alloc(64))
    with pytest.raises(LifetimeError, match=r"opaque; use \.mem and \.offset"):
        opaque.address  # noqa: B018
    host = vector(HostDevice().alloc(64))
    host.buffer.free()
    for attempt in (lambda: host.address, lambda: host.view):
        with pytest.raises(LifetimeError):
            attempt()


def test_unbound_steps_are_pickled():
    step = Step("add", unbound(2), (unbound(0), unbound(1)), {"axis": (0, 1)}, live=False, label="sum")
    group = Group((step,), 128)
    assert pickle.loads(pickle.dumps(group)) == group
    with pytest.raises(LifetimeError, match="pickle steps before memory is planned"):
        pickle.dumps(vector(HostDevice().alloc(64)))


# --- running ----------------------------------------------------------------------------------------------------------


def test_steps_run_in_order(device, stream):
    a, b, out = three(device)
    plan = stream.compile(
        [Step("add", out, (a, b), {}), Step("mul", out, (out, out), {}), Step("neg", out, (out,), {})]
    )
    assert len(plan) == plan.size == 3
    for _ in range(3):
        plan.run()
    assert not read(out).any(), "work was done before anyone waited: the device is not asynchronous"
    stream.synchronize()
    assert (read(out) == -4).all()


def test_groups_with_a_workspace_get_one():
    device = Failing()
    with device.open() as stream:
        a, b, out = three(device)
        step = Step("mul", out, (a, b), {})
        stream.run([step])
        assert (read(out) == 1).all()
        (group,) = stream.fuse([step])
        assert group.workspace == 64
        for short in (None, Arg(device.alloc(64), 0, u8, (32,), (1,))):
            with pytest.raises(LifetimeError, match="64 bytes of workspace"):
                stream.compile([group._replace(scratch=short)])
        assert stream.compile([group._replace(scratch=Arg(device.alloc(64), 0, u8, (64,), (1,)))]).size == 1


def test_results_without_elements_never_reach_a_device():
    device = ExampleDevice()
    empty = Arg(device.alloc(0), 0, f32, (0, 4), (16, 4))
    with device.open() as stream:
        stream.run([Step("tanh", empty, (empty,), {})])
        a, _, out = three(device)
        with pytest.raises(UnsupportedOpError, match="no elements"):
            stream.run([Step("linear", out, (a, empty), {})])


@pytest.mark.parametrize("make", [HostDevice, ExampleDevice, AsyncDevice])
def test_operands_are_checked_before_anything_runs(make):
    device = make()
    a, b, out = three(device)
    other = three(ExampleDevice())[0]
    gone = vector(device.alloc(64))
    gone.buffer.free()
    with device.open() as stream:
        for bad, error, message in (
            (gone, LifetimeError, "was freed"),
            (other, LifetimeError, "cannot reach"),
            (unbound(3), LifetimeError, "has no memory"),
            (vector(a.buffer, 16, 4), BoundsError, "outside of"),
            (vector(a.buffer, 16, -4), BoundsError, "outside of"),
            (Arg(a.buffer, 0, f32, (16,), (8,)), BoundsError, "outside of"),
        ):
            for step in (Step("add", bad, (a, b), {}), Step("add", out, (a, bad), {}), Step("add", out, (bad, b), {})):
                for attempt in (stream.compile, stream.run):
                    with pytest.raises((error, UnsupportedOpError), match=message + "|is not dense"):
                        attempt([step])
        stream.synchronize()
        assert not read(out).any()
        assert stream.failure is None


def test_nothing_is_written_to_read_only_memory():
    device = HostDevice()
    constant = np.zeros(16, np.float32)
    constant.flags.writeable = False
    fixed = vector(device.import_host(constant))
    a, b, _ = three(device)
    with device.open() as stream:
        with pytest.raises(HazardError, match="read-only"):
            stream.compile([Step("add", fixed, (a, b), {})])
        with pytest.raises(HazardError, match="read-only"):
            stream.compile([Step("add", a, (fixed, b), {}), Step("add", fixed, (a, b), {})])
        with pytest.raises(HazardError):
            stream.upload(fixed.buffer, 0, b"x")
        stream.run([Step("add", a, (fixed, b), {})])


def test_an_unsupported_step_is_refused_with_the_reason():
    device = ExampleDevice()
    a, _, out = three(device)
    with device.open() as stream:
        for attempt in (stream.run, stream.compile):
            with pytest.raises(UnsupportedOpError) as caught:
                attempt([Step("tanh", out, (a,), {})])
            assert caught.value.reasons == {"exampledevice": "no kernel for tanh"}


# --- life times -------------------------------------------------------------------------------------------------------


def test_a_closed_plan_does_not_run(device, stream):
    a, b, out = three(device)
    plan = stream.compile([Step("add", out, (a, b), {})])
    plan.run()
    plan.close()
    assert (read(out) == 2).all(), "closing waits for what was submitted"
    plan.close()
    with pytest.raises(LifetimeError, match="closed"):
        plan.run()


def test_a_closed_stream_takes_no_work(device):
    a, b, out = three(device)
    stream = device.open()
    plan = stream.compile([Step("add", out, (a, b), {})])
    mark = stream.record()
    plan.run()
    stream.close()
    assert (read(out) == 2).all()
    stream.close()
    assert stream.closed
    for attempt in (
        plan.run,
        stream.record,
        lambda: stream.compile([]),
        lambda: stream.wait(mark),
        lambda: stream.upload(a.buffer, 0, ONES),
        lambda: stream.download(a.buffer, 0, ONES.copy()),
        lambda: stream.copy_from(a.buffer, 0, b.buffer, 0, 64),
    ):
        with pytest.raises(LifetimeError, match="closed"):
            attempt()
    stream.synchronize()
    mark.synchronize()
    assert mark.done
    assert stream not in device.live_streams


def test_freeing_waits_for_queued_work_and_ends_plans(device, stream):
    a, b, out = three(device)
    plan = stream.compile([Step("add", out, (a, b), {})])
    plan.run()
    a.buffer.free()  # overwrites the memory
    assert (read(out) == 2).all()
    with pytest.raises(LifetimeError, match="was freed"):
        plan.run()


def test_freeing_waits_for_the_streams_of_others(device):
    """A stream of another device may still be copying from the buffer."""
    other = OtherAsyncDevice()
    source, target = device.alloc(64), other.alloc(64)
    source.upload(0, ONES)
    with other.open() as stream:
        assert stream.copy_from(target, 0, source, 0, 64)
        source.free()
        assert (target.read().view(np.float32) == 1).all()


def test_freeing_does_not_raise_the_failures_of_streams(device, stream):
    a, _, out = three(device)
    stream.run([Step("exp", out, (a,), {})])
    out.buffer.free()
    assert out.buffer.freed
    assert isinstance(stream.failure, Boom)
    with pytest.raises(ExecutionError, match="planted"):
        stream.synchronize()


def test_a_forgotten_stream_finishes_its_transfers(device):
    """The stream alone keeps the arrays of queued transfers alive."""
    buffer, out = device.alloc(64), np.zeros(16, np.float32)
    buffer.upload(0, ONES)
    stream = device.open(delay=0.02)
    stream.download(buffer, 0, out)
    del stream
    gc.collect()
    deadline = time.monotonic() + 10
    while not (out == 1).all() and time.monotonic() < deadline:  # its thread may have had the last reference
        time.sleep(0.001)
    assert (out == 1).all()


# --- transfers --------------------------------------------------------------------------------------------------------


def test_transfers_happen_in_the_order_of_the_stream(device, stream):
    a, b, out = three(device)
    plan = stream.compile([Step("add", out, (a, b), {})])
    got = [np.zeros(16, np.float32) for _ in range(3)]
    for i, array in enumerate(got):
        stream.upload(a.buffer, 0, np.full(16, i, np.float32))
        plan.run()
        stream.download(out.buffer, 0, array)
    assert stream.transferring
    stream.synchronize()
    assert not stream.transferring
    assert [array[0] for array in got] == [1, 2, 3]


def test_arrays_live_until_their_transfer_is_done(device):
    buffer = device.alloc(64)
    with device.open(delay=0.02) as stream:
        array = np.ones(16, np.float32)
        alive = weakref.ref(array)
        stream.upload(buffer, 0, array)
        del array
        gc.collect()
        assert alive() is not None
        stream.synchronize()
        gc.collect()
        assert alive() is None
        assert (buffer.read().view(np.float32) == 1).all()


def test_arrays_do_not_outlive_an_event_after_their_transfer(device):
    """Programs wait for events and never for the whole stream."""
    buffer = device.alloc(64)
    with device.open() as stream:
        first, second = np.ones(16, np.float32), np.ones(16, np.float32)
        alive = [weakref.ref(first), weakref.ref(second)]
        stream.upload(buffer, 0, first)
        mark = stream.record()
        stream.upload(buffer, 0, second)
        del first, second
        mark.synchronize()
        gc.collect()
        assert alive[0]() is None
        assert alive[1]() is not None
        assert stream.transferring
        stream.synchronize()
        gc.collect()
        assert alive[1]() is None


@pytest.mark.parametrize("make", [HostDevice, ExampleDevice, AsyncDevice])
def test_transfers_are_checked(make):
    device = make()
    buffer, foreign = device.alloc(64), ExampleDevice().alloc(64)
    with device.open() as stream:
        for transfer in (stream.upload, stream.download):
            for offset, size in ((-1, 4), (61, 4), (0, 65)):
                with pytest.raises(BoundsError):
                    transfer(buffer, offset, np.zeros(size, np.uint8))
            with pytest.raises(LifetimeError, match="cannot reach"):
                transfer(foreign, 0, np.zeros(4, np.uint8))
            with pytest.raises(LayoutError):
                transfer(buffer, 0, np.zeros((4, 4), np.uint8)[:, 0])
        with pytest.raises(BoundsError):
            stream.copy_from(buffer, 0, foreign, 61, 4)
        with pytest.raises(BoundsError):
            stream.copy_from(buffer, 61, foreign, 0, 4)
        assert stream.failure is None


def test_copies_between_streams_are_direct_where_the_device_can(device, stream):
    source, target = device.alloc(64), device.alloc(64)
    source.upload(0, ONES)
    assert stream.copy_from(target, 0, source, 0, 64)
    stream.synchronize()
    assert (target.read().view(np.float32) == 1).all()


def test_copies_between_other_devices_go_by_way_of_the_host(device, stream):
    """Both ways: the copy is complete when it returns, behind the work before it."""
    host, example = HostDevice().alloc(64), ExampleDevice()
    host.upload(0, ONES * 2)
    target = device.alloc(64)
    stream.upload(target, 0, ONES)
    assert not stream.copy_from(target, 0, host, 0, 64)
    assert (target.read().view(np.float32) == 2).all()
    with example.open() as other:
        far = example.alloc(64)
        assert not other.copy_from(far, 0, target, 0, 64)
        assert (far.read().view(np.float32) == 2).all()


def test_copies_see_what_the_stream_of_the_source_was_given_before(device, stream):
    source = device.alloc(64)
    for other in (OtherAsyncDevice(), ExampleDevice(), HostDevice()):
        target = other.alloc(64)
        for value in (1.0, 3.0):
            stream.upload(source, 0, ONES * value)  # slow
            with other.open() as reader:
                reader.copy_from(target, 0, source, 0, 64, source=stream)
                reader.synchronize()
                assert (target.read().view(np.float32) == value).all()


def test_a_copy_behind_failed_work_of_the_source_is_refused(device, stream):
    source, out, target = vector(device.alloc(64)), vector(device.alloc(64)), HostDevice().alloc(64)
    stream.compile([Step("exp", out, (source,), {})]).run()
    with HostDevice().open() as reader, pytest.raises(ExecutionError):
        reader.copy_from(target, 0, source.buffer, 0, 64, source=stream)
    with pytest.raises(ExecutionError):
        stream.synchronize()
    stream.recover()


# --- events -----------------------------------------------------------------------------------------------------------


def test_an_event_is_reached_when_the_work_before_it_is_done(device):
    a, b, out = three(device)
    with device.open(delay=0.05) as stream:
        before = stream.record()
        stream.compile([Step("add", out, (a, b), {})]).run()
        after = stream.record()
        before.synchronize()
        assert before.done
        assert not after.done
        assert "pending" in repr(after)
        after.synchronize()
        assert after.done
        assert "done" in repr(after)
        assert (read(out) == 2).all()
        assert before.sequence < after.sequence


def test_events_of_a_synchronous_stream_are_reached_at_once():
    with HostDevice().open() as stream:
        mark = stream.record()
        assert mark.done
        mark.synchronize()
        assert not stream.is_async
        assert not stream.has_events


def test_events_without_hooks_wait_for_the_stream(device):
    class Plain(ThreadStream):
        _record = Stream._record
        _join = Stream._join
        _query = Stream._query

        def _synchronize(self):
            ThreadStream._join(self, ThreadStream._record(self))

    class PlainDevice(AsyncDevice):
        stream_class = Plain

    device = PlainDevice()
    a, b, out = three(device)
    with device.open() as stream:
        stream.compile([Step("add", out, (a, b), {})]).run()
        mark = stream.record()
        assert not mark.done
        stream.synchronize()
        assert mark.done
        stream.compile([Step("add", out, (a, b), {})]).run()
        late = stream.record()
        late.synchronize()
        assert late.done


def test_a_stream_waits_for_an_event_of_another_one(device):
    a, b, out = three(device)
    middle = vector(device.alloc(64))
    with device.open(delay=0.05) as first, device.open(delay=0) as second:
        first.compile([Step("add", middle, (a, b), {})]).run()
        mark = first.record()
        second.wait(mark)
        second.compile([Step("neg", out, (middle,), {})]).run()
        assert second.log == ["wait"]
        assert not mark.done, "the host waited"
        second.synchronize()
        assert (read(out) == -2).all()
        second.wait(mark)
        second.wait(second.record())
        assert second.log == ["wait"], "an event that is reached, or of the stream itself, needs no waiting"


@pytest.mark.parametrize("make", [HostDevice, ExampleDevice, OtherAsyncDevice])
def test_streams_of_different_classes_wait_on_the_host(device, make):
    a, b, out = three(device)
    with device.open(delay=0.02) as first, make().open() as second:
        first.compile([Step("add", out, (a, b), {})]).run()
        second.wait(first.record())
        assert (read(out) == 2).all()


def test_events_after_a_failure_fail_and_waiting_never_hangs(device, stream):
    a, b, out = three(device)
    before = stream.record()
    before.synchronize()
    stream.compile([Step("exp", out, (a,), {})]).run()
    after = stream.record()
    with pytest.raises(ExecutionError, match="planted") as caught:
        after.synchronize()
    assert isinstance(caught.value.__cause__, Boom)
    assert caught.value.device == "asyncdevice"
    assert after.done
    assert isinstance(after.failure, Boom)
    assert before.failure is None
    before.synchronize()
    with device.open() as other, pytest.raises(ExecutionError, match="planted"):
        other.wait(after)
    late = stream.record()
    assert late.failure is after.failure
    for attempt in (late.synchronize, stream.synchronize, stream.synchronize):
        with pytest.raises(ExecutionError, match="planted"):
            attempt()
    stream.recover()
    assert stream.failure is None
    stream.run([Step("add", out, (a, b), {})])
    fresh = stream.record()
    fresh.synchronize()
    assert (read(out) == 2).all()
    for failed in (after, late):
        with pytest.raises(ExecutionError):
            failed.synchronize()


def test_a_failure_found_late_fails_every_event_not_seen_complete(device, stream):
    """It is not known which work failed, so no event after it counts as reached."""
    a, b, out = three(device)
    sure = stream.record()
    sure.synchronize()
    stream.compile([Step("exp", out, (a,), {})]).run()
    unsure = stream.record()
    stream.compile([Step("add", out, (a, b), {})]).run()
    with pytest.raises(ExecutionError):
        stream.synchronize()
    assert sure.failure is None
    assert unsure.failure is not None


def test_a_call_that_fails_is_named_and_fails_later_events(device, stream):
    a, b, out = three(device)
    plan = stream.compile([Step("add", out, (a, b), {}), Step("tanh", out, (a,), {}), Step("add", out, (a, b), {})])
    before = stream.record()
    with pytest.raises(StepError, match="Boom: at once") as caught:
        plan.run()
    assert caught.value.step == 1
    assert isinstance(caught.value.__cause__, Boom)
    assert stream.record().failure is caught.value.error
    before.synchronize()
    assert before.failure is None
    with pytest.raises(ExecutionError, match="at once"):
        stream.synchronize()
    stream.recover()
    stream.synchronize()
    assert (read(out) == 2).all(), "work before the failure was done"


class TellsOnce(Stream):
    """Asynchronous; its driver tells an error to the first that asks, and takes a while to return it."""

    def __init__(self, device):
        super().__init__(device)
        self.error, self.asked, self.over = Boom("told once"), threading.Event(), threading.Event()

    def _synchronize(self):
        error, self.error = self.error, None
        if error is not None:
            self.asked.set()
            self.over.wait(10)
            raise error


class NotesOnce(TellsOnce):
    """The same with events: it notes the error before it is asked again."""

    def _join(self, handle):
        error, self.error = self.error, None
        if error is not None:
            self.fail(error)
            self.asked.set()
            self.over.wait(10)


@pytest.mark.parametrize("kind", [TellsOnce, NotesOnce])
@pytest.mark.parametrize("second", ["event", "stream"])
def test_an_error_that_a_driver_tells_once_is_raised_to_everybody_who_waits(kind, second):
    stream = kind(HostDevice())
    early, late = stream.record(), stream.record()
    heard = []

    def wait(waited_for):
        try:
            waited_for.synchronize()
        except ExecutionError as error:
            heard.append(str(error))

    threads = [threading.Thread(target=wait, args=(w,)) for w in (late, early if second == "event" else stream)]
    threads[0].start()
    assert stream.asked.wait(10)
    threads[1].start()
    threads[1].join(0.1)  # it has either been told something, or waits for the first one
    stream.over.set()
    for thread in threads:
        thread.join(10)
    assert len(heard) == 2
    assert all("told once" in text for text in heard)
    assert stream.record().failure is not None
    stream.recover()
    stream.record().synchronize()
    stream.synchronize()


class Tardy(Stream):
    """Asynchronous; waiting for an event blocks until the test lets it go on, and fails."""

    def __init__(self, device):
        super().__init__(device)
        self.waiting, self.over = threading.Event(), threading.Event()

    def _synchronize(self):
        pass

    def _join(self, handle):
        self.waiting.set()
        assert self.over.wait(10)
        raise Boom("late")


def test_a_failure_that_somebody_hears_of_after_the_recovery_is_not_one_of_the_time_behind_it():
    stream = Tardy(HostDevice())
    mark, heard = stream.record(), []

    def wait():
        try:
            mark.synchronize()
        except ExecutionError as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert stream.waiting.wait(10)
    stream.recover()  # as another thread would, to which the failure was raised first
    stream.over.set()
    thread.join()
    assert len(heard) == 1
    assert mark.failure is not None
    assert stream.failure is None
    assert stream.record().failure is None


def test_recovering_hides_no_failure_that_nobody_knows_of(device, stream):
    a, _, out = three(device)
    stream.compile([Step("exp", out, (a,), {})]).run()
    mark = stream.record()
    with pytest.raises(StepError):
        stream.compile([Step("tanh", out, (a,), {})]).run()
    stream.recover()
    assert str(stream.failure) == "planted"
    with pytest.raises(ExecutionError, match="planted"):
        stream.synchronize()
    stream.recover()
    stream.synchronize()
    with pytest.raises(ExecutionError):
        mark.synchronize()


def test_failures_of_a_synchronous_stream():
    device = Failing()
    a, b, out = three(device)
    with device.open() as stream:
        before = stream.record()
        with pytest.raises(StepError) as caught:
            stream.run([Step("add", out, (a, b), {}), Step("exp", out, (a,), {})])
        assert caught.value.step == 1
        assert before.failure is None
        assert isinstance(stream.record().failure, Boom)
        with pytest.raises(ExecutionError, match="failed before: planted"):
            stream.synchronize()
        stream.recover()
        stream.synchronize()
        assert stream.record().failure is None


def test_a_run_that_fails_before_its_first_call_names_no_step():
    class Strict(Stream):
        def _run(self, calls):
            raise Boom("no context")

    class Variant(Failing):
        def _open(self, **params):
            return Strict(self)

    device = Variant()
    a, b, out = three(device)
    with device.open() as stream, pytest.raises(StepError) as caught:
        stream.run([Step("add", out, (a, b), {})])
    assert caught.value.step is None


def test_fewer_calls_than_groups_name_no_step():
    class Whole(Stream):
        def _compile(self, groups):
            calls = super()._compile(groups)
            return [lambda: [call() for call in calls]]

    class Variant(Failing):
        def _open(self, **params):
            return Whole(self)

    device = Variant()
    a, b, out = three(device)
    with device.open() as stream:
        plan = stream.compile([Step("add", out, (a, b), {}), Step("exp", out, (a,), {})])
        assert len(plan) == 2
        with pytest.raises(StepError) as caught:
            plan.run()
        assert caught.value.step is None
        stream.recover()


def test_driver_failures_of_hooks_are_typed_and_noted(device):
    class Lost(ThreadStream):
        def _upload(self, buffer, offset, data):
            raise OSError("the bus is gone")

        def _record(self):
            if getattr(self, "lost", False):
                raise OSError("the bus is gone")
            return super()._record()

    class LostDevice(AsyncDevice):
        stream_class = Lost

    device = LostDevice()
    stream = device.open()
    buffer = device.alloc(64)
    stream.lost = True
    for attempt in (lambda: stream.upload(buffer, 0, ONES), stream.record):
        with pytest.raises(ExecutionError, match="the bus is gone"):
            attempt()
        assert isinstance(stream.failure, OSError)
    assert not stream.transferring
    stream.lost = False
    stream.close()


def test_closing_a_failed_stream(device):
    """Closing raises a failure that was not raised before, and closes the stream in any case."""
    a, _, out = three(device)
    for told in (False, True):
        stream = device.open()
        stream.compile([Step("exp", out, (a,), {})]).run()
        if told:
            with pytest.raises(ExecutionError):
                stream.synchronize()
            stream.close()
        else:
            with pytest.raises(ExecutionError):
                stream.close()
        assert stream.closed
        assert not stream.thread.is_alive()


def test_waiting_for_a_device_waits_for_all_of_its_streams(device):
    a, b, out = three(device)
    other = vector(device.alloc(64))
    with device.open(delay=0.02) as first, device.open(delay=0.02) as second:
        first.compile([Step("exp", other, (a,), {})]).run()
        second.compile([Step("add", out, (a, b), {})]).run()
        with pytest.raises(ExecutionError, match="planted"):
            device.synchronize()
        assert (read(out) == 2).all()
        first.recover()
        device.synchronize()


# --- threads ----------------------------------------------------------------------------------------------------------


def test_one_thread_submits_to_a_stream():
    inside, go = threading.Event(), threading.Event()

    class Slow(Failing):
        kernels = KernelTable("f32", "strided")

    @Slow.kernels("add")
    def add(stream, op, out, a, b):
        def call():
            inside.set()
            assert go.wait(10)

        return call

    device = Slow()
    a, b, out = three(device)
    with device.open() as stream:
        plan = stream.compile([Step("add", out, (a, b), {})])
        thread = threading.Thread(target=plan.run)
        thread.start()
        assert inside.wait(10)
        try:
            for attempt in (
                plan.run,
                stream.record,
                lambda: stream.compile([]),
                lambda: stream.upload(a.buffer, 0, ONES),
                lambda: stream.download(a.buffer, 0, ONES.copy()),
            ):
                with pytest.raises(LifetimeError, match="another thread is submitting"):
                    attempt()
        finally:
            go.set()
            thread.join()
        assert stream.failure is None
        plan.run()


def test_events_are_waited_for_in_any_thread(device):
    a, b, out = three(device)
    with device.open(delay=0.01) as stream:
        stream.compile([Step("add", out, (a, b), {})]).run()
        mark = stream.record()
        seen = []
        threads = [threading.Thread(target=lambda: (mark.synchronize(), seen.append(mark.done))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [True] * 4


def test_what_a_driver_raises_becomes_the_error_that_translate_gives():
    class Telling(Stream):
        def _translate(self, error):
            return ow.DeviceLostError(f"lost: {error}") if isinstance(error, Boom) else error

    class Variant(Failing):
        stream_class = Telling

        def _open(self, **params):
            return Telling(self)

    device = Variant()
    a, b, out = three(device)
    stream = device.open()
    with pytest.raises(StepError, match="DeviceLostError: lost: planted") as caught:
        stream.compile([Step("add", out, (a, b), {}), Step("exp", out, (a,), {})]).run()
    assert caught.value.step == 1
    assert isinstance(caught.value.error, ow.DeviceLostError)
    assert isinstance(caught.value.error.__cause__, Boom)
    assert caught.value.__cause__ is stream.failure is caught.value.error
    stream.recover()
    with pytest.raises(StepError) as caught, device.open() as other:
        Plan(other, [lambda: 1 / 0], 1).run()
    assert isinstance(caught.value.error, ZeroDivisionError)
    assert caught.value.error.__cause__ is None


def test_aborting_comes_from_any_thread():
    class Endless(Stream):
        def _run(self, calls):
            self.end = threading.Event()
            assert self.end.wait(10)

        def _abort(self):
            self.end.set()

    class Variant(Failing):
        def _open(self, **params):
            return Endless(self)

    with Variant().open() as stream:
        plan = stream.compile([])
        raised: list[BaseException] = []

        def run():
            try:
                plan.run()
            except ow.Cancelled as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while not hasattr(stream, "end"):
            time.sleep(0.001)
        stream.abort()
        thread.join(10)
        assert not thread.is_alive()
        assert len(raised) == 1, "what was ended did not end by itself"
    with HostDevice().open() as stream:
        stream.abort()


def test_calls_see_that_they_are_to_end_and_may_raise_then_what_they_like():
    with HostDevice().open() as stream:
        begun, raises = threading.Event(), [False, True]

        def long() -> None:
            begun.set()
            while not stream.ending:
                time.sleep(0.001)
            if raises.pop(0):
                raise ValueError("ended by the library")

        plan = Plan(stream, [long, lambda: 1 / 0], 2)
        for _ in range(2):
            assert not stream.ending or begun.is_set()
            begun.clear()
            errors: list[BaseException] = []

            def run(errors: list[BaseException] = errors) -> None:
                try:
                    plan.run()
                except Exception as raised:
                    errors.append(raised)

            thread = threading.Thread(target=run)
            thread.start()
            assert begun.wait(10)
            stream.abort()
            thread.join(10)
            assert [type(error) for error in errors] == [ow.Cancelled]
            assert isinstance(stream.failure, ow.Cancelled)
            stream.recover()
        assert isinstance(errors[0].__cause__, ValueError)
        Plan(stream, [lambda: None], 1).run()
        assert not stream.ending


def test_what_cannot_be_ended_early_is_said():
    class Queue(Stream):
        def _synchronize(self):
            pass

    class Ended(Queue):
        def _abort(self):
            pass

    assert Stream.uncancellable() == ""
    assert "queued goes on" in Queue.uncancellable()
    assert Ended.uncancellable() == ""


# --- fusing -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fusing():
    class Fusing(AsyncDevice):
        stream_class = FusingThreadStream

    with Fusing().open() as stream:
        yield stream
        FusingThreadStream.groups = staticmethod(lambda steps: [Group(tuple(steps))])


def chain():
    """v1 = v0 + v0; v2 = -v1; v3 = v0 * v0; v4 = v2 + v3."""
    return [
        Step("add", unbound(1), (unbound(0), unbound(0)), {}),
        Step("neg", unbound(2), (unbound(1),), {}),
        Step("mul", unbound(3), (unbound(0), unbound(0)), {}),
        Step("add", unbound(4), (unbound(2), unbound(3)), {}),
    ]


@pytest.mark.parametrize("order", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2], [0, 1], [3]], [[0, 2], [1, 3]]])
def test_steps_may_be_grouped_in_any_order_that_keeps_what_they_read(fusing, order):
    steps = chain()
    FusingThreadStream.groups = staticmethod(lambda steps: [Group(tuple(steps[i] for i in g)) for g in order])
    assert [[steps.index(s) for s in g.steps] for g in fusing.fuse(steps)] == order


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([[1], [0, 2, 3]], "wrong side"),
        ([[3, 2, 1, 0]], "wrong side"),
        ([[0, 1, 2]], "each of the 4 steps"),
        ([[0, 1, 2, 3], [0]], "each of the 4 steps"),
        ([[0, 1, 2, 2]], "each of the 4 steps"),
    ],
)
def test_grouping_that_loses_or_misplaces_steps_is_refused(fusing, order, message):
    FusingThreadStream.groups = staticmethod(lambda steps: [Group(tuple(steps[i] for i in g)) for g in order])
    with pytest.raises(Broken, match=message):
        fusing.fuse(chain())


def test_invented_steps_are_refused(fusing):
    FusingThreadStream.groups = staticmethod(lambda steps: [Group(tuple(chain()))])
    with pytest.raises(Broken):
        fusing.fuse(chain())


def test_a_reader_stays_before_the_next_writer(fusing):
    state, x = unbound(7), unbound(0)
    steps = [
        Step("neg", unbound(1), (state,), {}),
        Step("assign", state, (x,), {}),
        Step("neg", unbound(2), (state,), {}),
    ]
    for order, fine in (([0, 1, 2], True), ([1, 0, 2], False), ([0, 2, 1], False)):
        FusingThreadStream.groups = staticmethod(lambda steps, o=order: [Group(tuple(steps[i] for i in o))])
        if fine:
            fusing.fuse(steps)
        else:
            with pytest.raises(Broken):
                fusing.fuse(steps)


def test_values_inside_a_group_need_no_memory():
    class Fused(Stream):
        def _bind(self, group):
            first, out = group.steps[0], group.steps[1].out
            assert first.out.buffer is None
            a, b = (s.view for s in first.srcs)
            return lambda: np.negative(np.add(a, b), out.view)

    class Variant(Failing):
        def _why_not(self, step):
            return None  # its stream binds groups itself

        def _open(self, **params):
            return Fused(self)

    device = Variant()
    a, b, out = three(device)
    group = Group((Step("add", unbound(5), (a, b), {}), Step("neg", out, (unbound(5),), {})))
    with device.open() as stream:
        stream.compile([group]).run()
        assert (read(out) == -2).all()
        for lonely in (group.steps[0], Group((group.steps[1],)), Group(group.steps[::-1])):
            with pytest.raises(LifetimeError, match="has no memory"):
                stream.compile([lonely])


def runs(steps, **options):
    return [len(run) for run in pointwise_groups(steps, **options)]


def test_pointwise_steps_of_one_shape_make_a_run():
    assert runs(chain()) == [4]
    assert runs(chain(), limit=3) == [3, 1]
    assert runs(chain(), is_pointwise=lambda step: step.op != "mul") == [2, 1, 1]
    assert runs([]) == []
    other = Step("neg", unbound(5, (4, 4)), (unbound(4, (4, 4)),), {})
    assert runs([*chain(), other]) == [4, 1]
    product = Step("matmul", unbound(5, (16,)), (unbound(4), unbound(4)), {})
    assert runs([*chain(), product]) == [4, 1]


def test_what_is_read_crosswise_ends_a_run():
    square, columns = (4, 4), (4, 16)
    y = Step("neg", unbound(1, square), (unbound(0, square),), {})
    across = Step("add", unbound(2, square), (unbound(1, square), unbound(1, square, columns)), {})
    along = Step("add", unbound(2, square), (unbound(1, square), unbound(0, square, columns)), {})
    assert runs([y, across]) == [1, 1]
    assert runs([y, along]) == [2]
    # The first row, repeated, of a value that is made in the run.
    assert runs([y, Step("add", unbound(2, square), (unbound(1, square), unbound(1, square, (0, 4))), {})]) == [1, 1]


def test_what_is_overwritten_crosswise_ends_a_run():
    state = 9
    reads = Step("neg", unbound(1, (4,)), (unbound(state, (4,), offset=8),), {})
    writes = Step("assign", unbound(state, (4,)), (unbound(0, (4,)),), {})
    disjoint = Step("assign", unbound(state, (4,), offset=64), (unbound(0, (4,)),), {})
    everywhere = lambda step: True  # noqa: E731
    assert runs([reads, writes], is_pointwise=everywhere) == [1, 1]
    assert runs([reads, disjoint], is_pointwise=everywhere) == [2]


def test_bound_steps_are_distinguished_by_their_memory():
    buffer = HostDevice().alloc(256)
    a, b, c = (Arg(buffer, at, f32, (4,), (4,)) for at in (0, 16, 8))
    assert runs([Step("neg", b, (a,), {}), Step("neg", a, (b,), {})]) == [2]
    assert runs([Step("neg", b, (a,), {}), Step("neg", a, (c,), {})]) == [1, 1]


# --- what they are called ---------------------------------------------------------------------------------------------


def test_they_show_what_they_are(device, stream):
    plan = stream.compile([])
    assert repr(plan) == "<Plan of 0 groups on asyncdevice>"
    assert repr(stream) == "<Stream of asyncdevice>"
    assert isinstance(plan, Plan)
    assert isinstance(stream.record(), Event)
