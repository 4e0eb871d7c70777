"""Chains of operations that compute element by element run as one kernel."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow


def floats(*shape):
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def run(device, outputs, **arrays):
    """The results on the device, the number of kernels' groups, and the bytes of temporaries."""
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(outputs)
        return program.run(**arrays), program.memory[device.name].temporaries


def test_values_inside_a_chain_get_no_memory(device):
    x = ow.input("x", (64, 1024))
    a = floats(64, 1024)
    got, temporaries = run(device, ow.tanh(ow.exp(x * 0.1) - x) * x, x=a)
    np.testing.assert_allclose(got, np.tanh(np.exp(a * 0.1) - a) * a, rtol=1e-5, atol=1e-6)
    assert temporaries == 2 * a.nbytes  # the input and the result


def test_a_program_serves_all_shapes_and_numbers(device):
    def chain(shape, number):
        x, y = ow.input("x", shape), ow.input("y", shape[-1:])
        return run(device, ow.sigmoid(x + y) * number - y, x=floats(*shape), y=floats(shape[-1]))

    chain((3, 5), 2.0)
    before = len(device.programs)
    chain((7, 11, 2), -0.5)
    assert len(device.programs) == before


@pytest.mark.parametrize("rows", [1, 30])
def test_operands_that_are_broadcast_or_transposed_join(device, rows):
    x, column, row, turned = (
        ow.input("x", (rows, 50)),
        ow.input("column", (rows, 1)),
        ow.input("row", (50,)),
        ow.input("turned", (50, rows)),
    )
    arrays = {"x": floats(rows, 50), "column": floats(rows, 1), "row": floats(50), "turned": floats(50, rows)}
    got, _ = run(device, ow.maximum(x * row + column, turned.T), **arrays)
    want = np.maximum(arrays["x"] * arrays["row"] + arrays["column"], arrays["turned"].T)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_others_need_is_written(device):
    x = ow.input("x", (9, 33))
    middle = ow.exp(x)
    a = floats(9, 33)
    (kept, end, total), _ = run(device, [middle, ow.tanh(middle) * x, (middle - x).sum()], x=a)
    np.testing.assert_allclose(kept, np.exp(a), rtol=1e-5)
    np.testing.assert_allclose(end, np.tanh(np.exp(a)) * a, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total, (np.exp(a.astype(np.float64)) - a).sum(), rtol=1e-5)


def test_more_operands_than_a_kernel_takes(device):
    inputs = [ow.input(f"x{i}", (40,)) for i in range(25)]
    arrays = {f"x{i}": floats(40) + i for i in range(25)}
    total = inputs[0]
    for x in inputs[1:]:
        total = ow.tanh(total) + x
    want = arrays["x0"]
    for i in range(1, 25):
        want = np.tanh(want) + arrays[f"x{i}"]
    got, _ = run(device, total, **arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_conversion_to_a_narrower_type_rounds_inside_of_a_chain(device):
    x = ow.input("x", (100,))
    a = floats(100)
    for name in ("f16", "bf16", "i32"):
        got, _ = run(device, ow.cast(ow.cast(x * 3.0, name), "f32") - x, x=a)
        want = (a * np.float32(3)).astype(ow.as_dtype(name).numpy).astype(np.float32) - a
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_bound_that_the_type_does_not_hold_is_rounded_within_a_chain_too(device, dtype):
    x = ow.input("x", (5,), dtype)
    a = np.array([-1, -0.5, 0, 0.5, 1], ow.as_dtype(dtype).numpy)
    got, _ = run(device, ow.cast(ow.clamp(x, min=-0.3), "f32"), x=a)
    np.testing.assert_array_equal(got, np.maximum(a, np.array(-0.3, a.dtype)).astype(np.float32))
