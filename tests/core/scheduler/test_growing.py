"""A decoder whose cache grows: nothing is built and nothing allocated but when a block is crossed."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Separate

F = np.float32
WIDTH, BLOCK, LONGEST = 8, 16, 64


class Decoder:
    """One attention layer with a cache of keys and values. A step sees the cache up to the end of the present block."""

    def __init__(self, devices: list[ow.Device]) -> None:
        rng = np.random.default_rng(0)
        self.arrays = {n: rng.standard_normal((WIDTH, WIDTH)).astype(F) / WIDTH for n in ("q", "k", "v", "out")}
        self.weights = ow.weights(self.arrays)
        self.keys, self.values = (ow.state(n, (LONGEST, WIDTH), device=devices[0]) for n in ("keys", "values"))
        self.scheduler = ow.Scheduler(devices)
        self.x = ow.input("x", (1, WIDTH))
        self.at = ow.input("at", (1,), "i64")

    def graph(self, seen: int) -> list[ow.Tensor]:
        w = self.weights
        keys = ow.index_copy(self.keys, self.at, ow.linear(self.x, w["k"]))
        values = ow.index_copy(self.values, self.at, ow.linear(self.x, w["v"]))
        reach = -(-seen // BLOCK) * BLOCK
        scores = ow.linear(self.x, w["q"]) @ keys[:reach].T
        weights = ow.softmax(scores + ow.input("mask", (1, reach)))
        return [ow.linear(weights @ values[:reach], w["out"]), keys, values]

    def step(self, x: np.ndarray, seen: int) -> np.ndarray:
        program = self.scheduler.build(self.graph(seen))
        mask = np.full(program.inputs["mask"].shape, -np.inf, F)
        mask[0, :seen] = 0
        result: np.ndarray = program.run(x=x, at=np.array([seen - 1]), mask=mask)[0]
        return result


def truth(arrays: dict[str, np.ndarray], xs: list[np.ndarray]) -> np.ndarray:
    all_x = np.concatenate(xs).astype(np.float64)
    q, k, v = all_x[-1:] @ arrays["q"].T, all_x @ arrays["k"].T, all_x @ arrays["v"].T
    scores = q @ k.T
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ v @ arrays["out"].T


@pytest.mark.parametrize("several", [False, True])
def test_after_reserve_only_crossing_a_block_builds_and_nothing_allocates(several):
    decoder = Decoder([Separate("a"), HostDevice()] if several else [HostDevice()])
    decoder.scheduler.reserve(decoder.graph(LONGEST))
    reserved = decoder.scheduler.stats
    rng = np.random.default_rng(1)
    xs: list[np.ndarray] = []
    for seen in range(1, LONGEST + 1):
        xs.append(rng.standard_normal((1, WIDTH)).astype(F))
        before = decoder.scheduler.stats
        np.testing.assert_allclose(decoder.step(xs[-1], seen), truth(decoder.arrays, xs), rtol=1e-3, atol=1e-5)
        after = decoder.scheduler.stats
        crossed = seen % BLOCK == 1 and seen <= LONGEST - BLOCK  # the largest one was built to reserve
        assert after.built - before.built == (1 if crossed else 0)
        assert after.reused - before.reused == (0 if crossed else 1)
    done = decoder.scheduler.stats
    assert done.allocated == reserved.allocated
    assert done.runs == LONGEST
    decoder.scheduler.close()
