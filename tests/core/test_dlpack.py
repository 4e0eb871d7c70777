"""Arrays of other libraries as leaves, and leaves with memory as arrays of other libraries, by DLPack."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave.errors import DTypeError, LifetimeError, Unavailable, UnsupportedOpError
from opweave.graph.dtypes import as_dtype
from tests.support.example_backend import ExampleDevice

F32 = as_dtype("f32")


def data(tensor: ow.Tensor) -> Any:
    """What the leaf uses."""
    assert tensor.leaf is not None
    return tensor.leaf.data


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


# --- in -------------------------------------------------------------------------------------------------------------


def test_an_array_comes_without_a_copy_and_stays_writable_for_its_owner():
    array = np.arange(4, dtype=np.float32)
    tensor = ow.from_dlpack(array, name="mine")
    assert (tensor.shape, tensor.dtype, tensor.name) == ((4,), F32, "mine")
    assert address(data(tensor)) == address(array)
    assert not data(tensor).flags.writeable
    assert array.flags.writeable


def test_a_program_computes_with_it():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = ow.input("x", (2, 3))
    with ow.Scheduler("host") as scheduler:
        got = scheduler.build(x + ow.from_dlpack(array)).run(x=array)
    np.testing.assert_array_equal(got, 2 * array)


def test_an_array_that_is_not_dense_is_packed():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    tensor = ow.from_dlpack(array)
    np.testing.assert_array_equal(ow.read(tensor), array)


@pytest.mark.parametrize("nonsense", [[1, 2], None, "text", 3.0])
def test_what_does_not_speak_dlpack_is_refused(nonsense: object):
    with pytest.raises(DTypeError, match="cannot take"):
        ow.from_dlpack(nonsense)


def test_a_dtype_that_opweave_does_not_have_is_refused():
    with pytest.raises(DTypeError, match="complex64"):
        ow.from_dlpack(np.zeros(2, np.complex64))


TORCH_NAMES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "u8": "uint8", "bool": "bool",
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_every_dtype_of_torch(name: str):
    torch = pytest.importorskip("torch")
    dtype = as_dtype(name)
    theirs = torch.arange(6).reshape(2, 3).to(getattr(torch, TORCH_NAMES[name]))
    tensor = ow.from_dlpack(theirs)
    assert tensor.dtype is dtype
    assert address(data(tensor)) == theirs.data_ptr()
    np.testing.assert_array_equal(ow.read(tensor).astype(np.float64), np.arange(6).reshape(2, 3).astype(dtype.numpy))


@pytest.mark.parametrize("name", ["bf16", "f8_e4m3", "f16", "bool"])
def test_arrays_of_numpy_are_taken_in_dtypes_that_numpy_does_not_export(name: str):
    array = np.arange(6).reshape(2, 3).astype(as_dtype(name).numpy)
    tensor = ow.from_dlpack(array)
    assert tensor.dtype is as_dtype(name)
    assert address(data(tensor)) == array.ctypes.data
    np.testing.assert_array_equal(ow.read(tensor).astype(np.float64), array.astype(np.float64))


def test_bf16_with_strides_and_an_offset_and_without_its_owner():
    torch = pytest.importorskip("torch")
    whole = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    tensor = ow.from_dlpack(whole[1:, 1::2].T)
    del whole
    want = np.arange(24).reshape(4, 6)[1:, 1::2].T
    np.testing.assert_array_equal(ow.read(tensor).astype(np.float32), want)
    assert ow.from_dlpack(torch.zeros(0, 3, dtype=torch.bfloat16)).shape == (0, 3)


def test_jax_both_ways():
    jax = pytest.importorskip("jax")
    theirs = jax.numpy.arange(4, dtype=jax.numpy.float32)
    tensor = ow.from_dlpack(theirs)
    np.testing.assert_array_equal(ow.read(tensor), np.arange(4))
    state = ow.state("s", 4, fill=2, device="host")
    np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(state)), np.full(4, 2))


class Elsewhere:
    """An array on the third device of a type that no backend has."""

    def __init__(self, array: np.ndarray[Any, Any], device: tuple[int, int] = (12, 2)) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **params: object) -> object:
        raise BufferError("only its device knows how")


def test_an_array_on_a_device_that_nobody_shows():
    with pytest.raises(Unavailable, match=r"(?s)DLPack device 12, 2.*remedy"):
        ow.from_dlpack(Elsewhere(np.zeros(3, np.float32)))


class TakesArrays(ExampleDevice):
    """A device with memory of its own that uses arrays where they lie."""

    dlpack_device = (12, 2)

    def _import_dlpack(self, array: Elsewhere):
        handle = self._alloc(array.array.nbytes, ow.Usage.ANY)
        self._upload(handle, 0, array.array.data.cast("B"))
        return handle, as_dtype(array.array.dtype), array.array.shape


def test_an_array_on_a_device_becomes_a_weight_there(monkeypatch: pytest.MonkeyPatch):
    device = TakesArrays()
    monkeypatch.setattr("opweave.registry.devices", lambda: (device,))
    values = np.arange(3, dtype=np.float32)
    tensor = ow.from_dlpack(Elsewhere(values))
    leaf: Any = tensor.leaf
    assert leaf.placement.buffer.device is device
    assert leaf.placement.buffer.readonly
    np.testing.assert_array_equal(ow.read(tensor), values)
    x = ow.input("x", (3,))
    with ow.Scheduler([device, ow.device("host")]) as scheduler:
        program = scheduler.build(x * tensor)
        np.testing.assert_array_equal(program.run(x=values), values * values)
        assert program.splits[0].target.device is device


def test_a_device_that_takes_no_arrays_says_so(monkeypatch: pytest.MonkeyPatch):
    device = ExampleDevice()
    monkeypatch.setattr(device, "dlpack_device", (12, 2), raising=False)
    monkeypatch.setattr("opweave.registry.devices", lambda: (device,))
    with pytest.raises(UnsupportedOpError, match="does not import arrays"):
        ow.from_dlpack(Elsewhere(np.zeros(3, np.float32)))


def test_compiled_functions_are_called_with_arrays_of_other_libraries():
    torch = pytest.importorskip("torch")
    calls = []

    @ow.compile(devices="host")
    def double(x):
        calls.append(x.dtype)
        return x + x

    for dtype in (torch.float32, torch.bfloat16):
        for values in ([1, 2, 3], [4, 5, 6]):
            got = double(torch.tensor(values, dtype=dtype))
            assert got.astype(np.float32).tolist() == [2 * v for v in values]
    assert calls == [as_dtype("f32"), as_dtype("bf16")]  # traced once for each dtype
    with pytest.raises(DTypeError, match="complex64"):
        double(torch.zeros(3, dtype=torch.complex64))


# --- out ------------------------------------------------------------------------------------------------------------


def test_a_state_is_shown_where_it_lies():
    state = ow.state("cache", (2, 3), fill=1, device="host")
    shown = np.from_dlpack(state)
    np.testing.assert_array_equal(shown, np.ones((2, 3)))
    ow.write(state, np.full((2, 3), 5, np.float32))
    np.testing.assert_array_equal(shown, np.full((2, 3), 5))
    np.testing.assert_array_equal(np.from_dlpack(state[:, 1]), [5, 5])


def test_torch_sees_a_state_where_it_lies():
    torch = pytest.importorskip("torch")
    state = ow.state("cache", (2, 3), fill=1, device="host")
    shown = torch.from_dlpack(state)
    shown[1, 2] = 7
    assert ow.read(state)[1, 2] == 7


def test_a_buffer_is_shown_as_its_bytes():
    with ow.device("host").alloc(8) as buffer:
        buffer.upload(0, np.arange(8, dtype=np.uint8))
        shown = np.from_dlpack(buffer)
        np.testing.assert_array_equal(shown, np.arange(8))
        assert buffer.__dlpack_device__() == (1, 0)
    with pytest.raises(LifetimeError):
        np.from_dlpack(buffer)
    np.testing.assert_array_equal(shown, np.arange(8))  # the array has kept the memory


def test_results_are_arrays_that_speak_it():
    torch = pytest.importorskip("torch")
    x = ow.input("x", (3,))
    with ow.Scheduler("host") as scheduler:
        got = scheduler.build(x + x).run(x=np.ones(3, np.float32))
    assert torch.from_dlpack(got).tolist() == [2, 2, 2]


def test_what_cannot_be_shown_says_why():
    x = ow.input("x", (3,))
    for tensor in (x, x + x, ow.state("s", 3)):
        with pytest.raises(BufferError, match="no memory of its own"):
            np.from_dlpack(tensor)
    far = ow.state("far", 3, device=ExampleDevice())
    with pytest.raises(BufferError, match="does not export its memory"):
        np.from_dlpack(far)
    rows = ow.weights({"w": ow.Blocks(np.zeros(34, np.uint8), (32,), "q8_0")}, device="host")["w"]
    with pytest.raises(BufferError, match="no q8_0"):
        np.from_dlpack(rows)
    halves = ow.state("halves", 3, "bf16", device="host")
    assert ow.read(halves).dtype == ml_dtypes.bfloat16
    with pytest.raises(BufferError):
        np.from_dlpack(halves)
