"""Special memory: support depends on the kind of memory of each source, and kernels get the handle that it prepared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, BufferType, Step, Stream, Usage
from opweave.contract.kernels import KernelTable
from opweave.contract.memory import as_bytes
from opweave.graph.dtypes import f32
from opweave.graph.tensor import Tensor
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.memory import HostMemory
from tests.support.async_device import AsyncDevice
from tests.support.devices import Plain, Separate, reference_kernel

F = np.float32


class Transposed(BufferType):
    """Keeps matrices transposed, and remembers their shape as the handle of the tensor."""

    @property
    def is_raw(self) -> bool:
        return False

    def _init(self, mem: Any, offset: int, tensor: Tensor) -> Any:
        return tensor.shape

    def _upload(self, mem: Any, offset: int, data: memoryview) -> None:
        matrix = np.frombuffer(data, F).reshape(4, 4)
        super()._upload(mem, offset, as_bytes(np.ascontiguousarray(matrix.T)))

    def _download(self, mem: Any, offset: int, out: memoryview) -> None:
        raw = np.empty((4, 4), F)
        super()._download(mem, offset, as_bytes(raw, writable=True))
        out[:] = as_bytes(np.ascontiguousarray(raw.T))


def is_transposed(step: Step) -> str | None:
    return None if isinstance(step.srcs[1].buffer_type, Transposed) else "the weight is not transposed"


def is_ordinary(step: Step) -> str | None:
    return "the weight is transposed" if isinstance(step.srcs[1].buffer_type, Transposed) else None


class Repacking(Separate):
    """Multiplies transposed weights with one kernel, ordinary ones with another."""

    def __init__(self, name: str, *, ordinary: bool = True) -> None:
        super().__init__(name)
        self.seen: list[str] = []
        self.kernels = KernelTable("f32", "strided")

        @self.kernels("linear", when=is_transposed, accepts=Transposed)
        def transposed(stream, op, out, x, w):
            assert w.handle == (4, 4)
            self.seen.append("transposed")
            return lambda: np.copyto(out.view, x.view @ w.view)

        if ordinary:

            @self.kernels("linear", when=is_ordinary)
            def plain(stream, op, out, x, w):
                self.seen.append("ordinary")
                return reference_kernel(stream, op, out, x, w)


def weight_in(kind: BufferType, values: np.ndarray) -> Tensor:
    w = ow.weights({"w": ow.Spec((4, 4))})["w"]
    buffer = kind.alloc(64)
    ow.place(w, buffer)
    buffer.upload(0, values)
    return w


@pytest.fixture
def values() -> np.ndarray:
    return np.arange(16, dtype=F).reshape(4, 4)


def test_each_kind_of_memory_gets_its_kernel(values):
    device = Repacking("g")
    x = ow.input("x", (2, 4))
    special = weight_in(Transposed(device, "g.transposed"), values)
    usual = ow.weights({"w": values}, device=device)["w"]
    s = ow.Scheduler([device, HostDevice()])
    v = np.ones((2, 4), F)
    np.testing.assert_array_equal(s.build(ow.linear(x, special)).run(x=v), v @ values.T)
    np.testing.assert_array_equal(s.build(ow.linear(x, usual)).run(x=v), v @ values.T)
    assert device.seen == ["transposed", "ordinary"]
    np.testing.assert_array_equal(ow.read(special), values)


def test_a_device_that_takes_only_repacked_weights_refuses_ordinary_ones(values):
    device = Repacking("g", ordinary=False)
    x = ow.input("x", (2, 4))
    special = weight_in(Transposed(device, "g.transposed"), values)
    s = ow.Scheduler([device, HostDevice()])
    assert s.partition(ow.linear(x, special)).device_of(ow.linear(x, special)) is device
    usual = ow.linear(x, ow.weights({"w": values})["w"])
    plan = s.partition(usual)
    assert plan.device_of(usual) is not device
    assert "not on g: the weight is not transposed" in plan.explain()


def test_special_memory_is_unpacked_for_a_device_that_cannot_reach_it(values):
    device, other = Repacking("g"), Repacking("h")
    x = ow.input("x", (2, 4))
    y = ow.linear(x, weight_in(Transposed(device, "g.transposed"), values))
    program = ow.Scheduler([other, device]).build(y, {y: other})
    v = np.ones((2, 4), F)
    np.testing.assert_array_equal(program.run(x=v), v @ values.T)
    assert other.seen == ["ordinary"]


# --- shared spaces: others reach the bytes, and must not read them unconverted ----------------------------------------


class Negated(BufferType):
    """Keeps f32 tensors of any shape negated. Of the host's memory: every device of the process reaches it."""

    def __init__(self, device: Any, name: str = "negated", **params: Any) -> None:
        super().__init__(device, name, **params)
        self.prepared: list[tuple[int, tuple[int, ...]]] = []

    def _init(self, mem: Any, offset: int, tensor: Tensor) -> Any:
        self.prepared.append((offset, tensor.shape))
        return "negated", tensor.shape

    def _upload(self, mem: Any, offset: int, data: memoryview) -> None:
        assert any(at == offset and 4 * np.prod(shape) == len(data) for at, shape in self.prepared), "no whole tensor"
        super()._upload(mem, offset, as_bytes(-np.frombuffer(data, F)))

    def _download(self, mem: Any, offset: int, out: memoryview) -> None:
        assert any(at == offset and 4 * np.prod(shape) == len(out) for at, shape in self.prepared), "no whole tensor"
        raw = np.empty(len(out) // 4, F)
        super()._download(mem, offset, as_bytes(raw, writable=True))
        out[:] = as_bytes(-raw)


class Knowing(HostMemory):
    """Shares the host's memory, and multiplies by weights that are stored negated."""

    kind = ow.Kind.ACCEL
    kernels = KernelTable("f32", "strided")

    def __init__(self, name: str = "knowing") -> None:
        self.name = name


ran: list[str] = []


def is_negated(step: Step) -> str | None:
    return None if isinstance(step.srcs[1].buffer_type, Negated) else "the weight is not negated"


@Knowing.kernels("linear", accepts=Negated, when=is_negated)
def negated_linear(stream, op, out, x, w):
    assert isinstance(w.buffer_type, Negated)
    assert w.handle == ("negated", w.shape)
    ran.append("negated")
    return lambda: np.copyto(out.view, x.view @ -w.view.T)


Knowing.kernels("add", "exp", "assign", inplace=True)(reference_kernel)


class Careless(HostMemory):
    """Supports every step, as a device that overrides `_why_not` may."""

    kind = ow.Kind.ACCEL

    def _why_not(self, step: Step) -> str | None:
        return None

    def _open(self, **params: Any) -> Any:
        return CarelessStream(self)


class CarelessStream(Stream):
    def _bind(self, group: Any) -> Any:
        step = group.steps[0]
        return reference_kernel(self, step.op, step.out, *step.srcs, **step.attrs)


Careless.stream_class = CarelessStream


def negated(kind: BufferType, values: np.ndarray, offset: int = 64, usage: ow.Usage = ow.Usage.ANY) -> Tensor:
    """A weight at an offset, so that nothing is found at the beginning by chance."""
    (w,) = ow.weights({"w": ow.Spec(values.shape)}).values()
    buffer = kind.alloc(offset + kind.alloc_size(w) + 64, usage)
    ow.place(w, buffer, offset)
    buffer.upload(offset, values)
    return w


@pytest.fixture
def x() -> Tensor:
    return ow.input("x", (2, 4))


@pytest.fixture
def v() -> np.ndarray:
    return np.arange(8, dtype=F).reshape(2, 4)


@pytest.mark.parametrize("other", [HostDevice(), Careless(), Plain()], ids=lambda d: type(d).__name__)
def test_a_device_that_shares_the_space_but_not_the_form_reads_through_a_copy(x, v, values, other):
    w = negated(Negated(Knowing()), values)
    with ow.Scheduler([other] if other.kind is ow.Kind.HOST else [other, HostDevice()]) as scheduler:
        y = ow.linear(x, w)
        program = scheduler.build([y, ow.exp(w), w])
        got = program.run(x=v)
        np.testing.assert_allclose(got[0], v @ values.T)
        np.testing.assert_allclose(got[1], np.exp(values), rtol=1e-6)
        np.testing.assert_array_equal(got[2], values)
        assert [c.cause for c in program.partition.copies] == ["unpack"]
        assert "(unpack)" in program.explain()
        np.testing.assert_array_equal(program.read(w), values)


@pytest.mark.parametrize("other", [HostDevice(), Plain()], ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("placement", ["priority", "cost"])
def test_read_only_weights_are_unpacked_once_with_the_program(x, v, values, other, placement):
    """Whole weights and parts of them; not weights in memory that may be written."""
    kind = Negated(Knowing())
    w = negated(kind, values, usage=ow.Usage.WEIGHTS)
    with ow.Scheduler([other, HostDevice()][: 1 + (other.kind is not ow.Kind.HOST)], placement=placement) as scheduler:
        program = scheduler.build([ow.linear(x, w), ow.exp(w[1:3].T), w])
        assert not program.partition.copies
        for _ in range(2):
            product, part, whole = program.run(x=v)
            np.testing.assert_allclose(product, v @ values.T)
            np.testing.assert_allclose(part, np.exp(values[1:3].T), rtol=1e-6)
            np.testing.assert_array_equal(whole, values)
        assert scheduler.stats.copied == 0
        assert sum(use.weights for use in program.memory.values()) >= values.nbytes

        # Once the memory may be written again, each run reads what is there.
        assert w.leaf is not None
        assert w.leaf.placement is not None
        buffer = w.leaf.placement.buffer
        buffer.usage = ow.Usage.ANY
        again = scheduler.build([ow.linear(x, w)])
        buffer.upload(64, 2 * values)
        np.testing.assert_allclose(again.run(x=v)[0], 2 * v @ values.T)
        assert scheduler.stats.copied == values.nbytes
        buffer.usage = ow.Usage.WEIGHTS
        np.testing.assert_allclose(scheduler.build([ow.linear(x, w)]).run(x=v)[0], 2 * v @ values.T)


def test_who_knows_the_form_is_given_it_and_others_in_the_same_program_a_copy(x, v, values):
    device = Knowing()
    w = negated(Negated(device), values)
    with ow.Scheduler([HostDevice(), device]) as scheduler:
        del ran[:]
        y = ow.linear(x, w)
        program = scheduler.build([ow.square(w), y, ow.add(w, w)])
        assert program.device_of(y) is device
        square, product, double = program.run(x=v)
        np.testing.assert_array_equal(square, values**2)
        np.testing.assert_array_equal(product, v @ values.T)
        np.testing.assert_array_equal(double, 2 * values)
        assert ran == ["negated"]


def test_weights_go_where_their_form_is_read(x, values):
    """Also where that is not the device that they were made for."""
    maker, reader = Plain(), Knowing()
    w = negated(Negated(maker), values)
    with ow.Scheduler([maker, reader, HostDevice()]) as scheduler:
        y = ow.linear(x, w)
        assert scheduler.build(y).device_of(y) is reader


@pytest.mark.parametrize(
    "part", [lambda w: w[1:3], lambda w: w.T, lambda w: w[:, 2:], lambda w: ow.reshape(w, (2, 8)), lambda w: w[3]]
)
def test_parts_are_cut_out_of_the_whole(values, part):
    device = Knowing()
    w = negated(Negated(device), values)
    expected = np.asarray(part(values)) if part(np.zeros((4, 4))).shape != (2, 8) else values.reshape(2, 8)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        got, raw = scheduler.build([ow.exp(part(w)), part(w)]).run()
    np.testing.assert_allclose(got, np.exp(expected), rtol=1e-6)
    np.testing.assert_array_equal(raw, expected)
    np.testing.assert_array_equal(ow.read(part(w)), expected)


def test_a_part_of_a_weight_is_never_given_to_a_kernel_that_accepts_the_form(x, v, values):
    device = Knowing()
    w = negated(Negated(device), values)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        del ran[:]
        got = scheduler.build(ow.linear(x, w[1:3])).run(x=v)
    np.testing.assert_array_equal(got, v @ values[1:3].T)
    assert ran == []


def test_states_may_lie_in_such_memory(v):
    device = Knowing()
    total = ow.state("total", (2, 4))
    kind = Negated(device)
    buffer = kind.alloc(128)
    ow.place(total, buffer, 64)
    buffer.clear()
    x = ow.input("x", (2, 4))
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build([ow.assign(total, total + x), ow.exp(total)])
        for n in range(1, 3):
            program.run(x=v)
            np.testing.assert_array_equal(ow.read(total), n * v)
        row = scheduler.build(ow.assign(total[1:2], ow.input("r", (1, 4))))
        row.run(r=np.full((1, 4), 9, F))
        np.testing.assert_array_equal(ow.read(total), [2 * v[0], [9] * 4])
        program.write(total, v)
        np.testing.assert_array_equal(ow.read(total), v)


def test_computed_values_may_be_placed_in_such_memory(x, v):
    device = Knowing()
    y = ow.exp(x)
    buffer = Negated(device).alloc(128)
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build([ow.add(y, y), y], placements=[ow.place(y, buffer, 64)])
        twice, once = program.run(x=v)
    np.testing.assert_allclose(once, np.exp(v), rtol=1e-6)
    np.testing.assert_allclose(twice, 2 * np.exp(v), rtol=1e-6)
    np.testing.assert_allclose(buffer.read(64, 32).view(F).reshape(2, 4), np.exp(v), rtol=1e-6)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("make", [AsyncDevice, lambda: Separate("far")], ids=["asynchronous", "separate"])
def test_devices_that_do_not_reach_it_get_plain_copies(v, values, parallel, make):
    device, far = Knowing(), make()
    w = negated(Negated(device), values)
    x = ow.input("x", (4, 4))
    y = ow.add(x, w)
    with ow.Scheduler([far, device, HostDevice()], parallel=parallel) as scheduler:
        program = scheduler.build(y, {y: far})
        for _ in range(3):
            np.testing.assert_array_equal(program.run(x=values), 2 * values)


def test_what_such_copies_take_is_predicted(x, v, values, tmp_path, monkeypatch):
    monkeypatch.setenv("OPWEAVE_PROFILE_CACHE", str(tmp_path))
    w = negated(Negated(Knowing()), values)
    with ow.Scheduler([Plain()], placement="cost") as scheduler:
        program = scheduler.build(ow.linear(x, w))
        np.testing.assert_array_equal(program.run(x=v), v @ values.T)
        plain = scheduler.build(ow.linear(x, ow.weights({"w": values})["w"]))
        assert program.predicted.copies > plain.predicted.copies


def test_plans_made_by_hand_are_refused(values):
    device = Plain()
    source, plain = Negated(Knowing()).alloc(64), device.alloc(64)
    args = [Arg(b, 0, f32, (4, 4), (16, 4)) for b in (source, plain)]
    with device.open() as stream:
        with pytest.raises(ow.LayoutError, match="cannot read <Buffer negated"):
            stream.compile([Step("exp", args[1], (args[0],), {})])
        with pytest.raises(ow.LayoutError, match="cannot write <Buffer negated"):
            stream.compile([Step("exp", args[0], (args[1],), {})])
    assert "a format that it does not read" in str(Careless().why_not(Step("exp", args[1], (args[0],), {})))


# --- temporaries ------------------------------------------------------------------------------------------------------


class Elsewhere(BufferType):
    usages = frozenset({Usage.WEIGHTS})


class Padded(BufferType):
    """Kernels read whole rows of 64 bytes."""

    def alloc_size(self, tensor: Tensor) -> int:
        return tensor.nbytes + 1000


def test_memory_that_temporaries_cannot_lie_in_is_refused_at_once():
    device = Plain()
    kinds: list[tuple[Any, str]] = [
        (Negated(device), "keeps tensors in a form of its own"),
        (Elsewhere(device, "only weights"), "not for temporaries"),
        (BufferType(Separate("g")), "cannot reach"),
        ("plain", "is a BufferType"),
    ]
    for kind, why in kinds:
        with pytest.raises(ow.SchedulerError, match=why):
            ow.Scheduler([device], buffer_types={device: kind})

    class Odd(Plain):
        @property
        def default_buffer_type(self) -> BufferType:
            return Negated(self)

    with pytest.raises(ow.SchedulerError, match="ordinary memory"):
        ow.Scheduler([Odd()], buffer_types={"plain": BufferType(device)})


def test_temporaries_are_as_large_as_their_memory_says(x, v):
    device = Separate("g")
    kind = Padded(device, "g.padded")
    y = ow.exp(ow.neg(x[:, :2])) + ow.exp(x[:, 1:3])
    with ow.Scheduler([device, HostDevice()], buffer_types={device: kind}) as scheduler:
        program = scheduler.build([y, ow.neg(y)])
        used = sorted((r.offset, r.size) for r in program.memory_map().places.values())
        assert all(size >= 1000 for _, size in used)
        assert program.memory["g"].temporaries > 2000
        np.testing.assert_allclose(program.run(x=v)[0], np.exp(-v[:, :2]) + np.exp(v[:, 1:3]), rtol=1e-6)


def test_arrays_are_not_used_where_they_lie_if_kernels_read_padding(x, v, values):
    class Pads(Plain):
        @property
        def default_buffer_type(self) -> BufferType:
            if self._default_type is None:
                self._default_type = Padded(self)
            return self._default_type

    (w,) = ow.weights({"w": values}, device=Pads()).values()
    assert w.leaf is not None
    assert w.leaf.placement is not None
    assert w.leaf.placement.buffer.size == values.nbytes + 1000


def test_memory_is_used_for_what_it_is_for(values):
    kind = Elsewhere(HostDevice(), "only weights")
    with pytest.raises(ow.UnsupportedOpError, match=r"only weights is memory for Usage.WEIGHTS, not for Usage.COMPUTE"):
        kind.alloc(64, Usage.COMPUTE)
    buffer = kind.alloc(64, Usage.WEIGHTS)
    with pytest.raises(ow.UnsupportedOpError, match=r"not for Usage.COMPUTE"):
        buffer.usage = Usage.COMPUTE
    for wrong in (ow.state("s", (4,)), ow.exp(ow.input("x", (4,)))):
        with pytest.raises(ow.UnsupportedOpError, match=r"not for Usage.COMPUTE"):
            ow.place(wrong, buffer)
    (w,) = ow.weights({"w": ow.Spec((4,))}).values()
    ow.place(w, buffer)
