"""Random stacks of products with weights in shards: quantized ones, lost devices, and faults in collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave.runtime.host.device import HostDevice
from opweave.sharding import values
from opweave.sharding.values import Spread
from tests.core.scheduler.test_lost import Fragile
from tests.support.devices import Separate

F = np.float32
ROWS, WIDTH = 5, 64


def exact_blocks(rng: np.random.Generator) -> ow.Blocks:
    """A matrix in q8_0 whose elements are integers: the largest of each block is 127, so that the scale is 1."""
    matrix = rng.integers(-2, 3, (WIDTH, WIDTH)).astype(F)
    matrix[:, ::32] = 127
    return ow.quantize(matrix, "q8_0")


def stack(x: ow.Tensor, w: Any, kinds: list[str]) -> ow.Tensor:
    """A value in -3 .. 3 behind each product, so that every sum is exact."""
    y = x
    for i, kind in enumerate(kinds):
        made = ow.linear(y, w[f"w{i}"])
        made = ow.relu(made) if kind == "relu" else made + y if kind == "add" else made
        y = ow.minimum(ow.maximum(made, -3.0), 3.0)
    return y


KINDS = st.lists(st.sampled_from(["relu", "add", "none"]), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_quantized_weights_equal_one_device(cpus, data):
    kinds, rng = data.draw(KINDS), np.random.default_rng(data.draw(st.integers(0, 1000)))
    arrays: dict[str, Any] = {f"w{i}": exact_blocks(rng) for i in range(len(kinds))}
    by = {}
    for name in arrays:
        axis = data.draw(st.integers(0, 1))
        most = 2 if axis else 4  # of 64 elements there are two blocks
        devices = data.draw(st.permutations(cpus))[: data.draw(st.integers(2, most))]
        by[name] = ow.Sharded({d: data.draw(st.integers(1, 3)) for d in devices}, axis)
    x, value = ow.input("x_random_blocks", (ROWS, WIDTH)), rng.integers(-3, 4, (ROWS, WIDTH)).astype(F)
    with ow.Scheduler(cpus) as several, ow.Scheduler(cpus[0]) as one:
        got = several.build(stack(x, ow.weights(arrays, device=by), kinds)).run(x_random_blocks=value)
        want = one.build(stack(x, ow.weights(arrays), kinds)).run(x_random_blocks=value)
    assert np.array_equal(got, want)


def plain(value: np.ndarray[Any, Any], arrays: dict[str, Any], kinds: list[str]) -> np.ndarray[Any, Any]:
    """`stack` by NumPy."""
    for i, kind in enumerate(kinds):
        made = value @ arrays[f"w{i}"].T
        made = np.maximum(made, 0) if kind == "relu" else made + value if kind == "add" else made
        value = np.clip(made, -3, 3)
    return value


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_device_that_is_lost_at_any_time_is_said_and_done_without(data):
    kinds, rng = data.draw(KINDS), np.random.default_rng(data.draw(st.integers(0, 1000)))
    members = [Fragile("gpu:0"), Fragile("gpu:1"), Separate("stays")]
    arrays: dict[str, Any] = {f"w{i}": rng.integers(-2, 3, (WIDTH, WIDTH)).astype(F) for i in range(len(kinds))}
    by = {name: ow.Sharded(members[: data.draw(st.integers(2, 3))], data.draw(st.integers(0, 1))) for name in arrays}
    x, value = ow.input("x_random_lost", (ROWS, WIDTH)), rng.integers(-3, 4, (ROWS, WIDTH)).astype(F)
    out, want = stack(x, ow.weights(arrays, device=by), kinds), plain(value, arrays, kinds)
    scheduler = ow.Scheduler([*members, HostDevice()], parallel=data.draw(st.sampled_from([False, 2])))
    for _ in range(data.draw(st.integers(0, 2))):
        assert np.array_equal(scheduler.build(out).run(x_random_lost=value), want)
    lost = members[data.draw(st.integers(0, 1))]
    assert isinstance(lost, Fragile)
    program = scheduler.build(out)
    lost.lost = True
    with pytest.raises(ow.ExecutionError) as caught:
        program.run(x_random_lost=value)
    assert isinstance(caught.value.__cause__, ow.DeviceLostError)
    with scheduler.without(lost) as rest:
        assert np.array_equal(rest.build(out).run(x_random_lost=value), want)
        assert lost.name not in rest.build(out).memory


# --- faults ---------------------------------------------------------------------------------------------------------


def forget_a_part(found: Spread) -> Spread:
    return found._replace(parts=(*found.parts[:-1], found.parts[0]))


def swap_parts(found: Spread) -> Spread:
    return found._replace(parts=found.parts[::-1])


def forget_the_bias(found: Spread) -> Spread:
    return found._replace(bias=None)


@pytest.mark.parametrize(
    ("fault", "axis"), [(forget_a_part, 0), (forget_a_part, 1), (swap_parts, 0), (forget_the_bias, 1)]
)
def test_faults_in_collectives_change_results(cpus, monkeypatch, fault, axis):
    """That equal results mean equal collectives: with each fault the comparison fails."""
    rng = np.random.default_rng(1)
    arrays = {"w": rng.integers(-2, 3, (WIDTH, WIDTH)).astype(F), "b": rng.integers(1, 3, WIDTH).astype(F)}
    x, value = ow.input(f"x_faults_{fault.__name__}{axis}", (ROWS, WIDTH)), rng.integers(-3, 4, (ROWS, WIDTH)).astype(F)
    want = value @ arrays["w"].T + arrays["b"]

    def run() -> np.ndarray[Any, Any]:
        w = ow.weights(arrays, device={"w": ow.Sharded(cpus[:2], axis)})
        with ow.Scheduler(cpus[:2]) as scheduler:
            return scheduler.build(ow.linear(x, w["w"], w["b"])).run({x.key: value})

    assert np.array_equal(run(), want)
    gathered = values.Values._gathered

    def broken_gather(self: Any, tensor: ow.Tensor, device: str) -> ow.Tensor:
        self.spread[tensor] = fault(self.spread[tensor])
        return gathered(self, tensor, device)

    monkeypatch.setattr(values.Values, "_gathered", broken_gather)
    assert not np.array_equal(run(), want)
