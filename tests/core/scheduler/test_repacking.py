"""Copies of weights in special memory: made by the scheduler where the memory says it pays, once, counted, declined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import opweave as ow
import opweave_cost
from opweave.contract import BufferType, Step, Usage
from opweave.contract.kernels import KernelTable
from opweave.errors import LayoutError, SchedulerError, UnknownNameError, UnsupportedOpError
from opweave.graph.dtypes import DType, f32
from opweave.graph.layout import Shape
from opweave.graph.leaf import Location
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.memory import HostMemory
from opweave.runtime.host.repacked import RepackedType
from opweave.runtime.host.reservations import RESERVATIONS
from opweave_cost.cost_model import CostModel, Curve, OpCost, Profile
from tests.support.devices import reference_kernel

F = np.float32


class Turned(RepackedType):
    """Keeps f32 matrices transposed, at twice their size, and says that products of few rows are faster with them."""

    @property
    def name(self) -> str:
        return f"{self.device.name}.turned"

    def alloc_size(self, tensor: ow.Tensor) -> int:
        return 2 * tensor.nbytes

    def _why_not(self, dtype: DType, shape: Shape) -> str | None:
        return None if dtype is f32 and len(shape) == 2 else "it keeps matrices in f32"

    def _pays(self, step: Step, source: int) -> bool:
        return step.op == "linear" and source == 1 and step.out.shape[0] < 8

    def _pack(self, data: np.ndarray, dtype: DType, shape: Shape) -> Any:
        return data.view(F).reshape(shape).T.copy()

    def _unpack(self, packed: Any, dtype: DType, shape: Shape) -> np.ndarray:
        return np.ascontiguousarray(packed.T)


def _is_turned(step: Step) -> str | None:
    return None if isinstance(step.srcs[1].buffer_type, Turned) else "the weights are not turned"


class Turning(HostMemory):
    """A device of the host's memory that multiplies by turned weights."""

    kind = ow.Kind.ACCEL
    kernels = KernelTable("f32", "strided")

    def __init__(self, name: str = "turning") -> None:
        self.name = name
        self._turned = Turned(self)
        self.ran: list[str] = []

    @property
    def buffer_types(self) -> Sequence[BufferType]:
        return self.default_buffer_type, self._turned


@Turning.kernels("linear", accepts=Turned, when=_is_turned)
def _turned(stream, op, out, x, w):
    def run():
        stream.device.ran.append("turned")
        np.copyto(out.view, x.view @ w.handle.value)

    return run


@Turning.kernels("linear", "exp", "add")
def _plain(stream, op, out, *srcs, **attrs):
    call = reference_kernel(stream, op, out, *srcs, **attrs)

    def run():
        stream.device.ran.append(op)
        call()

    return run


@pytest.fixture
def device() -> Turning:
    return Turning()


@pytest.fixture
def w() -> np.ndarray:
    return np.arange(64 * 32, dtype=F).reshape(64, 32) / 1000


X = np.ones((2, 32), F)


def location(tensor: ow.Tensor) -> Location:
    assert tensor.leaf is not None
    assert tensor.leaf.placement is not None
    return tensor.leaf.placement


class Asked(Turning):
    """Notes what it is asked."""

    def __init__(self, name: str = "asked") -> None:
        super().__init__(name)
        self.questions: list[tuple[object, ...]] = []

    def _why_not(self, step: Step) -> str | None:
        self.questions.append((step.op, step.out.shape, *[src.buffer_type for src in step.srcs]))
        return super()._why_not(step)


@pytest.mark.parametrize(("rows", "kinds"), [(16, 1), (2, 2)])
def test_a_device_is_asked_once_about_a_product_plain_and_once_repacked(rows, kinds, w):
    device = Asked()
    with ow.Scheduler(device) as scheduler:
        scheduler.build(ow.linear(ow.input("x", (rows, 32)), ow.weights({"w": w})["w"]))
    assert len(device.questions) == len(set(device.questions)) == kinds


class Keepless(Turned):
    """Keeps nothing."""

    def _why_not(self, dtype: DType, shape: Shape) -> str | None:
        return "it keeps nothing"


