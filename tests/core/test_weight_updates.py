"""New values for weights that programs use, and taking weights from devices, on the shipped backends."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import gc
from importlib import import_module

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave.contract import BufferType, Usage
from opweave.runtime.host.device import HostDevice
from tests.support.devices import Separate
from tests.support.real_devices import make, real_device

device = real_device
F = np.float32


def array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def near(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placed", [True, False])
def test_programs_go_on_with_the_new_values(device, placed):
    w = ow.weights({"a": array(4, 6), "b": array(4)}, device=device if placed else None)
    x, v = ow.input("x", (3, 6)), array(3, 6, seed=1)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build(ow.linear(x, w["a"]) + w["b"])
        near(program.run(x=v), v @ array(4, 6).T + array(4))
        for seed in (2, 3):
            w.write({"a": array(4, 6, seed=seed)})
            near(program.run(x=v), v @ array(4, 6, seed=seed).T + array(4))
            near(ow.read(w["a"]), array(4, 6, seed=seed))
        assert scheduler.build(ow.linear(x, w["a"]) + w["b"]) is program
        assert scheduler.stats.built == 1
        other = scheduler.build(ow.neg(w["a"]))
        near(other.run(), -array(4, 6, seed=3))


def test_copies_on_other_devices_too():
    """Placed on one device and used on another; unplaced and used on two at once."""
    first, second = make("cpu"), make("torch")
    x, v = ow.input("x", (3, 6)), array(3, 6, seed=1)
    for where in (first, None):
        w = ow.weights({"a": array(4, 6)}, device=where)
        with ow.Scheduler([first, HostDevice()]) as one, ow.Scheduler([second, HostDevice()]) as two:
            programs = [scheduler.build(ow.linear(x, w["a"])) for scheduler in (one, two)]
            for seed in (0, 2):
                w.write({"a": array(4, 6, seed=seed)})
                for program in programs:
                    near(program.run(x=v), v @ array(4, 6, seed=seed).T)


def test_rounded_weights_are_rounded_again(monkeypatch):
    torch = make("torch")
    # PyTorch's products in bf16 are right on any processor; the backend takes them where they are fast.
    monkeypatch.setattr(type(torch), "kernels", import_module("opweave_torch.kernels.half_products").CPU_WITH_BF16)
    w = ow.weights({"a": array(64, 64)})
    x, v = ow.input("x", (16, 64)), array(16, 64, seed=1)
    with ow.Scheduler([torch, HostDevice()], precision="bf16") as scheduler:
        program = scheduler.build(ow.linear(x, w["a"]))
        assert any(t.dtype.name == "bf16" for t in program.partition.leaves)
        program.run(x=v)
        w.write({"a": array(64, 64, seed=2)})
        got = program.run(x=v)
    rounded = [a.astype(ml_dtypes.bfloat16).astype(F) for a in (v, array(64, 64, seed=2))]
    np.testing.assert_allclose(got, rounded[0] @ rounded[1].T, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("name", ["cpu", "opencl", "torch"])
@pytest.mark.parametrize("dtype", ["q4_0", "q8_0", "q5_1"])
def test_quantized_weights(name, dtype):
    device = make(name)
    old, new = (ow.quantize(array(8, 256, seed=s), dtype) for s in (0, 2))
    w = ow.weights({"a": old}, device=device)
    x, v = ow.input("x", (3, 256)), array(3, 256, seed=1)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build(ow.linear(x, w["a"]))
        near(program.run(x=v), v @ ow.dequantize(old).T)
        w.write({"a": new})
        near(program.run(x=v), v @ ow.dequantize(new).T)
        with pytest.raises(ow.DTypeError, match="takes Blocks"):
            w.write({"a": array(8, 256)})


class Negated(BufferType):
    """Memory that keeps the negative of each tensor; nobody's kernels read it."""

    def _init(self, mem, offset, tensor):
        return None

    def _upload(self, mem, offset, data):
        self.device._upload(mem, offset, (-np.frombuffer(data, F)).data.cast("B"))

    def _download(self, mem, offset, out):
        held = np.empty(len(out) // 4, F)
        self.device._download(mem, offset, held.data.cast("B"))
        out[:] = (-held).data.cast("B")


def test_special_memory_and_the_plain_copies_of_it():
    device = Separate("gpu")
    buffer = Negated(device, "gpu.negated").alloc(96, Usage.WEIGHTS)
    w = ow.weights({"a": ow.weights({"a": array(4, 6)}, device=device)["a"]})
    leaf = w["a"].leaf
    leaf.data, leaf.placement = array(4, 6), None
    ow.place(w["a"], buffer)
    w.write({"a": array(4, 6)})
    x, v = ow.input("x", (3, 6)), array(3, 6, seed=1)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build(ow.linear(x, w["a"]))
        near(program.run(x=v), v @ array(4, 6).T)
        assert not program.n_copies  # unpacked once, with the program
        w.write({"a": array(4, 6, seed=2)})
        near(program.run(x=v), v @ array(4, 6, seed=2).T)
        assert np.array_equal(np.negative(ow.read(w["a"])), np.frombuffer(device_bytes(buffer), F).reshape(4, 6))


def device_bytes(buffer):
    raw = np.empty(buffer.size, np.uint8)
    buffer.device._download(buffer.handle, 0, raw.data)
    return raw.tobytes()


def test_runs_in_flight_see_the_old_values_and_later_ones_the_new(device):
    w = ow.weights({"a": array(64, 64)}, device=device)
    x, v = ow.input("x", (8, 64)), array(8, 64, seed=1)
    for parallel in (False, True):
        w.write({"a": array(64, 64)})
        with ow.Scheduler([device, HostDevice()], parallel=parallel) as scheduler:
            program = scheduler.build(ow.linear(x, w["a"]))
            before = [program.submit(x=v) for _ in range(4)]
            w.write({"a": 2 * array(64, 64)})
            after = [program.submit(x=v) for _ in range(4)]
            for future in before:
                near(future.result(), v @ array(64, 64).T)
            for future in after:
                near(future.result(), 2 * v @ array(64, 64).T)


def test_what_does_not_fit_changes_nothing(device):
    w = ow.weights({"a": array(4, 6), "i": np.arange(3)}, device=device)
    for values, error in (
        ({"a": array(6, 4)}, ow.ShapeError),
        ({"a": array(4, 6, seed=1), "i": [0.5, 1, 2]}, ow.DTypeError),
        ({"a": array(4, 6, seed=1), "b": array(4)}, ow.UnknownNameError),
    ):
        with pytest.raises(error):
            w.write(values)
        assert np.array_equal(ow.read(w["a"]), array(4, 6))
    frozen = array(4, 6)
    frozen.flags.writeable = False
    held = ow.weights({"a": frozen, "b": array(4)}, device=HostDevice())
    with pytest.raises(ow.HazardError, match="read-only"):
        held.write({"b": array(4, seed=1), "a": array(4, 6, seed=1)})
    assert np.array_equal(ow.read(held["b"]), array(4))


def test_weights_used_in_place_are_written_there_and_others_leave_the_array_alone(device):
    a, b = array(4, 6), array(4, 6)
    ow.weights({"a": a}, device=HostDevice()).write({"a": array(4, 6, seed=1)})
    assert np.array_equal(a, array(4, 6, seed=1))
    w = ow.weights({"b": b}, device=device)
    new = array(4, 6, seed=2)
    w.write({"b": new})
    new[:] = 0
    assert np.array_equal(b, array(4, 6)) or make("cpu") is device  # ours may lie in host memory
    assert np.array_equal(ow.read(w["b"]), array(4, 6, seed=2))
    assert ow.Graph(w["b"] + 1).to_bytes(weights=True) != ow.Graph(w["b"] + 1).to_bytes()


# --- leaving a device ------------------------------------------------------------------------------------------------


def weight_buffers(device):
    gc.collect()
    return [buffer for buffer in device.live_buffers if buffer.usage is Usage.WEIGHTS and not buffer.freed]


def test_unplaced_weights_leave_a_device_with_the_last_program_that_uses_them(device):
    w = ow.weights({"a": array(40, 60), "b": array(40)})
    x, v = ow.input("x", (3, 60)), array(3, 60, seed=1)
    before = len(weight_buffers(device))
    with ow.Scheduler([device]) as scheduler:
        first = scheduler.build(ow.linear(x, w["a"], w["b"]))
        second = scheduler.build(ow.neg(ow.linear(x, w["a"])))
        held = len(weight_buffers(device))
        assert held > before
        first.close()
        assert len(weight_buffers(device)) == held
        near(second.run(x=v), -v @ array(40, 60).T)
        second.close()
        assert len(weight_buffers(device)) == before
        near(scheduler.build(ow.neg(w["b"])).run(), -array(40))
    assert len(weight_buffers(device)) == before
    near(ow.read(w["a"]), array(40, 60))


def test_placed_weights_stay(device):
    w = ow.weights({"a": array(4, 6)}, device=device)
    held = len(weight_buffers(device))
    with ow.Scheduler([device]) as scheduler:
        scheduler.build(ow.neg(w["a"])).run()
    assert len(weight_buffers(device)) == held


@pytest.mark.parametrize("placed", [True, False])
def test_weights_are_evicted_from_a_device(device, placed):
    before = len(weight_buffers(device))
    w = ow.weights({"a": array(4, 6), "b": array(4)}, device=device if placed else None)
    x, v = ow.input("x", (3, 6)), array(3, 6, seed=1)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        output = ow.linear(x, w["a"]) + w["b"]
        program = scheduler.build(output)
        near(program.run(x=v), v @ array(4, 6).T + array(4))
        w.evict(device)
        assert len(weight_buffers(device)) == before
        assert not w.buffers
        near(ow.read(w["a"]), array(4, 6))
        with pytest.raises(ow.LifetimeError, match="given up"):
            program.run(x=v)
        assert not program.is_current
        again = scheduler.build(output)
        assert again is not program
        near(again.run(x=v), v @ array(4, 6).T + array(4))
        w.write({"b": array(4, seed=3)})
        near(again.run(x=v), v @ array(4, 6).T + array(4, seed=3))


def test_evicting_leaves_other_devices_alone():
    first, second = make("cpu"), make("torch")
    w = ow.weights({"a": array(4, 6)}, device=first)
    with ow.Scheduler([second]) as scheduler:
        program = scheduler.build(ow.neg(w["a"]))
        w.evict(second)
        w.evict("host")
        assert w["a"].placement.buffer.device is first
        near(scheduler.build(ow.neg(w["a"])).run(), -array(4, 6))
        assert program is not None
    with pytest.raises(ow.UnknownNameError):
        w.evict("cpux")


@pytest.mark.parametrize(("name", "dtype"), [("cpu", "q4_0"), ("torch", "f32"), ("torch", "q8_0")])
def test_forms_that_kernels_are_faster_with_are_made_again(name, dtype):
    """Decoded weights of ``cpu``, packed ones of ``torch:cpu``: chosen by the scheduler, and asked for."""
    if name == "cpu":
        from opweave_cpu import CpuDevice as Device
    else:
        pytest.importorskip("torch")
        from opweave_torch.device import TorchCpuDevice as Device
    device = Device()
    kind = next(kind for kind in device.buffer_types if kind.name.endswith((".decoded", ".packed")))

    def made(seed):
        return array(512, 512, seed=seed) if dtype == "f32" else ow.quantize(array(512, 512, seed=seed), dtype)

    def plain(seed):
        return made(seed) if dtype == "f32" else ow.dequantize(made(seed))

    x, v = ow.input("x", (4, 512)), array(4, 512, seed=1)
    for options in ({}, {"buffer_type": kind}):
        w = ow.weights({"a": made(0)}, **options)
        with ow.Scheduler([device, HostDevice()]) as scheduler:
            program = scheduler.build(ow.linear(x, w["a"]))
            used = {region.buffer.type for region in program.memory_map().places.values()}
            assert not options or kind in used
            for seed in (0, 2):
                if seed:
                    w.write({"a": made(seed)})
                np.testing.assert_allclose(program.run(x=v), v @ plain(seed).T, rtol=1e-3, atol=1e-2)
