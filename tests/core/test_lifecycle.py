"""Open schedulers, streams and buffers when the process forks, and when it ends. Each case is a process of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.processes import check_script, run_script

ROOT = Path(__file__).parents[2]

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# --- forked children ------------------------------------------------------------------------------------------------


@needs_fork
@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_in_a_child_what_was_inherited_is_refused_at_once_and_what_is_new_works(parallel, busy):
    check_script(f"""
        scheduler = ow.Scheduler(["cpu", "host"], parallel={parallel})
        go = threading.Event()
        def wait(a):
            assert go.wait({30 if busy else 0}) or not {busy}
            return a
        slow = scheduler.build(ow.custom(wait, x, like=x))
        program = scheduler.build(x + 1)
        table = ow.weights({{"w": ONES}}, device="cpu")
        program.run(x=ONES)
        pending = slow.submit(x=ONES) if {busy} else None
        stream = ow.device("cpu").open(worker=True)
        mark = stream.record()
        plan = None
        time.sleep(0.05)

        def work():
            refused(lambda: program.run(x=ONES))
            refused(lambda: program.submit(x=ONES))
            refused(lambda: scheduler.build(x * 2))
            refused(scheduler.synchronize)
            refused(lambda: program.write("x", ONES) or program.run())
            refused(stream.record)
            refused(stream.synchronize)
            if not mark.done:
                refused(mark.synchronize, ow.ExecutionError)
            if pending is not None:
                refused(lambda: pending.result(0))
            stream.close()
            program.close()
            scheduler.close()
            assert (ow.read(table["w"]) == 1).all()
            for name in ("cpu", "host"):
                for both in (False, True):
                    with ow.Scheduler(name, parallel=both) as new:
                        ran = new.build(x + table["w"])
                        assert (ran.run(x=ONES) == 2).all()
                        assert (ran.submit(x=ONES).result(10) == 2).all()
            left_open = ow.Scheduler("cpu", parallel=True)
            left_open.build(x + 1).submit(x=ONES)
            gc.collect()

        in_child(work)
        in_child(lambda: in_child(work))
        go.set()
        if pending is not None:
            pending.result(10)
        assert (program.run(x=ONES) == 2).all()
    """)


@needs_fork
def test_in_a_child_devices_with_drivers_are_unavailable_and_their_memory_is_gone():
    check_script("""
        from tests.support.async_device import AsyncDevice
        device = AsyncDevice()
        ow.register_device(device)
        scheduler = ow.Scheduler([device, "host"])
        y = x + ow.weights({"w": ONES}, device=device)["w"]
        program = scheduler.build(y)
        program.run(x=ONES)
        stream, buffer = device.open(), device.alloc(64)
        freed = []
        device._free = freed.append
        assert device in ow.devices()

        def work():
            global stream, buffer, scheduler, program
            refused(lambda: device.open(), ow.Unavailable, "spawn")
            refused(lambda: device.alloc(64), ow.Unavailable, "spawn")
            refused(lambda: ow.Scheduler(device), ow.Unavailable, "spawn")
            refused(lambda: buffer.read())
            refused(lambda: stream.upload(buffer, 0, ONES))
            refused(lambda: program.run(x=ONES))
            assert device not in ow.devices()
            assert device not in ow.default_devices()
            buffer.free()
            stream.close()
            scheduler.close()
            del stream, buffer, scheduler, program
            gc.collect()
            assert not freed
            assert (ow.compile(lambda a: a + 1)(ONES) == 2).all()

        in_child(work)
        stream.close()
        assert (program.run(x=ONES) == 2).all()
    """)


@needs_fork
def test_children_are_forked_while_other_threads_hold_every_lock():
    check_script("""
        from opweave_cost import store
        from opweave.graph import tensor
        from opweave.registry import REGISTRY as registry
        from opweave.runtime import reclaim
        held, go = threading.Barrier(2), threading.Event()
        scheduler = ow.Scheduler("cpu")

        def hold():
            with (store._MEASURING, tensor._NODES_LOCK, registry._lock, ow.tracing.TRACE._lock, reclaim._QUEUES_LOCK,
                  scheduler._executor.lock, scheduler._executor._handing_over):
                held.wait()
                go.wait()

        threading.Thread(target=hold, daemon=True).start()
        held.wait()

        def work():
            assert ow.devices()
            with ow.tracing.TRACE.listen(lambda event: None), ow.Scheduler("cpu", parallel=True) as new:
                assert (new.build(x * 7).run(x=ONES) == 7).all()
            with store._MEASURING:
                pass
            refused(lambda: scheduler.build(x * 3))
            scheduler.close()

        in_child(work)
        go.set()
    """)


@needs_fork
def test_processes_of_multiprocessing_that_are_forked_compute_and_end():
    check_script("""
        import multiprocessing
        scheduler = ow.Scheduler("cpu", parallel=True)
        program = scheduler.build(x + 1)
        program.submit(x=ONES).result()

        def work(i):
            with ow.Scheduler("cpu") as new:
                return float(new.build(x + i).submit(x=ONES).result()[0])

        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map_async(work, range(6)).get(30) == [1, 2, 3, 4, 5, 6]
        assert (program.run(x=ONES) == 2).all()
    """)


# --- the end of a process -------------------------------------------------------------------------------------------


STUCK = """
    def stuck(a):
        begun.set()
        threading.Event().wait()
    begun = threading.Event()
    scheduler = ow.Scheduler("host", parallel={parallel})
    node = ow.custom(stuck, x + 1, like=x)
    program = scheduler.build(ow.neg(node))
    future = program.submit(x=ONES)
    begun.wait()
