"""Forked children of a process that has used torch."""

from __future__ import annotations

import os

import pytest

from tests.support.processes import check_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_in_a_child_the_device_is_unavailable_nothing_hangs_and_cpu_computes():
    check_script("""
        scheduler = ow.Scheduler(["torch:cpu", "cpu"])
        big = ow.input("big", (600, 600))
        program = scheduler.build(ow.softmax(big @ big))
        program.run(big=np.ones((600, 600), np.float32))  # its threads have begun

        def work():
            global scheduler, program
            refused(lambda: ow.device("torch:cpu").open(), ow.Unavailable, "spawn")
            refused(lambda: program.run(big=np.ones((600, 600), np.float32)))
            scheduler.close()
            del scheduler, program
            gc.collect()
            assert (ow.compile(lambda a: a + 1)(ONES) == 2).all()

        in_child(work)
    """)
