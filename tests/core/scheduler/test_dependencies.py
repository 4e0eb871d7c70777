"""What an output depends on: every tensor that it is made of, with or without elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import opweave as ow
from tests.support.devices import Plain, Separate

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


def test_the_result_is_that_of_the_pieces_with_elements_and_devices_get_only_those():
    device = Separate("far", ["concat", "assign"])
    state = ow.state("s", (2, 4), device=device)
    x, z = ow.input("x", (2, 4)), ow.input("z", (3, 4))
    output = ow.concat([z, ow.assign(state, x)[0:0], z])
    with ow.Scheduler([device]) as scheduler:  # no host: nothing without elements arrives
        program = scheduler.build(output)
        z_values = np.ones((3, 4), np.float32)
        np.testing.assert_array_equal(program.run(x=VALUES, z=z_values), np.concatenate([z_values, z_values]))
        (step,) = [item for split in program.splits for item in split.items if item.op == "concat"]
        assert [view.shape for view in step.srcs] == [(3, 4), (3, 4)]


def test_what_no_output_depends_on_is_not_written():
    state = ow.state("s", (2, 4), device="host")
    ow.assign(state, ow.input("x", (2, 4)))
    with ow.Scheduler("host") as scheduler:
        scheduler.build(ow.relu(ow.input("z", (3, 4)))).run(z=np.zeros((3, 4), np.float32))
    assert not ow.read(state).any()


def test_half_precision_products_keep_the_dependency():
    """Graphs made anew in another type write the same states."""
    state = ow.state("s", (2, 4), device="host")
    z, w = ow.input("z", (3, 4)), ow.weights({"w": np.eye(4, dtype=np.float32)})["w"]
    output = ow.linear(ow.concat([z, ow.assign(state, ow.input("x", (2, 4)))[0:0]]), w)
    compiled = ow.compile(output, devices=["host"], compute_dtype="bf16")
    compiled(x=VALUES, z=np.zeros((3, 4), np.float32))
    np.testing.assert_array_equal(ow.read(state), VALUES)
