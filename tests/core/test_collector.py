"""Python's garbage collector during builds."""

from __future__ import annotations

import gc

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
