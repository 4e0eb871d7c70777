"""Batches of 0 and 1 in every way to run, on every device, alone and in pairs: an empty batch is an ordinary one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import opweave as ow
from tests.support.devices import Separate
from tests.support.real_devices import COMBINATIONS, combined

F = np.float32
W = np.linspace(-1, 1, 24, dtype=F).reshape(6, 4)
WEIGHT = ow.constant(W)


@pytest.fixture(params=COMBINATIONS)
def devices(request: pytest.FixtureRequest) -> Iterator[list[ow.Device]]:
    with combined(request.param) as found:
        yield found


@pytest.fixture(params=[False, True], ids=["in turn", "parallel"])
def parallel(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def graphs(rows: int) -> Iterator[tuple[ow.Tensor, Any]]:
    """Inputs of so many rows, and outputs that all have as many rows, or some of which do not."""
    x = ow.input("x", (rows, 6))
    h = ow.relu(ow.matmul(x, WEIGHT))
    yield x, ow.softmax(h + 1, -1)
    yield x, {"h": h, "view": h[:, 1:3], "input": x}
    yield x, x
    yield x, [ow.sum(h, 0), ow.concat([h, WEIGHT], 0), ow.mean(h, -1)]


def truth(values: np.ndarray[Any, Any]) -> list[list[np.ndarray[Any, Any]]]:
    """What the graphs of `graphs` compute, in f64."""
    h = np.maximum(values.astype(float) @ W.astype(float), 0)
    e = np.exp(h)
    return [
        [e / e.sum(-1, keepdims=True)],
        [h, h[:, 1:3], values],
        [values],
        [h.sum(0), np.concatenate([h, W]), h.mean(-1)],
    ]


def check(got: Any, want: list[np.ndarray[Any, Any]]) -> None:
    arrays = list(got.values()) if isinstance(got, dict) else list(got) if isinstance(got, tuple) else [got]
    assert len(arrays) == len(want)
    for array, expected in zip(arrays, want, strict=True):
        assert array.dtype == F
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)  # shapes too


def rows_of(count: int) -> np.ndarray[Any, Any]:
    return np.linspace(-2, 3, 6 * count, dtype=F).reshape(count, 6)


@pytest.mark.parametrize("rows", [0, 1])
def test_every_way_to_run(devices: list[ow.Device], parallel: bool, rows: int) -> None:
    values = rows_of(rows)
    with ow.Scheduler(devices, parallel=parallel) as scheduler:
        for (x, outputs), want in zip(graphs(rows), truth(values), strict=True):
            scheduler.reserve(outputs)
            program = scheduler.build(outputs)
            program.warm()
            check(program.run({x: values}), want)
            for future in [program.submit({x: values}) for _ in range(5)]:
                check(future.result(60), want)

            async def awaited(program: Any = program, x: Any = x) -> list[Any]:
                return await asyncio.gather(*[asyncio.wrap_future(program.submit({x: values})) for _ in range(2)])

            for result in asyncio.run(awaited()):
                check(result, want)
            program.write("x", values)
            check(program.run(), want)
            first = outputs["h"] if isinstance(outputs, dict) else outputs
            if isinstance(first, ow.Tensor) and first.op is not None and rows:
                check(program.read(first), want[:1])
            scheduler.synchronize()
            str(program.explain())


@pytest.mark.parametrize("rows", [0, 1])
def test_observers_are_shown_what_has_elements(devices: list[ow.Device], parallel: bool, rows: int) -> None:
    values = rows_of(rows)
    with ow.Scheduler(devices, parallel=parallel) as scheduler:
        for (x, outputs), want in zip(graphs(rows), truth(values), strict=True):
            program = scheduler.build(outputs)
            seen: list[tuple[int, ...]] = []

            def note(node: ow.Tensor, value: Any, seen: list[tuple[int, ...]] = seen) -> None:
                seen.append(value.shape)

            nodes = [node for node in program.partition.graph.nodes if node.base is None]
            for which in (None, nodes, lambda node: True):  # nodes without elements may be named too
                seen.clear()
                with program.observe(note, which):
                    check(program.run({x: values}), want)
                    check(program.submit({x: values}).result(60), want)
                assert sorted(seen) == sorted(2 * [node.shape for node in nodes if 0 not in node.shape])


@pytest.mark.parametrize("rows", [0, 1])
def test_states_keep_their_values(devices: list[ow.Device], parallel: bool, rows: int) -> None:
    values = rows_of(rows)
    x, ids = ow.input("x", (rows, 6)), ow.input("ids", (rows,), "i64")
    total, table = ow.state("total", (6,)), ow.state("table", (3, 6))
    outputs = [ow.assign(total, total + ow.sum(x, 0)), ow.index_copy(table, ids, x), ow.neg(x)]
    feeds = {x: values, ids: np.ones(rows, np.int64)}
    with ow.Scheduler(devices, parallel=parallel) as scheduler:
        program = scheduler.build(outputs, pins={outputs[-1]: devices[-1]})
        for future in [program.submit(feeds) for _ in range(3)]:
            result = future.result(60)
        program.run(feeds)
        check(result[2], [-values])
        np.testing.assert_allclose(program.read(total), 4 * values.sum(0), rtol=1e-6)
        expected = np.zeros((3, 6), F)
        expected[1:2] = values if rows else 0
        np.testing.assert_array_equal(program.read(table), expected)


def test_functions_take_batches_of_all_sizes_in_turn(devices: list[ow.Device], parallel: bool) -> None:
    with ow.Scheduler(devices, parallel=parallel) as scheduler:

        @ow.compile(devices=scheduler)
        def function(x: ow.Tensor) -> list[ow.Tensor]:
            h = ow.relu(ow.matmul(x, WEIGHT))
            return [ow.sum(h, 0), ow.concat([h, WEIGHT], 0), ow.mean(h, -1)]

        for rows in (2, 0, 1, 0, 3):
            check(function(rows_of(rows)), truth(rows_of(rows))[3])


def test_results_that_stay_on_their_device(parallel: bool) -> None:
    x = ow.input("x", (0, 6))
    with combined("opencl + cpu") as devices, ow.Scheduler(devices, parallel=parallel) as scheduler:
        program = scheduler.build({"a": ow.neg(x), "b": ow.matmul(x, WEIGHT)})
        for result in (
            program.run({x: rows_of(0)}, on_device=True), program.submit({x: rows_of(0)}, on_device=True).result(60),
        ):  # fmt: skip
            assert np.from_dlpack(result["a"]).shape == (0, 6)
            assert np.from_dlpack(result["b"]).shape == (0, 4)


def test_the_host_takes_no_other_nodes_of_a_scheduler_without_it() -> None:
    x = ow.input("x", (0, 6))
    empty = ow.sum(x, 0)
    device = Separate("a")
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build([empty, ow.exp(empty)])
        assert program.device_of(empty).kind is ow.Kind.HOST
        assert program.device_of(ow.exp(empty)) is device
        assert scheduler.devices == (device,)
        assert scheduler.partition(empty).device_of(empty).kind is ow.Kind.HOST
        with pytest.raises(ow.UnsupportedOpError, match="tanh") as caught:
            scheduler.build([empty, ow.tanh(empty)])
        assert "host" in caught.value.reasons
        assert (program.run({x: rows_of(0)})[1] == 1).all()
        with pytest.raises(ow.UnsupportedOpError, match="pinned to a"):
            scheduler.build(empty, pins={empty: "a"})
    with ow.Scheduler([device, ow.device("host")]) as scheduler:
        assert scheduler.build(empty).run({x: rows_of(0)}).tolist() == [0] * 6
