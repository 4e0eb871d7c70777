"""Weights and states: placement, ownership, reading, writing, and states that were left half written."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave.contract import Buffer, MultiBuffer, Usage
from opweave.errors import (
    AllocationError,
    BoundsError,
    DTypeError,
    ExecutionError,
    LayoutError,
    LifetimeError,
    SchedulerError,
    ShapeError,
    UnknownNameError,
    UnsupportedOpError,
)
from opweave.graph.leaf import Spec
from opweave.graph.tensor import constant, input
from opweave.leaf_memory import place, read_leaf, upload, write_state
from opweave.leaves import Blocks, state, weights
from opweave.runtime.host.device import HostDevice
from tests.support.async_device import AsyncDevice
from tests.support.example_backend import ExampleDevice


class Small(ExampleDevice):
    """At most 256 bytes in one buffer, 600 in all."""

    max_buffer_size = 256

    def __init__(self, room: int = 600) -> None:
        self.room, self.taken = room, 0

    def _alloc(self, size, usage):
        if self.taken + size > self.room:
            raise MemoryError("full")
        self.taken += size
        return super()._alloc(size, usage)

    def _free(self, mem):
        self.taken -= len(mem.data)


def arrays(**shapes):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


MODEL = {f"layers.{i}.{part}": (4, 8) for i in range(3) for part in ("up", "down")} | {"head": (2, 8)}


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_are_a_mapping():
    data = arrays(a=(2, 3), b=(4,))
    group = weights(data)
    assert list(group) == ["a", "b"]
    assert len(group) == 2
    assert "a" in group
    assert "c" not in group
    assert group.get("c") is None
    assert dict(group.items())["b"].shape == (4,)
    assert group.nbytes == 6 * 4 + 4 * 4
    assert repr(group) == "<Weights: 2 tensors, 40 bytes>"
    with pytest.raises(KeyError):
        group["layer"]
    with pytest.raises(UnknownNameError, match=r"did you mean 'a' or 'b'|there are: a, b"):
        group["c"]


def test_unplaced_weights_are_used_as_they_lie():
    data = arrays(a=(2, 3))
    w = weights(data)["a"]
    assert np.shares_memory(w.leaf.data, data["a"])
    assert w.leaf.placement is None
    np.testing.assert_array_equal(read_leaf(w), data["a"])


def test_weights_are_placed_by_glob():
    """The first pattern that matches wins; what none matches stays unplaced."""
    data = arrays(**MODEL)
    first, last = ExampleDevice(), ExampleDevice()
    group = weights(data, {"layers.2.*": last, "layers.*": first, "h*": None})
    where = {name: t.leaf.placement.buffer.device if t.leaf.placement else None for name, t in group.items()}
    assert where == {name: last if ".2." in name else first if "layers" in name else None for name in MODEL}
    assert len(group.buffers) == 2
    assert all(b.usage is Usage.WEIGHTS for b in group.buffers)
    for name, tensor in group.items():
        np.testing.assert_array_equal(read_leaf(tensor), data[name])


def test_a_device_for_all():
    data, device = arrays(**MODEL), ExampleDevice()
    group = weights(data, device)
    (buffer,) = group.buffers
    assert {id(t.leaf.placement.buffer) for t in group.values()} == {id(b) for b in buffer.buffers}
    assert all(t.leaf.device == "exampledevice" for t in group.values())
    for t in group.values():
        assert t.leaf.placement.offset % device.alignment == 0


def test_names_of_devices_are_looked_up():
    data = arrays(a=(2, 3))
    assert weights(data, "host")["a"].leaf.placement.buffer.is_host
    with pytest.raises(UnknownNameError, match="no device"):
        weights(data, "hots")
    with pytest.raises(UnknownNameError):
        weights(data, {"*": "hots"})
    with pytest.raises(SchedulerError, match="a device or its name"):
        weights(data, 3)


def test_a_pattern_that_matches_nothing_is_an_error_before_anything_is_placed():
    device = Small()
    with pytest.raises(UnknownNameError, match=r"layer\.\*"):
        weights(arrays(**MODEL), {"head": device, "layer.*": device})
    assert device.taken == 0
    # One that another pattern came before is not.
    weights(arrays(**MODEL), {"*": None, "head": device})


def test_weights_are_chunked_where_a_device_has_a_largest_buffer():
    device = Small(room=2000)
    data = arrays(**MODEL)
    group = weights(data, device)
    (whole,) = group.buffers
    assert isinstance(whole, MultiBuffer)
    assert len(whole.buffers) == 4
    for name, tensor in group.items():
        np.testing.assert_array_equal(read_leaf(tensor), data[name])


def test_a_device_without_room_keeps_nothing():
    roomy, small = Small(room=10_000), Small(room=300)
    with pytest.raises(AllocationError, match="full"):
        weights(arrays(**MODEL), {"head": roomy, "layers.*": small})
    assert (roomy.taken, small.taken) == (0, 0)
    with pytest.raises(AllocationError, match="one buffer has at most 256"):
        weights(arrays(a=(65,)), roomy)
    assert roomy.taken == 0


def test_a_failing_upload_keeps_nothing():
    class Failing(Small):
        def _upload(self, mem, offset, data):
            raise ExecutionError("the bus is gone")

    device = Failing(2000)
    with pytest.raises(ExecutionError):
        weights(arrays(**MODEL), device)
    with pytest.raises(ExecutionError):
        state("s", (4,), device=device, fill=1)
    assert device.taken == 0


def test_weights_in_host_memory_are_not_copied():
    data = arrays(a=(2, 3), empty=(0, 3))
    group = weights(data, HostDevice())
    placement = group["a"].leaf.placement
    assert isinstance(placement.buffer, Buffer)
    assert placement.buffer.address == data["a"].__array_interface__["data"][0]
    assert read_leaf(group["empty"]).shape == (0, 3)


def test_what_a_device_cannot_use_in_place_is_copied():
    class Picky(HostDevice):
        max_buffer_size = 1024

        def _import_host(self, data):
            if len(data) == 24:
                raise UnsupportedOpError("badly aligned")
            return super()._import_host(data)

    data = arrays(fine=(4, 4), odd=(2, 3))
    group = weights(data, Picky())
    own = {n: t.leaf.placement.buffer.address == data[n].__array_interface__["data"][0] for n, t in group.items()}
    assert own == {"fine": True, "odd": False}
    for name, tensor in group.items():
        np.testing.assert_array_equal(read_leaf(tensor), data[name])


def test_weights_live_as_long_as_someone_uses_them():
    device = Small(2000)
    group = weights(arrays(**MODEL), device)
    one = group["head"]
    alive = weakref.ref(group)
    del group
    gc.collect()
    assert alive() is None
    assert read_leaf(one).shape == (2, 8)
    del one
    gc.collect()
    assert device.taken == 0


def test_freed_weights_are_refused():
    group = weights(arrays(a=(4, 4)), ExampleDevice())
    group.buffers[0].free()
    with pytest.raises(LifetimeError, match="freed"):
        read_leaf(group["a"])


def test_quantized_weights():
    blocks = np.random.default_rng(0).integers(0, 256, (4, 36), np.uint8)
    for device in (None, ExampleDevice(), HostDevice()):
        w = weights({"w": Blocks(blocks, (4, 64), "q4_0")}, device)["w"]
        assert (w.shape, w.dtype.name, w.nbytes) == ((4, 64), "q4_0", 144)
        np.testing.assert_array_equal(read_leaf(w), blocks)
        np.testing.assert_array_equal(read_leaf(w[1:3]), blocks[1:3])
    for bad, error in (
        (Blocks(blocks[:3], (4, 64), "q4_0"), ShapeError),
        (Blocks(blocks.view(np.int8), (4, 64), "q4_0"), ShapeError),
        (Blocks(blocks, (4, 65), "q4_0"), LayoutError),
        (Blocks(blocks, (4, 64), "q4"), UnknownNameError),
    ):
        with pytest.raises(error):
            weights({"w": bad})


def test_types_of_weights():
    group = weights({"half": np.ones(4, ml_dtypes.bfloat16), "list": [1.0, 2.0], "number": 3})
    assert [t.dtype.name for t in group.values()] == ["bf16", "f32", "i64"]
    for bad in (np.ones(3, np.complex64), np.ones(3, "datetime64[s]"), "text", None, constant([1.0]) + 1):
        with pytest.raises(DTypeError):
            weights({"w": bad})


def test_weights_without_bytes_are_only_planned_with():
    w = weights({"w": Spec((4, 8))})["w"]
    assert w.nbytes == 128
    for attempt in (lambda: weights({"w": Spec((4, 8))}, ExampleDevice()), lambda: read_leaf(w)):
        with pytest.raises(SchedulerError, match="no bytes"):
            attempt()


def test_copies_for_a_device_are_kept_on_the_leaf():
    device, data = ExampleDevice(), arrays(a=(4, 4))
    w = weights(data)["a"]
    upload([w], device, copies=True)
    assert w.leaf.placement is None
    assert w.leaf.copies[device.space].buffer.device is device


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, HostDevice(), ExampleDevice(), AsyncDevice()], ids=repr)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32", "u8", "bool"])
def test_states_are_read_and_written(device, dtype):
    s = state("s", (2, 3), dtype, device=device, fill=1)
    assert (s.shape, s.dtype.name, s.leaf.kind) == ((2, 3), dtype, "state")
    np.testing.assert_array_equal(read_leaf(s), np.ones((2, 3), s.dtype.numpy))
    values = np.array([[0, 1, 0], [1, 1, 0]]).astype(s.dtype.numpy)
    write_state(s, values)
    got = read_leaf(s)
    assert got.dtype == s.dtype.numpy
    np.testing.assert_array_equal(got, values)
    got[:] = 0
    np.testing.assert_array_equal(read_leaf(s), values)
    np.testing.assert_array_equal(read_leaf(s[1:, ::2]), values[1:, ::2])
    np.testing.assert_array_equal(read_leaf(s.T), values.T)
    assert read_leaf(s[:0]).shape == (0, 3)


def test_states_begin_with_their_fill():
    assert not read_leaf(state("z", 4, device=ExampleDevice())).any()
    assert (read_leaf(state("f", 4, fill=-2.5, device=ExampleDevice())) == -2.5).all()
    assert np.isinf(read_leaf(state("i", 4, fill=-np.inf))).all()
    assert read_leaf(state("n", (0, 4), device=ExampleDevice())).shape == (0, 4)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("i32", 0.5), ("u8", -1), ("u8", 256), ("i8", 200), ("bool", 2), ("i32", float("nan")), ("f32", "x")],
)
def test_a_fill_that_the_dtype_does_not_hold(dtype, fill):
    with pytest.raises(DTypeError, match="the fill of state 's': "):
        state("s", 4, dtype, fill=fill)
    assert read_leaf(state("s", 2, "i32", fill=3.0)).tolist() == [3, 3]


def test_bad_states():
    with pytest.raises(DTypeError, match="blocks of q4_0 are filled with 0, not 1"):
        state("s", (2, 32), "q4_0", fill=1)
    with pytest.raises(LayoutError, match="multiple of its block of 32"):
        state("s", (2, 33), "q4_0")
    with pytest.raises(ShapeError):
        state("s", (2, -1))
    with pytest.raises(UnknownNameError):
        state("s", 4, device="hots")
    with pytest.raises(AllocationError):
        state("s", 100, device=Small())


def test_values_that_do_not_fit_a_state():
    s, i = state("s", (2, 2)), state("i", 2, "i32")
    for tensor, values, error in (
        (s, np.zeros((2, 3)), ShapeError),
        (s, np.zeros(4), ShapeError),
        (s, "text", DTypeError),
        (s, np.zeros((2, 2), complex), DTypeError),
        (i, [0.5, 1], DTypeError),
        (i, np.float32([1, 2]), DTypeError),
        (i, [1 << 40, 0], DTypeError),
        (state("b", 1, "u8"), [-1], DTypeError),
        (input("x", 4), [0] * 4, SchedulerError),
        (constant([1.0]), [0], SchedulerError),
        (s[0], [0, 0, 0], ShapeError),
    ):
        with pytest.raises(error):
            write_state(tensor, values)
    assert not read_leaf(s).any()
    write_state(s, np.ones((2, 2)))
    write_state(i, [1, 2])
    write_state(state("h", 1, "bf16"), [0.1])
    assert read_leaf(s).dtype == np.float32


def test_what_has_no_values_outside_of_a_run():
    x = input("x", 4)
    for tensor in (x, x + 1, (x + 1)[1:]):
        with pytest.raises(SchedulerError, match="no values outside of a run"):
            read_leaf(tensor)
    assert read_leaf(constant([1.0, 2.0])[1:]).tolist() == [2.0]


def test_a_half_written_state_refuses_to_be_read_until_it_is_written():
    s = state("cache", 4, device=ExampleDevice())
    s.leaf.damaged = "state 'cache' may be half written"
    with pytest.raises(ExecutionError, match="half written") as caught:
        read_leaf(s)
    assert caught.value.states == ("cache",)
    with pytest.raises(ExecutionError):
        read_leaf(s[1:])
    with pytest.raises(ShapeError):
        write_state(s, [1, 2])
    with pytest.raises(ExecutionError):
        read_leaf(s)
    write_state(s, [1, 2, 3, 4])
    assert read_leaf(s).tolist() == [1, 2, 3, 4]


def test_reading_waits_for_queued_work():
    device = AsyncDevice()
    s = state("s", 16, device=device)
    with device.open(delay=0.02) as stream:
        stream.upload(s.leaf.placement.buffer, 0, np.ones(16, np.float32))
        assert (read_leaf(s) == 1).all()


def test_an_unplaced_state_keeps_what_was_written_when_it_is_placed():
    s = state("s", 4, fill=3)
    write_state(s, [1, 2, 3, 4])
    with ow.Scheduler(ExampleDevice()) as scheduler:
        x = input("x", 4)
        np.testing.assert_array_equal(scheduler.build(x + s).run(x=np.ones(4, "f4")), [2, 3, 4, 5])
        assert s.leaf.placement is not None
        assert read_leaf(s).tolist() == [1, 2, 3, 4]


# --- placed by the caller ---------------------------------------------------------------------------------------------


def test_leaves_are_placed_by_hand_over_bytes_that_are_there():
    device = ExampleDevice()
    buffer = device.alloc(128)
    buffer.upload(64, np.float32([1, 2, 3, 4]))
    s = state("s", 4)
    made = place(s, buffer, 64)
    assert (made.buffer, made.offset) == (buffer, 64)
    assert read_leaf(s).tolist() == [1, 2, 3, 4]
    for attempt, error in (
        (lambda: place(s, buffer, 0), SchedulerError),
        (lambda: place(input("x", 4), buffer), SchedulerError),
        (lambda: place(state("v", 4)[1:], buffer), SchedulerError),
        (lambda: place(state("m", 4), buffer, 4), BoundsError),
        (lambda: place(state("l", 40), buffer), BoundsError),
    ):
        with pytest.raises(error):
            attempt()
    buffer.free()
    with pytest.raises(LifetimeError):
        place(state("n", 4), buffer)


def test_weights_are_converted_on_loading():
    w = ow.weights({"w": np.ones((4, 4), np.float32), "ids": np.arange(3)}, dtype="bf16")
    assert {name: t.dtype.name for name, t in w.items()} == {"w": "bf16", "ids": "i64"}
    with pytest.raises(ow.DTypeError, match="dtype is a float type"):
        ow.weights({"w": np.ones((4, 4), np.float32)}, dtype="i8")