def test_a_device_whose_special_memory_keeps_no_such_weights_is_not_asked_about_their_products(w):
    first, second = Asked("first"), Asked("second")
    second._turned = Keepless(second)
    weights = ow.weights({"w": w}, device=first)
    with ow.Scheduler([first, second]) as scheduler:
        scheduler.build(ow.linear(ow.input("x", (16, 32)), weights["w"]))
    assert first.questions
    assert not second.questions


def test_weights_are_copied_once_for_all_programs_and_counted(device, w):
    x, weight = ow.input("x", (2, 32)), ow.weights({"w": w})["w"]
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build([ow.linear(x, weight), ow.exp(weight)])
        product, exponential = program.run(x=X)
        np.testing.assert_allclose(product, X @ w.T, rtol=1e-6)
        np.testing.assert_allclose(exponential, np.exp(w), rtol=1e-6)
        assert device.ran == ["turned", "exp"]
        assert program.memory["turning"].weights == 2 * w.nbytes + w.nbytes
        assert "weights in turning.turned" in program.explain()
        assert [row.repacked for row in program.explain().nodes] == ["turning.turned", ""]
        before = RESERVATIONS.reserved
        again = scheduler.build(ow.linear(ow.input("y", (3, 32)), weight))
        np.testing.assert_allclose(again.run(y=np.ones((3, 32), F)), np.ones((3, 32), F) @ w.T, rtol=1e-6)
        assert RESERVATIONS.reserved == before, "the copy is shared"


def test_what_was_measured_of_a_step_holds_beside_a_device_that_copies_its_weights(device, w):
    other = ow.device("host")
    y = ow.linear(ow.input("x", X.shape), ow.weights({"w": w})["w"])

    def support(plan, at):
        assignment = plan.partition.assignment
        (target,) = [target for target in assignment.targets if target.device is at]
        return assignment.capabilities.support(target, y)

    with ow.Scheduler(other) as alone, ow.Scheduler([device, other]) as both:
        support(alone.partition(y), other).seconds = 1.25
        plan = both.partition(y)
        assert support(plan, device).repacked
        assert support(plan, other).seconds == 1.25
        support(plan, device).seconds = 2.5
    like = opweave_cost.simulate("like", like=device)
    line = Curve.line(1e-6, 1e9)
    known = Profile("like", 0.0, line, line, {"add": {"f32": OpCost(line)}})
    assert y.signature is not None
    with ow.Scheduler(like) as scheduler:
        assert CostModel(scheduler._targets, [known]).step(y, y.signature, 0) == 2.5


def test_they_are_freed_with_the_weights(device, w):
    before = RESERVATIONS.reserved
    weight = ow.weights({"w": w})["w"]
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        scheduler.build(ow.linear(ow.input("x", (2, 32)), weight)).run(x=X)
        assert RESERVATIONS.reserved == before + 2 * w.nbytes
        scheduler.reset()
    del weight, scheduler
    assert RESERVATIONS.reserved == before


@pytest.mark.parametrize("how", ["argument", "bytes", "variable", "bytes in variable", "variable of the backend"])
def test_copies_can_be_declined(device, w, how, monkeypatch):
    repack: Any = {"argument": False, "bytes": 2 * w.nbytes - 1}.get(how)
    if how == "variable of the backend":
        monkeypatch.setenv("OPWEAVE_REPACK_BYTES", str(2 * w.nbytes))
        monkeypatch.setenv("OPWEAVE_TURNING_CACHE_BYTES", "0")
    elif repack is None:
        monkeypatch.setenv("OPWEAVE_REPACK_BYTES", "0" if how == "variable" else str(2 * w.nbytes - 1))
    weight = ow.weights({"w": w})["w"]
    with ow.Scheduler([device, HostDevice()], repack=repack) as scheduler:
        program = scheduler.build(ow.linear(ow.input("x", (2, 32)), weight))
        np.testing.assert_allclose(program.run(x=X), X @ w.T, rtol=1e-5)
        assert device.ran == ["linear"]
        assert program.memory["turning"].weights == w.nbytes
        assert "turned" not in program.explain()


