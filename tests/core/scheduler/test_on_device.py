"""Arrays in the memory of devices, fed to programs and left there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import opweave as ow
from opweave.contract import Kind
from opweave.runtime.host.device import ReferenceKernels
from tests.support.array_device import DLPACK, Array, ArrayStream, FunctionalDevice


class Exported:
    """An array in the memory of a `Card`."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **params: Any) -> Any:
        raise BufferError("not on the host")

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK


class Card(ReferenceKernels):
    """A device with writable memory of its own that it exchanges; it counts what goes through the host."""

    kind = Kind.GPU
    dlpack_device = DLPACK

    def __init__(self) -> None:
        self.through_host = 0

    def _upload(self, mem: Any, offset: int, data: memoryview) -> None:
        self.through_host += len(data)
        super()._upload(mem, offset, data)

    def _download(self, mem: Any, offset: int, out: memoryview) -> None:
        self.through_host += len(out)
        super()._download(mem, offset, out)

    def _import_dlpack(self, array: Any) -> Any:
        values = array.array
        return values.reshape(-1).view(np.uint8), ow.as_dtype(values.dtype), values.shape

    def _export_dlpack(self, mem: Any, offset: int, dtype: Any, shape: Any, strides: Any) -> Exported:
        return Exported(np.ndarray(shape, dtype.numpy, mem, offset, strides))


def values_of(array: Any) -> np.ndarray[Any, Any]:
    return array.values if isinstance(array, Array) else array.array if isinstance(array, Exported) else array


def given(card: Any, values: Any) -> Any:
    array = np.asarray(values, np.float32)
    return Array(array) if isinstance(card, FunctionalDevice) else Exported(array)


def through_host(card: Any) -> int:
    """Bytes that went through host memory so far."""
    moved = card.library.moved if isinstance(card, FunctionalDevice) else card.through_host
    assert isinstance(moved, int)
    return moved


DEVICES = pytest.mark.parametrize("make", [Card, FunctionalDevice])


@DEVICES
@pytest.mark.parametrize("parallel", [False, True])
def test_arrays_go_in_and_out_without_the_host(make: Any, parallel: bool):
    card, x = make(), ow.input("x", (2, 3))
    with ow.Scheduler(card, parallel=parallel) as scheduler:
        program = scheduler.build({"neg": ow.neg(x), "turned": ow.neg(x).T, "x": x})
        before = through_host(card)  # a library is tried with two numbers of each dtype when a program is built
        kept: list[tuple[int, Any]] = []
        for i in range(5):
            fed = given(card, np.full((2, 3), i))
            run = program.submit if i % 2 else program.run
            result: Any = run(x=fed, on_device=True)
            kept.append((i, result.result() if i % 2 else result))
        for i, result in kept:
            assert {name: type(array) for name, array in result.items()} == dict.fromkeys(result, type(fed))
            assert values_of(result["neg"]).tolist() == np.full((2, 3), -i).tolist()
            assert values_of(result["turned"]).tolist() == np.full((3, 2), -i).tolist()
            assert values_of(result["x"]).tolist() == np.full((2, 3), i).tolist()
        assert through_host(card) == before
        assert program.run(x=np.ones((2, 3), "f4"))["neg"].tolist() == (-np.ones((2, 3))).tolist()
        program.write(x, given(card, np.full((2, 3), 9)))
        assert program.run()["neg"].tolist() == np.full((2, 3), -9).tolist()


@DEVICES
def test_a_state_that_was_given_out_stays_as_it_was(make: Any):
    kept, x = ow.state("kept", 3), ow.input("x", 3)
    with ow.Scheduler(make()) as scheduler:
        program = scheduler.build(ow.assign(kept, kept + x))
        results = [program.run(x=np.ones(3, "f4"), on_device=True) for _ in range(3)]
        assert [values_of(r).tolist() for r in results] == [[1] * 3, [2] * 3, [3] * 3]
        assert program.read("kept").tolist() == [3] * 3


@DEVICES
def test_arrays_that_do_not_fit_are_refused_before_anything_runs(make: Any):
    card, x = make(), ow.input("x", 3)
    with ow.Scheduler(card) as scheduler:
        program = scheduler.build(ow.neg(x))
        with pytest.raises(ow.ShapeError, match=r"takes shape \(3,\), not \(4,\)"):
            program.run(x=given(card, np.ones(4)))
        wrong = given(card, np.ones(3))
        if isinstance(wrong, Array):
            wrong = Array(np.ones(3, np.int32))
        else:
            wrong.array = np.ones(3, np.int32)
        with pytest.raises(ow.DTypeError, match="takes f32, not i32"):
            program.run(x=wrong)
        assert scheduler.stats.runs == 0


