"""The types of results, as checkers see them (mypy reads this file) and as they are."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

import opweave as ow
from opweave.futures import Future

Array = np.ndarray[Any, Any]

X = ow.input("x", (3,))
ONES = np.ones(3, np.float32)


def one(x: ow.Tensor) -> ow.Tensor:
    return ow.neg(x)


def several(x: ow.Tensor) -> tuple[ow.Tensor, ow.Tensor]:
    return x + 1.0, ow.exp(x)


def named(x: ow.Tensor) -> dict[str, ow.Tensor]:
    return {"plus": x + 1.0}


def untyped(x):
    return ow.neg(x)


def test_runs_return_what_they_were_built_for() -> None:
    with ow.Scheduler("host") as scheduler:
        array = assert_type(scheduler.build(one(X)).run(x=ONES), Array)
        arrays = assert_type(scheduler.build(several(X)).run(x=ONES), tuple[Array, ...])
        listed = assert_type(scheduler.build([*several(X)]).run(x=ONES), tuple[Array, ...])
        mapping = assert_type(scheduler.build(named(X)).run(x=ONES), dict[str, Array])
        future = assert_type(scheduler.build(one(X)).submit(x=ONES), Future[Array])
        assert type(array) is type(future.result()) is np.ndarray
        assert type(arrays) is type(listed) is tuple
        assert type(mapping) is dict
        anything: ow.Program = scheduler.build(one(X))
        assert_type(anything.run(x=ONES), Any)


def test_compiled_functions_return_arrays_in_the_form_of_the_tensors() -> None:
    array = assert_type(ow.compile(one, devices="host")(ONES), Array)
    arrays = assert_type(ow.compile(several, devices="host")(ONES), tuple[Array, ...])
    mapping = assert_type(ow.compile(named, devices="host")(ONES), dict[str, Array])
    assert type(array) is np.ndarray
    assert type(arrays) is tuple
    assert type(mapping) is dict
    assert_type(ow.compile(untyped, devices="host")(ONES), Any)
    assert_type(ow.compile(one(X), devices="host")(ONES), Array)
    assert_type(ow.compile(several(X), devices="host")(ONES), tuple[Array, ...])
    assert_type(ow.compile(named(X), devices="host")(ONES), dict[str, Array])
    assert_type(ow.compile(one, devices="host").program(ONES).run(x=ONES), Array)


def test_decorated_functions_too() -> None:
    @ow.compile(devices="host")
    def decorated(x: ow.Tensor) -> dict[str, ow.Tensor]:
        return named(x)

    assert_type(decorated(ONES), dict[str, Array])
    assert type(decorated(ONES)) is dict