def test_the_variable_of_another_backend_decides_nothing(device, w, monkeypatch):
    monkeypatch.setenv("OPWEAVE_CPU_CACHE_BYTES", "0")
    weight = ow.weights({"w": w})["w"]
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        assert "turned" in scheduler.build(ow.linear(ow.input("x", (2, 32)), weight)).explain()


def test_as_many_weights_are_copied_as_the_limit_allows(device, w):
    first, second = ow.weights({"a": w, "b": w + 1}).values()
    x = ow.input("x", (2, 32))
    with ow.Scheduler([device, HostDevice()], repack=3 * w.nbytes) as scheduler:
        scheduler.build([ow.linear(x, first), ow.linear(x, second)]).run(x=X)
    assert device.ran == ["turned", "linear"]


def test_copies_of_earlier_programs_count_toward_the_limit(device, w):
    first, second = ow.weights({"a": w, "b": w + 1}).values()
    x = ow.input("x", (2, 32))
    with ow.Scheduler([device, HostDevice()], repack=3 * w.nbytes) as scheduler:
        scheduler.build(ow.linear(x, first))
        scheduler.build([ow.linear(x, first), ow.linear(x, second)]).run(x=X)
    assert device.ran == ["turned", "linear"]


def test_no_copies_where_it_does_not_pay_or_values_may_change(device, w):
    x, fed, state = ow.input("x", (2, 32)), ow.input("fed", (64, 32)), ow.state("s", (64, 32))
    weight = ow.weights({"w": w})["w"]
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        many = ow.input("many", (9, 32))
        products = [ow.linear(x, fed), ow.linear(x, state), ow.linear(x, weight[:8]), ow.linear(many, weight)]
        program = scheduler.build(products)
        program.run(x=X, fed=w, many=np.ones((9, 32), F))
    assert device.ran == ["linear"] * 4


@pytest.mark.parametrize("by_name", [False, True])
def test_each_device_has_the_limit_that_a_mapping_gives_it_others_that_of_the_variable(w, by_name, monkeypatch):
    monkeypatch.setenv("OPWEAVE_REPACK_BYTES", str(3 * w.nbytes))
    devices = [Turning(name) for name in ("none", "one", "two")]
    limits: Any = {devices[0]: False, devices[2]: 4 * w.nbytes}
    x, weights = ow.input("x", (2, 32)), [ow.weights({"a": w, "b": w + 1}, device=device) for device in devices]
    if by_name:
        limits = {device.name: limit for device, limit in limits.items()}
    with ow.Scheduler([*devices, HostDevice()], repack=limits) as scheduler:
        scheduler.build([ow.linear(x, weight) for group in weights for weight in group.values()]).run(x=X)
    assert [device.ran for device in devices] == [["linear"] * 2, ["turned", "linear"], ["turned"] * 2]


def test_a_scheduler_goes_on_without_a_device_that_has_a_limit(device):
    with ow.Scheduler([device, "host"], repack={"turning": 5, "host": 7}) as scheduler:
        assert [target.repack for target in scheduler.without(device).targets] == [7]


@pytest.mark.parametrize("wrong", [-1, 1.5, "much"])
def test_wrong_limits(wrong, monkeypatch):
    for given in (wrong, {"host": wrong}):
        with pytest.raises(SchedulerError, match="repack is True, False or a number of bytes"):
            ow.Scheduler("host", repack=given)
    with pytest.raises(SchedulerError, match="repack names devices that are not here: turning, 5"):
        ow.Scheduler("host", repack={"turning": 5, "host": 5, 5: 5})
    monkeypatch.setenv("OPWEAVE_REPACK_BYTES", str(wrong))
    with pytest.raises(SchedulerError, match="OPWEAVE_REPACK_BYTES is"):
        ow.Scheduler("host")


