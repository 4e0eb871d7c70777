"""Python's garbage collector during builds."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from opweave.collector import collector_paused


def test_the_collector_is_off_during_a_build_and_on_again_afterwards():
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_where_a_program_has_switched_it_off_it_stays_so():
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(ZeroDivisionError), collector_paused():
        raise ZeroDivisionError
    assert gc.isenabled()


MOVED = """
import gc, sys
from opweave.collector import collector_paused

collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
if sys.argv[1] == "frozen":
    gc.freeze()
frozen = gc.get_freeze_count()
with collector_paused():
    objects = [[] for _ in range(5000)]
print(len(collections), len(gc.get_objects(2)) > 5000, gc.get_freeze_count() == frozen)
"""


@pytest.mark.parametrize(("program", "found"), [("plain", "0 True True"), ("frozen", "2 False True")])
def test_what_was_made_is_moved_and_not_looked_at_unless_the_program_freezes_objects_itself(program, found):
    run = subprocess.run([sys.executable, "-c", MOVED, program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == found
