"""Forked children of a process that has used OpenCL."""

from __future__ import annotations

import os

import pytest

from tests.support.processes import check_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.mark.parametrize("parallel", [False, True], ids=["in turn", "overlapping"])
def test_in_a_child_the_device_is_unavailable_nothing_hangs_and_cpu_computes(parallel):
    check_script(f"""
        scheduler = ow.Scheduler(["opencl:0", "cpu"], parallel={parallel})
        device = scheduler.devices[0]
        program = scheduler.build((x + ow.weights({{"w": ONES}}, device=device)["w"]) @ ow.weights({{"v": ONES}})["v"])
        program.run(x=ONES)
        buffer, stream = device.alloc(1 << 20), device.open()
        future = program.submit(x=ONES)

        def work():
            global scheduler, program, buffer, stream, future
            refused(lambda: device.open(), ow.Unavailable, "spawn")
            refused(lambda: device.alloc(64), ow.Unavailable, "spawn")
            refused(lambda: ow.Scheduler("opencl:0"), ow.Unavailable, "spawn")
            refused(lambda: program.run(x=ONES))
            refused(lambda: buffer.read())
            refused(stream.synchronize)
            assert device not in ow.devices()
            buffer.free()
            stream.close()
            scheduler.close()
            del scheduler, program, buffer, stream, future
            gc.collect()
            assert (ow.compile(lambda a: a + 1)(ONES) == 2).all()

        in_child(work)
        future.result(10)
        program.run(x=ONES)
    """)
