"""Operands as tensors over their own bytes, memory that is shared, and memory that is not."""

from __future__ import annotations

import mmap
import tempfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import opweave as ow
from opweave.contract import Arg, Usage
from opweave.errors import AllocationError, DTypeError, HazardError, UnsupportedOpError
from opweave.graph.dtypes import DTYPES, as_dtype
from opweave.graph.layout import dense_strides, nbytes
from opweave.runtime.host.reservations import RESERVATIONS
from opweave_torch.accelerator import SeparateCpuDevice, TorchAccelerator
from opweave_torch.memory import TORCH_DTYPES, dense_bytes, one_tensor_a_window, tensor

F32 = as_dtype("f32")


# --- operands as tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_an_operand_is_a_tensor_over_its_own_bytes(device, dtype):
    buffer = device.alloc(1024)
    arg = Arg(buffer, 64, dtype, (2, 3), (3 * dtype.itemsize, dtype.itemsize))
    values = np.arange(6).reshape(2, 3).astype(dtype.numpy)
    np.copyto(arg.view, values)
    got = tensor(arg)
    assert got.data_ptr() == arg.address
    assert got.dtype is TORCH_DTYPES[dtype]
    np.testing.assert_array_equal(got.to(torch.float64).numpy(), values.astype(np.float64))


def test_strides_offsets_and_repeated_elements(device):
    buffer = device.alloc(256)
    buffer.upload(0, np.arange(64, dtype=np.float32))
    for offset, shape, strides in (
        (4, (3, 2), (8, 24)),  # transposed
        (12, (4, 3), (0, 4)),  # one row, repeated
        (0, (), ()),
        (20, (2, 1, 5), (64, 999_999, 8)),  # the stride of an axis of one element is not used
    ):
        arg = Arg(buffer, offset, F32, shape, tuple(s if n > 1 else 4 for n, s in zip(shape, strides, strict=True)))
        np.testing.assert_array_equal(tensor(arg).numpy(), arg.view)


def test_quantized_operands_are_blocks_of_bytes(device):
    for dtype in (t for t in DTYPES.values() if t.is_quantized):
        shape = (3, 2 * dtype.block)
        buffer = device.alloc(nbytes(shape, dtype))
        raw = np.arange(buffer.size, dtype=np.uint8)
        buffer.upload(0, raw)
        got = tensor(Arg(buffer, 0, dtype, shape, dense_strides(shape, dtype)))
        assert got.dtype is torch.uint8
        assert got.shape == (3, 2, dtype.itemsize)
        np.testing.assert_array_equal(got.numpy().reshape(-1), raw)


def test_read_only_memory_becomes_a_tensor_without_a_warning_or_a_copy(device):
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    buffer = device.import_host(array)
    got = tensor(Arg(buffer, 0, F32, (4,), (4,)))
    assert got.data_ptr() == array.__array_interface__["data"][0]
    del array, buffer
    assert got.tolist() == [0, 1, 2, 3]  # the tensor has kept the memory


def test_memory_of_another_backend_of_the_process(device):
    with ow.device("host").alloc(64) as buffer:
        arg = Arg(buffer, 16, F32, (3,), (4,))
        tensor(arg).fill_(5)
        np.testing.assert_array_equal(arg.view, [5, 5, 5])


def test_values_in_one_window_are_one_tensor_while_a_plan_is_compiled(device):
    buffer = device.alloc(64)
    one, same, other = (Arg(buffer, offset, F32, (4,), (4,)) for offset in (0, 0, 16))
    with one_tensor_a_window():
        assert tensor(one) is tensor(same)
        assert tensor(one) is not tensor(other)
    assert tensor(one) is not tensor(same)


# --- shared memory --------------------------------------------------------------------------------------------------


def test_nothing_is_copied_between_cpu_and_torch_cpu(device):
    cpu = pytest.importorskip("opweave_cpu").CpuDevice()
    x, w = ow.input("x", (4, 4)), ow.weights({"w": np.eye(4, dtype=np.float32)})["w"]
    a = ow.relu(x + w).named("a")
    b = (a @ w).named("b")
    c = (b - a).named("c")
    with ow.Scheduler([device, cpu]) as scheduler:
        program = scheduler.build([a, b, c], pins={a.srcs[0]: cpu, a: device, b: cpu, c: device})
        assert [split.target.device for split in program.splits] == [cpu, device, cpu, device]
        assert program.n_copies == 0
        # Both use the same bytes of one buffer.
        for split, following in zip(program.splits, program.splits[1:], strict=False):
            made = {item.out.storage for item in split.steps}
            assert made & {source.storage for item in following.steps for source in item.srcs}
        fed = np.arange(16, dtype=np.float32).reshape(4, 4)
        got = program.run(x=fed)
        np.testing.assert_array_equal(got[0], fed + np.eye(4))
        np.testing.assert_array_equal(got[2], np.zeros((4, 4)))