# --- memory that a caller names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["turned", "turning.TURNED", "object"])
def test_weights_lie_in_the_memory_that_a_caller_names(device, w, named):
    kind = device.buffer_types[1] if named == "object" else named
    arrays = {"layer.w": w, "layer.b": np.ones(64, F)}
    group = ow.weights(arrays, device=device, buffer_type={"*.w": kind})
    placed = location(group["layer.w"]).buffer
    assert placed.type is device.buffer_types[1]
    assert placed.usage is Usage.WEIGHTS
    assert location(group["layer.b"]).buffer.type is device.default_buffer_type
    np.testing.assert_array_equal(ow.read(group["layer.w"]), w)
    np.testing.assert_array_equal(ow.read(group["layer.w"][3:5, ::2]), w[3:5, ::2])
    with ow.Scheduler([device, HostDevice()], repack=False) as scheduler:
        product = scheduler.build(ow.linear(ow.input("x", (2, 32)), group["layer.w"])).run(x=X)
    np.testing.assert_allclose(product, X @ w.T, rtol=1e-6)
    assert device.ran == ["turned"]


def test_another_device_of_the_same_space_reads_a_copy(device, w):
    weight = ow.weights({"w": w}, buffer_type=device.buffer_types[1])["w"]
    with ow.Scheduler("host") as scheduler:
        program = scheduler.build(ow.linear(ow.input("x", (2, 32)), weight))
        np.testing.assert_allclose(program.run(x=X), X @ w.T, rtol=1e-6)
    assert device.ran == []


def test_wrong_memory_is_refused_before_anything_is_allocated(device, w):
    before = RESERVATIONS.reserved
    kind = device.buffer_types[1]
    with pytest.raises(UnsupportedOpError, match=r"does not keep weight 'b'.*matrices in f32"):
        ow.weights({"w": w, "b": np.ones(64, F)}, buffer_type=kind)
    with pytest.raises(UnknownNameError, match=r"turning\.turned"):
        ow.weights({"w": w}, device=device, buffer_type="turnt")
    with pytest.raises(SchedulerError, match="memory of turning, not of host"):
        ow.weights({"w": w}, device="host", buffer_type=kind)
    with pytest.raises(SchedulerError, match="whose memory"):
        ow.weights({"w": w}, buffer_type="turned")
    with pytest.raises(SchedulerError, match="takes a BufferType"):
        ow.weights({"w": w}, buffer_type=5)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match=r"pattern of buffer_type="):
        ow.weights({"w": w}, buffer_type={"v*": kind})
    with pytest.raises(UnsupportedOpError, match=r"not for Usage\.COMPUTE"):
        ow.state("s", (64, 32), buffer_type=kind)
    assert RESERVATIONS.reserved == before


def test_states_lie_in_the_memory_that_a_caller_names():
    class Wide(BufferType):
        pass

    device = Turning()
    kind = Wide(device, "turning.wide")
    total = ow.state("total", (4,), buffer_type=kind, fill=2)
    assert location(total).buffer.type is kind
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        scheduler.build(ow.assign(total, total + total)).run()
    np.testing.assert_array_equal(ow.read(total), [4] * 4)


def test_values_that_are_written_anew_are_read_by_programs_that_are_there(device, w):
    weight = ow.weights({"w": w}, buffer_type=device.buffer_types[1])["w"]
    with ow.Scheduler([device, HostDevice()]) as scheduler:
        program = scheduler.build(ow.linear(ow.input("x", (2, 32)), weight))
        program.run(x=X)
        buffer, offset, _ = location(weight)
        buffer.upload(offset, 3 * w)
        np.testing.assert_allclose(program.run(x=X), 3 * X @ w.T, rtol=1e-6)
        buffer.upload(offset + 4 * 32, np.zeros(32, F))  # a part: one row
        assert not program.run(x=X)[:, 1].any()
        np.testing.assert_array_equal(ow.read(weight)[2], 3 * w[2])


def test_memory_of_objects_has_no_bytes_of_its_own(device, w):
    kind = device.buffer_types[1]
    with kind.alloc(1000, Usage.WEIGHTS) as buffer:
        with pytest.raises(LayoutError, match="no tensor was prepared"):
            buffer.read(0, 4)
        tensor = ow.weights({"w": ow.Spec((4, 4))})["w"]
        buffer.init(tensor, 0)
        with pytest.raises(LayoutError, match="never written"):
            buffer.read(0, 64)
        buffer.clear(0)
        assert not buffer.read(0, 64).any()
        with pytest.raises(UnsupportedOpError, match=r"not for Usage\.ANY"):
            kind.alloc(10)