def test_devices_that_export_nothing_refuse_and_host_memory_gives_numpy_arrays():
    x = ow.input("x", 3)

    class Closed(ReferenceKernels):
        kind = Kind.GPU

    with ow.Scheduler(Closed()) as scheduler:
        program = scheduler.build(ow.neg(x))
        with pytest.raises(ow.UnsupportedOpError, match="run without on_device"):
            program.run(x=np.ones(3, "f4"), on_device=True)
        assert scheduler.stats.runs == 0
    with ow.Scheduler("host") as scheduler:
        program = scheduler.build(ow.neg(x))
        got = program.run(x=torch.ones(3), on_device=True)
        program.run(x=np.zeros(3, "f4"))
        assert torch.from_dlpack(got).tolist() == [-1] * 3


def test_warm_compiles_and_changes_nothing():
    calls: list[int] = []

    class Counting(ArrayStream):
        def _compile_functional(self, *args: Any) -> Any:
            inner = super()._compile_functional(*args)

            def function(*arrays: Array) -> Any:
                calls.append(len(arrays))
                return inner(*arrays)

            function.remark = "one function"  # type: ignore[attr-defined]
            function.library_bytes = 4096  # type: ignore[attr-defined]
            return function

    card = FunctionalDevice()
    card.stream_class = Counting
    kept, x = ow.state("kept", 3), ow.input("x", 3)
    with ow.Scheduler(card) as scheduler:
        program = scheduler.build(ow.assign(kept, kept + x))
        program.warm()
        program.warm()
        assert calls == [2]
        assert program.read("kept").tolist() == [0] * 3
        assert program.run(x=np.ones(3, "f4")).tolist() == [1] * 3
        assert program.memory[card.name].library == 4096
        assert "4 KiB library" in program.explain()
        assert "one function" in program.explain()
        program.close()
        with pytest.raises(ow.LifetimeError):
            program.warm()


def test_warming_that_takes_long_shows_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("opweave.progress.PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    x = ow.input("x", 3)
    with ow.Scheduler(FunctionalDevice()) as scheduler:
        program = scheduler.build(ow.neg(x))
        program.warm()
        assert "compiling" in capsys.readouterr().err
        assert program.run(x=np.ones(3, "f4")).tolist() == [-1] * 3


@DEVICES
def test_compiled_functions_take_and_leave_arrays_on_the_device(make: Any):
    card = make()
    traces = []

    @ow.compile(devices=card, on_device=True)
    def double(x, factor=2.0):
        traces.append(x.shape)
        return {"y": x * factor, "sum": ow.sum(x)}

    ow.Scheduler(card).build(ow.neg(ow.input("x", (1,))))  # a library is tried once with f32
    before = through_host(card)
    result: Any = {"y": given(card, [1, 2, 3])}
    for i in range(1, 5):
        result = double(result["y"])
        assert values_of(result["y"]).tolist() == [2**i, 2 * 2**i, 3 * 2**i]
        assert values_of(result["sum"]).tolist() == 6 * 2 ** (i - 1)
    assert through_host(card) - before <= 8  # the constant, once
    assert traces == [(3,)]
    assert values_of(double(np.ones(3, "f4"))["y"]).tolist() == [2, 2, 2]
    assert traces == [(3,)]
    assert values_of(double(given(card, np.ones((2, 2))))["y"]).tolist() == [[2, 2], [2, 2]]
    assert traces == [(3,), (2, 2)]
    double.close()


@DEVICES
def test_a_compiled_function_of_outputs_takes_arrays_on_the_device(make: Any):
    card, x = make(), ow.input("x", 3)
    function = ow.compile(ow.neg(x), devices=card, on_device=True)
    assert values_of(function(given(card, [1, 2, 3]))).tolist() == [-1, -2, -3]
    function.close()


def test_arrays_of_a_device_that_does_not_read_them_are_refused():
    class Elsewhere(ReferenceKernels):
        kind = Kind.GPU

    class Full(Card):
        def _why_not(self, step: Any) -> str | None:
            return "nothing"

    card = Full()
    negated = ow.compile(ow.neg, devices=["host"])
    with pytest.raises(ow.DTypeError, match="in the memory of another device"):
        negated(given(card, [1]))
    negated.close()
    negated = ow.compile(ow.neg, devices=[card, Elsewhere()])
    with pytest.raises(ow.DTypeError, match=r"is read on elsewhere.*, and this array is in the memory of full"):
        negated(given(card, [1]))
    negated.close()
