"""The proof of levels 3 to 5: a device that is right passes them, and each single fault fails its own cases.

The device's streams do nothing before somebody waits, so a fault shows each time and not now and then. Every fault is
one patch; the cases that it has to fail are listed, and no others may fail.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from opweave.contract import Buffer, WorkerStream
from opweave.registry import Registry
from opweave.runtime import buffer
from opweave.runtime.host import operands
from opweave_conformance import workload
from opweave_conformance.levels import failures, order
from opweave_conformance.levels.failures import TASKS
from opweave_conformance.levels.indices import INDEXING
from opweave_conformance.suite import Suite
from tests.support.lazy_device import WORKING, LazyBackend, LazyDevice, LazyStream, Mark
from tests.support.sound_device import Block, SoundDevice

SPLIT = [f"*-separate-{graph}" for graph in ("pointwise", "inplace-chain", "views", "products", "outputs", "state-*")]
"""The checks of level 4 that detect the faults planted here."""

right_alloc, right_copy = LazyDevice._alloc, LazyStream._copy_from


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of these streams need not be long to be late."""
    monkeypatch.setattr(workload, "SECONDS", 0)
    monkeypatch.setattr(workload, "LARGE", 1 << 16)
    monkeypatch.setattr(failures, "ELEMENTS", 1 << 12)
    monkeypatch.setattr(failures, "CYCLES", 2)
    monkeypatch.setattr(order, "PATIENCE", 2.0)


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that is set when the test is over, so that nothing of it waits for ever."""
    event = threading.Event()
    yield event
    event.set()


def suite(**options: Any) -> Suite:
    registry = Registry(environ={}, search=[])
    registry.register(LazyBackend)
    return Suite("sound", using=registry, **options)


def red(**options: Any) -> dict[str, str]:
    """Ids and reasons of what fails."""
    found = suite(**options)
    return {o.id: o.reason for item in found.items if (o := found.perform(item)).status == "failed"}


def test_the_sound_device_passes() -> None:
    found = suite(levels=[0, 1, 3, 5])
    outcomes = [found.perform(item) for item in found.items]
    assert [(o.id, o.reason) for o in outcomes if o.status == "failed"] == []
    assert {o.id for o in outcomes if o.status == "skipped" and not o.id.startswith(("hygiene", "memory"))} == {
        *("fault-driver", "worker-fault-driver"),  # no call that fails is named
        *("fault-queued", "worker-fault-queued"),  # it binds references, not the kernels of a table
        "worker-fault-second-thread",
    }


def test_the_sound_device_passes_beside_a_second_one() -> None:
    assert red(levels=[4], only=SPLIT) == {}


# --- faults of streams ----------------------------------------------------------------------------------------------


def reached_already(self: LazyStream) -> Mark:
    return Mark(self, 0)


def query_lies(self: LazyStream, handle: Mark) -> bool:
    return True


def join_returns_early(self: LazyStream, handle: Mark) -> None:
    self.work_off(handle.at - 1)
    self.tell()


def synchronize_returns_early(self: LazyStream) -> None:
    self.work_off(self.submitted - 1)
    self.tell()


def wait_ignored(self: LazyStream, handle: Mark) -> bool:
    return True


def upload_at_once(self: LazyStream, buffer: Buffer, offset: int, data: memoryview) -> None:
    self.device._upload(buffer.handle, offset, data)


def download_at_once(self: LazyStream, buffer: Buffer, offset: int, out: memoryview) -> None:
    self.device._download(buffer.handle, offset, out)


def download_by_and_by(self: LazyStream, buffer: Buffer, offset: int, out: memoryview) -> None:
    self.put(partial(self.put, partial(self.device._download, buffer.handle, offset, out)))


def copy_overtakes(self: LazyStream, dst: Buffer, to: int, src: Buffer, at: int, size: int) -> bool:
    if not isinstance(src.device, SoundDevice):
        return False
    with WORKING:
        self.work.appendleft(partial(self.device._copy, dst.handle, to, src.handle, at, size))
        self.submitted += 1
    return True


def copy_of_nothing(self: LazyStream, dst: Buffer, to: int, src: Buffer, at: int, size: int) -> bool:
    return True


def copy_at_once(self: LazyStream, dst: Buffer, to: int, src: Buffer, at: int, size: int) -> bool:
    if not isinstance(src.device, SoundDevice):
        return False
    self.device._copy(dst.handle, to, src.handle, at, size)
    return True


def copy_denied(self: LazyStream, dst: Buffer, to: int, src: Buffer, at: int, size: int) -> bool:
    right_copy(self, dst, to, src, at, size)
    return False


def errors_swallowed(self: LazyStream, calls: Iterator[Callable[[], Any]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            continue


def abort_breaks(self: LazyStream) -> None:
    self.error = RuntimeError("was aborted")


def closed_at_once(self: LazyStream) -> None:
    self.closed = True


def garbage_allocated(self: LazyDevice, size: int, usage: Any) -> Block:
    return Block(self.end, 64) if size > 1 << 40 else right_alloc(self, size, usage)


def never_given_back(self: LazyDevice, mem: Block) -> None:
    pass


def thread_left(self: LazyDevice) -> LazyStream:
    threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()
    return LazyStream(self)


def thread_of_the_driver_left(self: LazyDevice) -> LazyStream:
    _thread.start_new_thread(threading.Event().wait, (30,))  # Python's list of threads does not have it
    return LazyStream(self)


class Fault(NamedTuple):
    """A single fault: ``patch`` takes the place of ``attribute`` of ``target``.

    Attributes:
        both: cases that fail on the device's own streams and on those with a thread.
        own, worker: cases that fail on the ones, or the others, only.
        perhaps: cases that may fail or not, by which thread is faster.
    """

    target: Any
    attribute: str
    patch: Any
    both: str = ""
    own: str = ""
    worker: str = ""
    perhaps: str = ""


ORDER = "async-order-mixed async-order-overwriting async-order-transfers async-order-upload-run-download"
WAITS = "async-wait-before-reading async-wait-before-writing async-wait-in-turn async-wait-mutual"
COPIES = "async-copy-between-streams async-copy-keeps-source async-copy-order"
SEVERAL = "async-streams-several async-streams-threads"
AFTERWARDS = "fault-closed fault-freed fault-raised fault-refused fault-waits"
UNFINISHED = f"""async-order-plans {ORDER} async-plans-closed async-plans-repeated async-upload-keeps-arrays {SEVERAL}
    async-abort-idle async-abort-running async-wait-for-host {AFTERWARDS}"""
"""What goes wrong where waiting for the stream does not wait."""

INDEX = " ".join(f"fault-index-{op}" for op in INDEXING)
FAULTS: dict[str, Fault] = {
    "an event is lost": Fault(
        LazyStream, "_record", reached_already,
        both=f"""async-event-done async-event-synchronize async-event-order {WAITS} async-wait-again async-wait-of-host
            async-download-complete async-upload-gives-back async-copy-between-streams fault-recovers""",
        own=f"fault-program fault-custom fault-allocation-program {INDEX}",
        worker=f"""async-event-threads {UNFINISHED} async-copy-keeps-source async-copy-order async-copy-ranges
            async-copy-within""",
        perhaps="async-free-waits async-drop-finishes",
    ),
    "an event lies": Fault(
        LazyStream, "_query", query_lies,
        both=f"async-event-done {WAITS} async-wait-again async-wait-of-host async-copy-between-streams",
    ),
    "waiting for an event returns early": Fault(
        LazyStream, "_join", join_returns_early,
        both="""async-event-synchronize async-event-order async-wait-of-host async-download-complete
            async-upload-gives-back fault-recovers""",
        own=f"fault-program fault-custom fault-allocation-program {INDEX}",
        worker=f"""{WAITS} {UNFINISHED} async-copy-between-streams async-copy-keeps-source async-copy-ranges
            async-copy-within""",
        perhaps="async-free-waits async-drop-finishes",
    ),
    "synchronizing returns early": Fault(
        LazyStream, "_synchronize", synchronize_returns_early,
        both="async-drop-finishes",
        own=f"""{UNFINISHED.replace(" async-order-mixed", "")} {WAITS} {COPIES.replace(" async-copy-order", "")}
            async-copy-ranges async-copy-within async-close-finishes async-event-closed async-free-waits
            async-download-complete async-upload-gives-back fault-allocation fault-custom fault-program-overlapping
            fault-second-thread {INDEX}""",
    ),
    "a wait is ignored": Fault(LazyStream, "_wait", wait_ignored, both=f"{WAITS} async-copy-between-streams"),
    "uploads overtake": Fault(LazyStream, "_upload", upload_at_once, both=f"{ORDER} async-wait-before-writing"),
    "downloads overtake": Fault(
        LazyStream, "_download", download_at_once,
        both=f"{ORDER} {SEVERAL} async-download-complete async-close-finishes async-drop-finishes fault-recovers",
    ),
    "downloads come later": Fault(
        LazyStream, "_download", download_by_and_by,
        both=f"{ORDER} {SEVERAL} async-download-complete fault-recovers",
        own="async-close-finishes async-drop-finishes", perhaps="async-drop-finishes async-close-finishes",
    ),
    "copies overtake": Fault(LazyStream, "_copy_from", copy_overtakes, both=COPIES),
    "copies are made at once": Fault(LazyStream, "_copy_from", copy_at_once, both=COPIES),
    "copies copy nothing": Fault(
        LazyStream, "_copy_from", copy_of_nothing, both=f"{COPIES} async-copy-ranges async-copy-within"
    ),
    "copies are made and denied": Fault(LazyStream, "_copy_from", copy_denied, both="async-copy-within"),
    "closing does not finish": Fault(
        LazyStream, "close", closed_at_once, both="async-drop-finishes", own="async-close-finishes async-event-closed"
    ),
    "abort breaks the stream": Fault(LazyStream, "_abort", abort_breaks, both="async-abort-idle async-abort-running"),
    "errors are swallowed": Fault(
        LazyStream, "_run", errors_swallowed,
        both="fault-raised fault-remembered fault-events fault-waits fault-recovers",
        own="fault-program fault-program-overlapping",
    ),
    "recovering does nothing": Fault(
        LazyStream, "recover", lambda self: None,
        both="fault-raised fault-remembered fault-events fault-waits fault-recovers",
        own=f"fault-program fault-custom {INDEX}", perhaps="fault-program-overlapping",
    ),
    "what does not fit is allocated": Fault(
        LazyDevice, "_alloc", garbage_allocated, own="fault-allocation fault-allocation-state fault-allocation-program"
    ),
    "memory leaks": Fault(LazyDevice, "_free", never_given_back, own="fault-leaks-memory"),
    "a thread leaks": Fault(LazyDevice, "_open", thread_left, own="fault-leaks-objects"),
    "a thread of the driver leaks": Fault(
        LazyDevice, "_open", thread_of_the_driver_left, own="fault-leaks-objects" if TASKS.is_dir() else ""
    ),
    "memory is freed under work": Fault(
        buffer, "settle", lambda space: None, both="async-free-waits fault-freed async-copy-keeps-source"
    ),
    "freed memory is used": Fault(
        Buffer, "check", lambda self, offset, size, write=False: None, both="fault-freed fault-refused"
    ),
    "plans outlive their memory": Fault(Buffer, "add_dependent", lambda self, plan: None, both="fault-freed"),
    "a thread swallows errors": Fault(
        WorkerStream, "_break", lambda self, error: None, worker="fault-raised fault-waits"
    ),
    "a thread ignores waits": Fault(
        WorkerStream, "_await", lambda self, event: None,
        both="async-wait-of-host",
        worker=f"{WAITS} async-wait-again async-wait-for-host async-copy-between-streams fault-waits",
    ),
}  # fmt: skip


def names(text: str, prefix: str = "") -> set[str]:
    return {prefix + name for name in text.split()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_cases(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    monkeypatch.setattr(fault.target, fault.attribute, fault.patch)
    wanted = names(f"{fault.both} {fault.own}") | names(f"{fault.both} {fault.worker}", "worker-")
    found = set(red(levels=[3, 5], seconds=20))
    perhaps = names(fault.perhaps) | names(fault.perhaps, "worker-")
    assert found - perhaps == wanted - perhaps


# --- what hangs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "named", "place"),
    [("_query", "event-done event-idle", "_await"), ("_abort", "abort-idle abort-running", "hang")],
)
def test_what_hangs_is_found_and_left_behind(monkeypatch, never, attribute, named, place) -> None:
    def hang(self: LazyStream, *args: Any) -> bool:
        if attribute == "_abort":
            never.wait(60)
        return never.is_set()

    monkeypatch.setattr(LazyStream, attribute, hang)
    some = ["*async-event-*", "*async-wait-*", "*async-abort-*"]
    found = suite(levels=[3], only=some, seconds=0.5)
    outcomes = {o.id: o.reason for item in found.items if (o := found.perform(item)).status == "failed"}
    assert set(outcomes) == names(named, "async-") | names(named, "worker-async-")
    for reason in outcomes.values():
        assert reason.startswith("it hangs: after 0.5 s it is still in ")
    assert any(f" {place} (" in reason for reason in outcomes.values())
    assert found.hung
    assert not suite(levels=[3], only=some).hung


# --- faults beside a second device ----------------------------------------------------------------------------------


def sources_remembered(self: LazyDevice, step: Any) -> Callable[[], None]:
    """The kernel reads its sources at its first run only."""
    known: list[np.ndarray] = []

    def call() -> None:
        if not known:
            known.extend(np.array(self.view(arg)) for arg in step.srcs)
        self.store(step, *known)

    return call


@pytest.mark.parametrize(
    ("target", "attribute", "patch", "ways"),
    [
        (operands, "_when_idle", lambda stream, call: call, {"overlap"}),
        (LazyStream, "_synchronize", LazyStream.tell, {"overlap"}),
        (LazyDevice, "bind_step", sources_remembered, {"overlap", "split"}),
    ],
    ids=["results are fetched early", "synchronizing does nothing", "a kernel remembers its sources"],
)
def test_a_fault_shows_in_graphs_on_two_devices(monkeypatch, target, attribute, patch, ways) -> None:
    monkeypatch.setattr(target, attribute, patch)
    graphs = {item.check.id for item in suite(levels=[4], only=SPLIT).items}
    assert set(red(levels=[4], only=SPLIT)) == {name for name in graphs if name.partition("-")[0] in ways}


def test_a_wrong_kernel_is_named_with_where_it_ran(monkeypatch) -> None:
    right = LazyDevice.store

    def store(self: LazyDevice, step: Any, *sources: np.ndarray) -> None:
        right(self, step, *sources)
        if step.op == "relu":
            self.view(step.out)[...] *= 2

    monkeypatch.setattr(LazyDevice, "store", store)
    found = red(levels=[4], only=["split-host-*"])
    assert {"split-host-pointwise", "split-host-products", "split-host-layers"} <= set(found)
    assert not {"split-host-norms", "split-host-types"} & set(found)
    assert all("relu" in reason and " on sound" in reason for reason in found.values())
