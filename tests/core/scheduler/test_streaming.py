"""Weights that stay in host memory and are brought to a faster device for each run."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Stream
from tests.core.scheduler.test_async import Reference
from tests.support.async_device import ThreadStream
from tests.support.devices import BASIC, Plain, Separate

F = np.float32
LAYERS, SIZE = 5, 8
WEIGHT = SIZE * SIZE * 4  # bytes of each weight; nothing else is as large
VALUES = np.random.default_rng(1).integers(-2, 3, (2, SIZE)).astype(F)


def layers(n: int, where: ow.Device) -> tuple[ow.Tensor, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.integers(-2, 3, (SIZE, SIZE)).astype(F) for i in range(n)}
    weights = ow.weights(arrays, device=where)
    y = ow.input("x", (2, SIZE))
    for name in arrays:
        y = ow.relu(ow.linear(y, weights[name]))
    return y, arrays


def expected(values: np.ndarray, arrays: dict[str, np.ndarray]) -> np.ndarray:
    for array in arrays.values():
        values = np.maximum(values @ array.T, 0)
    return values


class Watched(Separate):
    """A device that asks for products."""

    def __init__(self) -> None:
        super().__init__("fast", offload=["linear", "expert_linear", "embedding"])
        self.uploads: list[int] = []
        self.changed = threading.Condition()
        self.plans = 0

    def _upload(self, mem: Any, offset: int, data: memoryview) -> None:
        with self.changed:
            self.uploads.append(len(data))
            self.changed.notify_all()
        super()._upload(mem, offset, data)


class Expecting(Stream):
    """Each plan but the last one waits until the weight of the next one is on its way."""

    def _run(self, calls: Any) -> None:
        device: Any = self.device
        index, device.plans = device.plans, device.plans + 1
        if index < LAYERS - 1:
            with device.changed:
                there = device.changed.wait_for(lambda: device.uploads.count(WEIGHT) >= index + 2, 10)
            assert there, "the next weight is not on its way while this split runs"
        super()._run(calls)


class Pipelined(Watched):
    stream_class = Expecting


def test_the_next_weight_is_brought_while_a_split_runs():
    fast, cpu = Pipelined(), Plain("cpu")
    y, arrays = layers(LAYERS, cpu)
    with ow.Scheduler([fast, cpu], parallel=1) as scheduler:
        program = scheduler.build(y)
        assert len(program.splits) == LAYERS
        for _ in range(3):
            fast.uploads.clear()
            fast.plans = 0
            np.testing.assert_array_equal(program.submit(x=VALUES).result(30), expected(VALUES, arrays))
        assert program.memory["fast"].temporaries <= 2 * WEIGHT + 3 * VALUES.nbytes, "two weights at a time, no more"


class Offloading(Reference):
    """The same with a stream that queues uploads itself."""

    def _offload(self, step: Any) -> bool:
        return step.op == "linear"


def test_asynchronous_devices_bring_weights_on_a_second_stream():
    fast, cpu = Offloading("fast", BASIC, 0.001), Plain("cpu")
    y, arrays = layers(LAYERS, cpu)
    with ow.Scheduler([fast, cpu]) as scheduler:
        program = scheduler.build(y)
        for _ in range(3):
            np.testing.assert_array_equal(program.run(x=VALUES), expected(VALUES, arrays))
        target = scheduler._targets[0]
        assert isinstance(target.copier, ThreadStream)
        assert target.copier is not target.stream


@pytest.mark.parametrize("parallel", [False, True])
def test_only_the_experts_in_use_are_brought(parallel):
    fast, cpu = Watched(), Plain("cpu")
    fast.kernels(*("expert_linear",), dtypes="f32")(_expert_linear)
    experts = np.random.default_rng(0).integers(-2, 3, (16, 4, 8)).astype(F)
    w = ow.weights({"experts": experts}, device=cpu)["experts"]
    x, ids = ow.input("x", (3, 8)), ow.input("ids", (3, 2), "i32")
    with ow.Scheduler([fast, cpu], parallel=parallel) as scheduler:
        program = scheduler.build(ow.expert_linear(x, w, ids))
        values = np.random.default_rng(1).integers(-2, 3, (3, 8)).astype(F)
        for chosen, pieces in (([[1, 2], [1, 2], [9, 1]], [2, 1]), ([[0, 15], [0, 15], [0, 0]], [1, 1])):
            fast.uploads.clear()
            before = scheduler.stats.copied
            got = program.run(x=values, ids=np.array(chosen, np.int32))
            want = np.stack([[experts[e] @ row for e in used] for row, used in zip(values, chosen, strict=True)])
            np.testing.assert_array_equal(got, want)
            expert = 4 * 8 * 4
            # Adjacent experts are copied in one transfer; of 16, only those that are named.
            assert sorted(n for n in fast.uploads if n % expert == 0) == sorted(p * expert for p in pieces)
            assert scheduler.stats.copied - before == sum(pieces) * expert


def _expert_linear(stream: Any, op: str, out: Any, x: Any, w: Any, ids: Any, **attrs: Any) -> Any:
    from opweave.graph.opdef import OPS

    target, arrays = out.view, [x.view, w.view, ids.view]
    return lambda: np.copyto(target, OPS[op].reference(*arrays, **attrs), casting="unsafe")
