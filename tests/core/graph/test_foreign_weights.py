"""`ow.weights` of what other libraries and `ow.from_dlpack` made."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave.contract import Usage
from tests.support.example_backend import ExampleDevice

torch = pytest.importorskip("torch")

F = np.float32


def data(tensor: ow.Tensor) -> Any:
    assert tensor.leaf is not None
    return tensor.leaf.data


def test_parameters_of_a_module_are_used_where_they_lie():
    module = torch.nn.Linear(3, 2)
    weights = ow.weights(dict(module.named_parameters()))
    assert {name: w.shape for name, w in weights.items()} == {"weight": (2, 3), "bias": (2,)}
    for name, parameter in module.named_parameters():
        assert data(weights[name]).__array_interface__["data"][0] == parameter.data_ptr()
    x = np.ones((4, 3), F)
    with torch.inference_mode():
        expected = module(torch.from_numpy(x)).numpy()
    with ow.Scheduler("host") as scheduler:
        y = ow.linear(ow.input("x", (4, 3)), weights["weight"], weights["bias"])
        # The parameters are random, so that sums may cancel.
        np.testing.assert_allclose(scheduler.build(y).run(x=x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: ow.from_dlpack(t)], ids=["tensor", "from_dlpack"])
@pytest.mark.parametrize("gradient", [False, True])
def test_bf16_of_pytorch_stays_bf16(wrap, gradient):
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).requires_grad_(gradient)
    (weight,) = ow.weights({"w": wrap(tensor)}).values()
    assert (weight.name, weight.shape, weight.dtype.name) == ("w", (2, 3), "bf16")
    assert weight.leaf is not None
    assert weight.leaf.kind == "weight"
    assert data(weight).dtype == ml_dtypes.bfloat16
    assert data(weight).__array_interface__["data"][0] == tensor.data_ptr()
    np.testing.assert_array_equal(ow.read(weight).astype(F), np.arange(6).reshape(2, 3))


def test_they_are_converted_and_placed_like_arrays():
    tensor = torch.arange(6, dtype=torch.float32, requires_grad=True)
    device = ExampleDevice()
    (weight,) = ow.weights({"w": tensor}, device=device, dtype="bf16").values()
    assert weight.dtype.name == "bf16"
    assert weight.leaf is not None
    assert weight.leaf.placement is not None
    assert weight.leaf.placement.buffer.device is device
    np.testing.assert_array_equal(ow.read(weight).astype(F), np.arange(6))


def test_leaves_in_the_memory_of_a_device_stay_there_or_go_where_they_are_asked():
    here, there = ExampleDevice(), ExampleDevice()
    (lying,) = ow.weights({"w": ow.Spec((4,))}).values()
    buffer = here.alloc(16, Usage.WEIGHTS)
    ow.place(lying, buffer)  # as from_dlpack leaves arrays of a device
    values = np.arange(4, dtype=F)
    buffer.upload(0, values)
    for device, expected in ((None, buffer), (here, buffer), (there, None)):
        group = ow.weights({"w": lying}, device=device)
        leaf = group["w"].leaf
        assert leaf is not None
        placement = leaf.placement
        assert placement is not None
        assert placement.buffer is expected or (expected is None and placement.buffer.device is there)
        np.testing.assert_array_equal(ow.read(group["w"]), values)
        assert not buffer.freed
    (narrow,) = ow.weights({"w": lying}, dtype="f16").values()
    assert narrow.dtype.name == "f16"
    np.testing.assert_array_equal(ow.read(narrow), values)


def test_weights_of_weights_and_blocks():
    first = ow.weights({"w": np.ones((2, 32), F), "q": ow.Blocks(np.zeros((2, 34), np.uint8), (2, 32), "q8_0")})
    again = ow.weights(dict(first))
    assert [(t.shape, t.dtype.name) for t in again.values()] == [((2, 32), "f32"), ((2, 32), "q8_0")]
    assert data(again["q"]) is data(first["q"]) or np.shares_memory(data(again["q"]), data(first["q"]))


@pytest.mark.parametrize(
    "wrong",
    [ow.input("x", (2,)), ow.exp(ow.input("x", (2,))), ow.state("s", (2,)), ow.weights({"w": ow.Spec((2,))})["w"]],
)
def test_what_has_no_values_of_its_own_is_refused(wrong):
    with pytest.raises(ow.DTypeError, match="weights are made from arrays"):
        ow.weights({"w": wrong})


def test_tensors_that_require_a_gradient_are_detached():
    tensor = torch.ones(4, requires_grad=True)
    with ow.Scheduler("host") as scheduler:
        program = scheduler.build(ow.neg(ow.input("x", (4,))))
        assert program.run(x=tensor).tolist() == [-1] * 4
    assert ow.compile(lambda x: ow.neg(x), devices="host")(tensor).tolist() == [-1] * 4
    assert ow.read(ow.from_dlpack(tensor)).tolist() == [1] * 4
    assert ow.read(ow.constant(tensor)).tolist() == [1] * 4