"""


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "overlapping"])
def test_a_process_ends_in_spite_of_a_kernel_that_never_returns_and_says_which(parallel):
    start = time.monotonic()
    ended = run_script(STUCK.format(parallel=parallel), OPWEAVE_EXIT_WAIT="0.5")
    assert ended.returncode == 0
    assert time.monotonic() - start < 30
    assert "custom" in ended.stderr
    assert "on host has not ended 0.5 s after the program" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "overlapping"])
def test_an_exception_leaves_a_with_block_in_spite_of_a_kernel_that_never_returns(parallel):
    start = time.monotonic()
    ended = run_script(
        f"""
        def stuck(a):
            begun.set()
            threading.Event().wait()
        begun = threading.Event()
        import warnings
        warnings.simplefilter("always")
        try:
            with ow.Scheduler("host", parallel={parallel}) as scheduler:
                program = scheduler.build(ow.neg(ow.custom(stuck, x + 1, like=x)))
                futures = [program.submit(x=ONES) for _ in range(2)]
                begun.wait()
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            print("left", *(isinstance(future.exception(0), ow.Cancelled) for future in futures), flush=True)
        """,
        OPWEAVE_EXIT_WAIT="0.5",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "left True True\n"
    assert time.monotonic() - start < 30
    assert "was left by KeyboardInterrupt, and custom" in ended.stderr
    assert "on host has not ended after 0.5 s" in ended.stderr
    assert "after the program" not in ended.stderr, "what was given up is not waited for again"


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "overlapping"])
def test_an_exception_leaves_a_with_block_after_the_step_that_is_under_way(parallel):
    ended = run_script(f"""
        def slow(a):
            begun.set()
            time.sleep(0.2)
            print("step", flush=True)
            return a
        begun = threading.Event()
        try:
            with ow.Scheduler("host", parallel={parallel}) as scheduler:
                node = ow.custom(slow, ow.custom(slow, x, like=x), like=x)
                futures = [scheduler.build(node).submit(x=ONES) for _ in range(3)]
                begun.wait()
                raise ValueError
        except ValueError:
            print(*(isinstance(future.exception(), ow.Cancelled) for future in futures))
    """)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    first, *rest = ended.stdout.splitlines()
    assert first == "step"
    assert rest == ["True True True"], "no further step began, closed before going on"


def test_what_was_submitted_and_can_end_ends_before_the_process_does():
    ended = run_script("""
        def slow(a):
            time.sleep(0.3)
            print("done", flush=True)
            return a
        scheduler = ow.Scheduler("host")
        scheduler.build(ow.custom(slow, x, like=x)).submit(x=ONES)
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_a_process_ends_with_the_guides_own_stream_and_a_scheduler_left_open():
    page = (ROOT / "docs" / "backend" / "streams.md").read_text()
    stream = next(block.partition("```")[0] for block in page.split("```python\n") if "class QueueStream(" in block)
    ended = run_script(
        "from opweave.contract import Device, Stream\n"
        "from tests.support.example_backend import ExampleDevice as AcmeDevice\n"
        'x = ow.input("x", (2, 3))\n' + stream + "\n"
        "scheduler = ow.Scheduler([AsyncAcme(), 'host'])\n"
        "program = scheduler.build(ow.tanh(x * x))\n"
        "program.run(x=np.ones((2, 3), np.float32))\n"
    )
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
