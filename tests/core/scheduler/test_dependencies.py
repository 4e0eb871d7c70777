"""What an output depends on: every tensor that it is made of, with or without elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import opweave as ow
from tests.support.devices import Plain, Separate
from tests.support.rounding import Rounding

VALUES = np.arange(8, dtype=np.float32).reshape(2, 4)


def ends() -> dict[str, Callable[[ow.Tensor], ow.Tensor]]:
    """Ways to make an output of a new version of a state through a slice without elements."""
    z = ow.input("z", (3, 4))
    return {
        "slice": lambda new: new[0:0],
        "relu": lambda new: ow.relu(new[0:0]),
        "concat": lambda new: ow.concat([z, new[0:0]]),
        "concat first": lambda new: ow.concat([new[0:0], z]),
        "concat of several": lambda new: ow.concat([z, new[0:0], z]),
        "concat of a relu": lambda new: ow.concat([z, ow.relu(new[0:0])]),
        "concat of empty ones": lambda new: ow.concat([ow.input("e", (0, 4)), new[0:0]]),
        "split and concat": lambda new: ow.concat([z, *ow.split(new, [0, 2], axis=0)[:1]]),
        "product": lambda new: z @ ow.concat([ow.input("w", (4, 2)), new[0:0, 0:2]]),
    }


@pytest.mark.parametrize("way", ends())
@pytest.mark.parametrize("device", [Plain("plain"), Separate("far")], ids=str)
def test_a_state_is_written_if_an_output_depends_on_it_even_without_elements(way, device):
    state = ow.state("s", (2, 4), device=device)
    output = ends()[way](ow.assign(state, ow.input("x", (2, 4))))
    with ow.Scheduler([device, "host"]) as scheduler:
        program = scheduler.build(output)
        feeds = {name: np.zeros(tensor.shape, np.float32) for name, tensor in program.inputs.items()}
        program.run({**feeds, "x": VALUES})
        np.testing.assert_array_equal(ow.read(state), VALUES)


def test_the_result_is_that_of_operands_with_elements_and_devices_get_only_those():
    device = Separate("far", ["concat", "assign"])
    state = ow.state("s", (2, 4), device=device)
    x, z = ow.input("x", (2, 4)), ow.input("z", (3, 4))
    output = ow.concat([z, ow.assign(state, x)[0:0], z])
    with ow.Scheduler([device]) as scheduler:  # no host: nothing without elements arrives
        program = scheduler.build(output)
        z_values = np.ones((3, 4), np.float32)
        np.testing.assert_array_equal(program.run(x=VALUES, z=z_values), np.concatenate([z_values, z_values]))
        (step,) = [item for split in program.splits for item in split.steps if item.op == "concat"]
        assert [view.shape for view in step.srcs] == [(3, 4), (3, 4)]


def fed() -> dict[str, Callable[[ow.Tensor], tuple[ow.Tensor, np.ndarray, tuple[int, ...]]]]:
    """Ways for an output to depend on the input "x", of which no element matters, and on a state of ones, shape (4, 3).

    Each returns the output, its value and the shape of "x".
    """
    ones, z = np.ones((4, 3), np.float32), np.full((2, 3), 7.0, np.float32)
    none, five, one = ow.input("x", (0, 3)), ow.input("x", (5, 3)), ow.input("x", (1, 3))
    ids = np.zeros(0, np.int64)
    return {
        "index_copy": lambda state: (ow.index_copy(state, ids, none), ones, none.shape),
        "index_copy of a view": lambda state: (ow.index_copy(state[1:3], ids, none) * 2.0, 2 * ones, none.shape),
        "index_copy of a slice": lambda state: (ow.index_copy(state, ids, five[3:3]) * 2.0, 2 * ones, five.shape),
        "assign": lambda state: (ow.assign(state[2:2], none) + 1.0, ones + 1, none.shape),
        "assign of a row, broadcast": lambda state: (ow.assign(state[2:2], one) + 1.0, ones + 1, one.shape),
        "accumulate": lambda state: (ow.accumulate(state[2:2], one) + 1.0, ones + 1, one.shape),
        "then written": lambda state: (ow.assign(ow.assign(state[2:2], one), 2.0) + 1.0, ones + 2, one.shape),
        "concat": lambda state: (ow.concat([state + 1.0, none, z]), np.concatenate([ones + 1, z]), none.shape),
        "concat first": lambda state: (ow.concat([none, state, z]), np.concatenate([ones, z]), none.shape),
        "concat of one": lambda state: (ow.concat([five[:0], state]) * 2.0, 2 * ones, five.shape),
        "concat of a constant": lambda state: (ow.concat([z, none]) * 2.0, 2 * z, none.shape),
        "concat of none": lambda state: (ow.concat([state[:0], none]) * 2.0, ones[:0], none.shape),
        "relu": lambda state: (ow.concat([state, ow.relu(none)]), ones, none.shape),
    }


@pytest.mark.parametrize("way", fed())
@pytest.mark.parametrize("device", ["host", "cpu", "opencl", "torch:cpu", Separate("far")], ids=str)
def test_an_input_of_which_no_element_matters_is_an_input_of_the_program(way, device):
    if isinstance(device, str):
        try:
            device = ow.device(device)
        except (ow.UnknownNameError, ow.Unavailable) as error:
            pytest.skip(str(error))
    state = ow.state("s", (4, 3), device=device, fill=1.0)
    output, expected, shape = fed()[way](state)
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(output)
        assert {name: tensor.shape for name, tensor in program.inputs.items()} == {"x": shape}
        for _ in range(2):
            got = program.run(x=np.full(shape, 9.0, np.float32))
            np.testing.assert_array_equal(got, expected, strict=True)
        with pytest.raises(ow.SchedulerError, match="'x'"):
            program.run()
        with pytest.raises(ow.ShapeError, match="x"):
            program.run(x=np.zeros((2, 2), np.float32))


def test_what_no_output_depends_on_is_not_written():
    state = ow.state("s", (2, 4), device="host")
    ow.assign(state, ow.input("x", (2, 4)))
    with ow.Scheduler("host") as scheduler:
        scheduler.build(ow.relu(ow.input("z", (3, 4)))).run(z=np.zeros((3, 4), np.float32))
    assert not ow.read(state).any()


def test_products_in_bf16_keep_the_dependency():
    state = ow.state("s", (2, 4), device="host")
    z, w = ow.input("z", (3, 4)), ow.weights({"w": np.eye(4, dtype=np.float32)})["w"]
    output = ow.linear(ow.concat([z, ow.assign(state, ow.input("x", (2, 4)))[0:0]]), w)
    compiled = ow.compile(output, devices=[Rounding(), "host"], precision="bf16")
    compiled(x=VALUES, z=np.zeros((3, 4), np.float32))
    np.testing.assert_array_equal(ow.read(state), VALUES)
