"""Results of runs that overlap: fetched when they are there, and before the next run needs their memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import opweave as ow
from tests.core.scheduler.test_streaming import LAYERS, SIZE, expected, layers
from tests.support.devices import Plain, Separate
from tests.support.lazy_device import LazyDevice

F = np.float32


def test_a_device_that_is_asynchronous_itself_is_waited_for():
    x = ow.input("x", (16,))
    with ow.Scheduler(LazyDevice(), parallel=True) as scheduler:
        program = scheduler.build(ow.exp(x) + 1)
        fed = [np.full(16, i, F) for i in range(4)]
        futures = [program.submit(x=values) for values in fed]
        for values, future in zip(fed, futures, strict=True):
            np.testing.assert_allclose(future.result(30), np.exp(values) + 1, rtol=1e-6)


class Unhurried(Separate):
    """A device that asks for products, and whose downloads are slow."""

    def __init__(self) -> None:
        super().__init__("unhurried", offload=["linear"])

    def _download(self, mem: Any, offset: int, out: memoryview) -> None:
        time.sleep(0.01)
        super()._download(mem, offset, out)


def test_weights_of_the_next_run_do_not_come_over_results_that_are_being_fetched():
    y, arrays = layers(LAYERS, cpu := Plain("cpu"))
    with ow.Scheduler([Unhurried(), cpu], parallel=2) as scheduler:
        program = scheduler.build(y)
        rng = np.random.default_rng(2)
        fed = [rng.integers(-2, 3, (2, SIZE)).astype(F) for _ in range(6)]
        futures = [program.submit(x=values) for values in fed]
        for values, future in zip(fed, futures, strict=True):
            np.testing.assert_array_equal(future.result(30), expected(values, arrays))
