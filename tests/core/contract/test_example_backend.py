"""The test of the contract: a backend of at most 60 lines, with memory that nobody else can address, runs graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Step
from opweave.errors import LayoutError, UnknownNameError, UnsupportedOpError
from opweave.graph.dtypes import f32
from opweave.graph.layout import dense_strides
from opweave.registry import Registry
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.operands import read, write
from tests.support.example_backend import ExampleBackend, ExampleDevice

SUPPORT = Path(__file__).parents[2] / "support"
SOURCE = SUPPORT / "example_backend.py"
PAGE = SUPPORT.parents[1] / "docs" / "backend" / "first-device.md"


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_it_has_at_most_60_lines_and_the_documentation_quotes_them_all():
    text = SOURCE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    for name, there in {"ExampleBackend": "Acme", "ExampleDevice": "AcmeDevice", '"example"': '"acme"'}.items():
        text = text.replace(name, there)
    assert f'```python title="acme.py"\n{text}```' in PAGE.read_text(encoding="utf-8")


def test_it_is_registered_and_found():
    registry = Registry()
    backend = registry.register(ExampleBackend)
    assert isinstance(backend, ExampleBackend)
    device = registry.device("example")
    assert isinstance(device, ExampleDevice)
    assert device in registry.devices()
    registry.unload(backend)
    with pytest.raises(UnknownNameError, match="example"):
        registry.device("example")


def test_nobody_else_can_address_its_memory():
    buffer = ExampleDevice().alloc(64)
    buffer.upload(0, array(16))
    assert buffer.address is None
    with pytest.raises(LayoutError, match=r"the process cannot address .*; download it"):
        Arg(buffer, 0, f32, (16,), (4,)).view  # noqa: B018
    np.testing.assert_array_equal(buffer.read().view(np.float32), array(16))


def placement(program: ow.Program) -> list[str]:
    return [f"{t.name} {program.device_of(t).kind.name}" for split in program.splits for t in split.nodes]


@pytest.fixture
def scheduler():
    with ow.Scheduler([ExampleDevice(), HostDevice()]) as s:
        yield s


def test_a_graph_runs_on_it_together_with_another_device(scheduler):
    """A perceptron: products without bias and pointwise operations here, the rest on the host."""
    rng = np.random.default_rng(0)
    first, second, bias = (rng.standard_normal(s).astype(np.float32) for s in ((32, 16), (10, 32), (10,)))
    x = ow.input("x", (8, 16))
    y = ow.linear(x, ow.constant(first))
    hidden = ow.relu(y * y)
    logits = ow.linear(hidden, ow.constant(second), ow.constant(bias))
    program = scheduler.build({"probabilities": ow.softmax(logits), "logits": logits})

    assert placement(program) == ["linear ACCEL", "mul ACCEL", "relu HOST", "linear HOST", "softmax HOST"]
    assert program.n_copies == 1
    value = array(8, 16, seed=1)
    want = np.maximum((value @ first.T) ** 2, 0) @ second.T + bias
    for _ in range(2):
        got = program.run(x=value)
        np.testing.assert_allclose(got["logits"], want, rtol=1e-4, atol=1e-5)
        e = np.exp(want - want.max(-1, keepdims=True))
        np.testing.assert_allclose(got["probabilities"], e / e.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)


def test_weights_that_lie_there_are_used_there():
    device = ExampleDevice()
    with ow.Scheduler([HostDevice(), device]) as scheduler:
        w = ow.weights({"w": array(4, 16)}, device=device)
        assert w.buffers[0].size == 4 * 16 * 4
        x = ow.input("x", (2, 16))
        y = ow.linear(x, w["w"])
        program = scheduler.build(y)
        assert program.device_of(y) is device
        np.testing.assert_allclose(program.run(x=array(2, 16)), array(2, 16) @ array(4, 16).T, rtol=1e-5, atol=1e-6)


def test_operands_that_are_not_dense_are_packed_by_the_core(scheduler):
    """A dense-only device is not sent back to the host by a permute or a broadcast."""
    x = ow.input("x", (3, 4, 5))
    y = ow.input("y", (5,))
    z = x.transpose(2, 0, 1) * y.reshape(5, 1, 1)
    program = scheduler.build(ow.exp(z + z))
    assert placement(program) == ["mul ACCEL", "add ACCEL", "exp ACCEL"]
    a, b = array(3, 4, 5), array(5, seed=1)
    product = a.transpose(2, 0, 1) * b.reshape(5, 1, 1)
    np.testing.assert_allclose(program.run(x=a, y=b), np.exp(product + product), rtol=1e-6)


def test_what_it_does_not_support_goes_elsewhere_with_a_reason(scheduler):
    x, w, b = ow.input("x", (2, 4)), ow.constant(array(3, 4)), ow.constant(array(3))
    y = ow.linear(x, w, b)
    program = scheduler.build(y)
    assert program.device_of(y) is scheduler.devices[1]
    with ow.Scheduler(ExampleDevice()) as alone, pytest.raises(UnsupportedOpError, match="no device runs") as refused:
        alone.build(y)
    assert refused.value.reasons == {"exampledevice": "a bias is not supported"}
    with ow.Scheduler(ExampleDevice()) as alone, pytest.raises(UnsupportedOpError) as refused:
        alone.build(ow.tanh(x))
    assert refused.value.reasons == {"exampledevice": "no kernel for tanh"}
    with ow.Scheduler(ExampleDevice()) as alone, pytest.raises(UnsupportedOpError) as refused:
        alone.build(ow.exp(ow.input("h", (2, 4), "f16")))
    assert refused.value.reasons == {"exampledevice": "the output is f16, not f32"}


def test_its_steps_can_be_run_by_hand():
    device = ExampleDevice()
    shape = (2, 3)
    a, b, out = (Arg(device.alloc(24), 0, f32, shape, dense_strides(shape, f32)) for _ in range(3))
    write(a, array(*shape))
    write(b, array(*shape, seed=1))
    with device.open() as stream:
        stream.run([Step("add", out, (a, b), {})])
    np.testing.assert_array_equal(read(out), array(*shape) + array(*shape, seed=1))


def test_what_it_can_do_beside_the_minimum_is_derived():
    caps = ExampleDevice().caps
    assert not any(caps)