def test_weights_and_mappings_are_used_where_they_lie(device):
    array = np.arange(1024, dtype=np.float32)
    with device.import_host(array) as buffer:
        assert buffer.address == array.__array_interface__["data"][0]
        tensor(Arg(buffer, 0, F32, (2,), (4,))).fill_(9)
    assert array[:3].tolist() == [9, 9, 2]
    with tempfile.TemporaryFile() as file:
        file.write(array.tobytes())
        file.flush()
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
            device.import_host(mapping) as buffer,
        ):
            assert tensor(Arg(buffer, 4, F32, (2,), (4,))).tolist() == [9, 2]
            with pytest.raises(HazardError):
                buffer.upload(0, array[:1])


# --- memory of its own ----------------------------------------------------------------------------------------------


def test_bytes_go_there_and_back(separate):
    with separate.alloc(100) as buffer:
        assert isinstance(buffer.handle, torch.Tensor)
        assert buffer.address == buffer.handle.data_ptr()
        buffer.clear(7)
        buffer.upload(10, np.arange(5, dtype=np.uint8))
        assert buffer.read(9, 7).tolist() == [7, 0, 1, 2, 3, 4, 7]
        separate._copy(buffer.handle, 11, buffer.handle, 10, 5)  # ranges that overlap
        assert buffer.read(10, 6).tolist() == [0, 0, 1, 2, 3, 4]
        got = tensor(Arg(buffer, 64, F32, (2, 2), (4, 8)))
        assert got.data_ptr() == buffer.address + 64
        assert got.stride() == (1, 2)


def test_too_much_is_refused_by_a_typed_error(separate, device):
    for where in (separate, device):
        with pytest.raises(AllocationError) as caught:
            where.alloc(1 << 50)
        assert caught.value.requested == 1 << 50


def test_out_of_memory_of_torch_is_a_memory_error(monkeypatch, separate):
    def refuse(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nand much advice")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(AllocationError, match="CUDA out of memory"):
        separate.alloc(64)

    def break_down(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the driver is in a bad mood")

    monkeypatch.setattr(torch, "empty", break_down)
    with pytest.raises(RuntimeError, match="bad mood"):
        separate.alloc(64)


def test_its_memory_is_shown_to_other_libraries(separate):
    state = ow.state("s", (2, 3), fill=2, device=separate)
    shown = torch.from_dlpack(state)
    assert shown.tolist() == [[2, 2, 2], [2, 2, 2]]
    shown[1, 1] = 5
    assert ow.read(state)[1, 1] == 5
    halves = ow.state("h", 3, "bf16", fill=1, device=separate)
    assert torch.from_dlpack(halves).dtype is torch.bfloat16


def test_arrays_in_its_memory_become_weights_there(monkeypatch):
    class Card(SeparateCpuDevice):
        dlpack_device = (2, 0)

    class OnCard:
        """An array whose DLPack device is the first card of CUDA."""

        def __init__(self, array: torch.Tensor) -> None:
            self.array = array

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    card = Card()
    card.dlpack_device = (2, 0)
    monkeypatch.setattr("opweave.registry.devices", lambda: (card,))
    monkeypatch.setattr(torch, "from_dlpack", lambda given: given.array)
    theirs = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    w = ow.from_dlpack(OnCard(theirs))
    leaf: Any = w.leaf
    placed = leaf.placement.buffer
    assert placed.device is card
    assert placed.address == theirs.data_ptr()
    assert placed.usage is Usage.WEIGHTS
    np.testing.assert_array_equal(ow.read(w), theirs.float().numpy().astype(ml_dtypes.bfloat16))
    with pytest.raises(UnsupportedOpError, match="contiguous"):
        ow.from_dlpack(OnCard(theirs.T))
    with pytest.raises(DTypeError, match="complex64"):
        ow.from_dlpack(OnCard(torch.zeros(2, dtype=torch.complex64)))


def test_what_lies_in_a_dense_tensor():
    raw, dtype, shape = dense_bytes(torch.ones(2, 3, dtype=torch.int16, requires_grad=False))
    assert (raw.dtype, raw.shape, dtype.name, shape) == (torch.uint8, (12,), "i16", (2, 3))


def test_an_accelerator_of_an_unknown_type_reports_no_memory():
    assert TorchAccelerator(torch.device("cpu")).mem_info() == (0, 0)


def test_memory_that_nobody_has_used_yet_is_promised_once(separate: SeparateCpuDevice) -> None:
    """Systems promise more than there is, and end the process that uses it."""
    before = RESERVATIONS.reserved
    size = separate.mem_info()[0] * 2 // 3
    with separate.alloc(size) as held:
        assert RESERVATIONS.reserved == before + size
        with pytest.raises(AllocationError, match="more than the machine has left"):
            separate.alloc(size)
        assert held.size == size
    assert RESERVATIONS.reserved == before
