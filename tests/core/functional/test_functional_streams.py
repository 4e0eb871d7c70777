"""Streams that compile whole splits into functions of arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Group, Step, Stream, structure_of
from opweave.functional import ArrayLibrary
from opweave.runtime.listing import listed
from opweave_conformance.graphs import MODELS, LeafDevices
from tests.support.array_device import Array, ArrayStream, FunctionalDevice, Library

ANYWHERE = LeafDevices(None, None)


def device(compile_: Callable[..., Any] | None = None, **members: Any) -> FunctionalDevice:
    """A device whose streams have further members."""
    if compile_ is not None:
        members["_compile_functional"] = compile_
    made = FunctionalDevice()
    made.stream_class = type("PlantedStream", (ArrayStream,), members)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("parallel", [False, True])
def test_every_model_is_one_call_and_right(name: str, parallel: bool):
    model, rng = MODELS[name], np.random.default_rng(0)
    outputs, card = model.build(ANYWHERE), FunctionalDevice()
    with ow.Scheduler([card], parallel=parallel) as scheduler, ow.Scheduler("host") as reference:
        program, truth = scheduler.build(outputs), reference.build(model.build(ANYWHERE))
        assert len(program.run_lists[0].plans[0]) == 1
        for _ in range(3):
            feeds = model.feeds(outputs, rng)
            for got, want in zip(program.run(feeds), truth.run(feeds), strict=True):
                np.testing.assert_array_equal(got, want)
    assert len(card.compiled) == 1, "every slot shares what was compiled"


def test_equal_structures_are_compiled_once_and_others_are_not():
    card, rng = FunctionalDevice(), np.random.default_rng(0)

    def run(n: int = 4, scale: float = 2.0, part: slice = slice(0, 2), turned: bool = False, op: Any = ow.relu) -> int:
        x, w = rng.standard_normal((n, n)).astype("f4"), rng.standard_normal((n, n)).astype("f4")
        weight = ow.weights({"w": w})["w"]
        y = ow.input("x", (n, n))
        with ow.Scheduler(card) as scheduler:
            got = scheduler.build(op(ow.scale(y, scale) + (weight.T if turned else weight))[part]).run(x=x)
        want = (x * np.float32(scale) + (w.T if turned else w))[part]
        np.testing.assert_allclose(got, np.maximum(want, 0) if op is ow.relu else -want, rtol=1e-6)
        return len(card.compiled)

    assert run() == run() == run() == 1
    assert run(part=slice(2, 4)) == 1, "the program's result is the whole; the part of it is read"
    assert run(scale=3.0) == 2
    assert run(turned=True) == 3
    assert run(op=ow.neg) == 4
    assert run(n=5) == 5
    assert run() == 5


def test_views_of_a_weight_at_other_places_are_other_structures():
    card = FunctionalDevice()
    w = np.arange(12, dtype="f4")
    for part in (slice(0, 4), slice(4, 8), slice(0, 4)):
        weight = ow.weights({"w": w})["w"]
        with ow.Scheduler(card) as scheduler:
            assert scheduler.build(ow.neg(weight[part])).run().tolist() == (-w[part]).tolist()
    assert len(card.compiled) == 2


def halves(self: Stream, steps: Sequence[Step]) -> list[Group]:
    middle = (len(steps) + 1) // 2
    return [Group(tuple(part)) for part in (steps[:middle], steps[middle:]) if part]


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_a_split_may_be_a_group_and_temporaries_are_donated(name: str):
    model, rng = MODELS[name], np.random.default_rng(1)
    outputs = model.build(ANYWHERE)
    with ow.Scheduler([device(_fuse=halves)]) as scheduler, ow.Scheduler("host") as reference:
        program, truth = scheduler.build(outputs), reference.build(model.build(ANYWHERE))
        for _ in range(2):
            feeds = model.feeds(outputs, rng)
            for got, want in zip(program.run(feeds), truth.run(feeds), strict=True):
                np.testing.assert_array_equal(got, want)


def test_operands_are_listed():
    seen: list[Group] = []

    class Listing(ArrayStream):
        _fuse = halves

        def _bind(self, group: Group) -> Any:
            seen.append(group)
            return super()._bind(group)

    card = FunctionalDevice()
    card.stream_class = Listing
    x, kept = ow.input("x", (2, 3)), ow.state("kept", (2, 3))
    w = ow.weights({"w": np.ones((3, 2), "f4")})["w"]
    h = ow.neg(x.T)
    g = h + w
    new = ow.assign(kept, kept + g.T)
    with ow.Scheduler(card) as scheduler:
        assert scheduler.build(new).run(x=np.zeros((2, 3), "f4")).tolist() == [[1] * 3] * 2
    first, second = seen
    assert [a.shape for a in first.reads] == [(2, 3), (3, 2)], "x whole, though the step reads a view of it; w"
    assert first.dead == {0}, "nobody reads x afterwards"
    assert first.donatable == set(), "but it may be the caller's"
    assert first.constant == {1}
    assert [a.shape for a in first.writes] == [(3, 2)]
    assert second.reads[second.reads.index(first.writes[0])] == first.writes[0]
    assert second.donatable == {second.reads.index(first.writes[0])}
    assert second.writes[0] in second.reads, "the state is read and written"
    structure = structure_of(second)
    assert set(structure.donated) == {0, 1}
    assert all(arg.buffer is None for arg in (*structure.inputs, *structure.outputs))


def test_operands_without_a_graph_are_merged_windows():
    card = ow.device("host")
    buffer = card.alloc(64)

    def arg(offset: int, *shape: int, buffer: Any = buffer, value: int = -1) -> Arg:
        return Arg(
            buffer,
            offset,
            ow.DTYPES["f32"],
            shape,
            tuple([4 * int(np.prod(shape[i + 1 :])) for i in range(len(shape))]),
            None,
            value,
        )

    inner = arg(0, 4, buffer=None, value=9)
    group = listed(Group((Step("add", inner, (arg(0, 4), arg(8, 4)), {}), Step("neg", arg(32, 4), (inner,), {}))))
    assert [(a.offset, a.shape) for a in group.reads] == [(0, (6,))]
    assert [(a.offset, a.shape) for a in group.writes] == [(32, (4,))]
    again = listed(Group((Step("add", inner, (arg(16, 4), arg(24, 4)), {}), Step("neg", arg(0, 4), (inner,), {}))))
    assert structure_of(group).key == structure_of(again).key
    other = listed(Group((Step("add", inner, (arg(16, 4), arg(20, 4)), {}), Step("neg", arg(0, 4), (inner,), {}))))
    assert structure_of(group).key != structure_of(other).key


def wrong(change: Callable[[list[Any], Sequence[Any]], list[Any]]) -> Callable[..., Any]:
    def compile_(self: ArrayStream, *args: Any) -> Any:
        function = ArrayStream._compile_functional(self, *args)
        return lambda *arrays: change(list(function(*arrays)), arrays)

    return compile_


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda results, arrays: results[:-1], "gave 1 arrays for 2 outputs"),
        (lambda results, arrays: [results[0], arrays[0]], "an input or another output"),
        (lambda results, arrays: [results[0], results[0]], "an input or another output"),
        (lambda results, arrays: None, "gave None, and no list of 2 arrays"),
        (lambda results, arrays: results[0], "an object of Array, and no list of 2 arrays"),
        (lambda results, arrays: [results[0], None], "gave None, and no array, for output 1"),
        (lambda results, arrays: [results[0], Array(np.ones((2, 1), "f4"))], "shape (2, 1) for output 1"),
        (lambda results, arrays: [results[0], Array(np.ones(2))], "an array of f64 for output 1, which is f32"),
    ],
)
def test_functions_that_break_their_promise_are_found_at_the_first_call(change: Any, what: str):
    x = ow.input("x", (2,))
    with ow.Scheduler(device(wrong(change))) as scheduler, pytest.raises(ow.ExecutionError, match=re.escape(what)):
        scheduler.build((ow.neg(x), ow.relu(x))).run(x=np.ones(2, "f4"))


def with_attribute(name: str, value: Any) -> Callable[..., Any]:
    def compile_(self: ArrayStream, *args: Any) -> Any:
        def function(*arrays: Any) -> Any:
            raise AssertionError("nothing runs")

        setattr(function, name, value)
        return function

    return compile_


@pytest.mark.parametrize(
    ("compile_", "what"),
    [
        (lambda self, *args: None, "returned None, and no function"),
        (with_attribute("wait", 3), "the attribute wait of .* is an object of int"),
        (with_attribute("remark", b"packed"), "the attribute remark of .* is an object of bytes"),
        (with_attribute("library_bytes", "many"), "the attribute library_bytes of .* is an object of str"),
    ],
)
def test_what_is_no_function_is_found_before_anything_runs(compile_: Any, what: str):
    with ow.Scheduler(device(compile_)) as scheduler, pytest.raises(ow.PluginError, match=what):
        scheduler.build(ow.neg(ow.input("x", (2,))))


class Forgetful(Library):
    def from_host(self, array: np.ndarray[Any, Any], borrowed: bool) -> Array:
        return Array(np.zeros_like(array))


class Widening(Library):
    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        return array.values.astype(np.float64)


class Listing(Library):
    def to_host(self, array: Array) -> Any:
        return array.values.tolist()


@pytest.mark.parametrize(
    ("library", "what"),
    [
        (ArrayLibrary(), "ArrayLibrary implements no from_host"),
        (Forgetful(), "of Forgetful made float32 .* of float32"),
        (Widening(), "of Widening made float64"),
        (Listing(), "to_host of Listing gave list, and no NumPy array"),
    ],
)
def test_a_library_that_changes_arrays_is_found_before_anything_runs(library: Any, what: str):
    card = FunctionalDevice()
    card.library = library
    with ow.Scheduler(card) as scheduler, pytest.raises(ow.PluginError, match=what):
        scheduler.build(ow.neg(ow.input("x", (2,))))


def test_groups_that_are_none_are_found():
    broken = device(_fuse=lambda self, steps: list(steps))
    with ow.Scheduler(broken) as scheduler, pytest.raises(ow.PluginError, match=r"groups of steps.*not Step"):
        scheduler.build(ow.neg(ow.input("x", (2,))))


def test_results_that_are_still_computed_are_waited_for_before_a_run_ends():
    pending: list[tuple[Any, Any]] = []

    def compile_(self: ArrayStream, *args: Any) -> Any:
        made = ArrayStream._compile_functional(self, *args)

        def function(*arrays: Any) -> list[Any]:
            results = list(made(*arrays))
            for array in results:  # as of a library that computes in a thread of its own
                pending.append((array, array.values.copy()))
                array.values[...] = np.nan
            return results

        def wait(results: Sequence[Any]) -> None:
            assert [array for array, _ in pending] == list(results)
            for array, values in pending:
                array.values[...] = values
            pending.clear()

        function.wait = wait  # type: ignore[attr-defined]
        return function

    x = ow.input("x", (2,))
    with ow.Scheduler(device(compile_)) as scheduler:
        program = scheduler.build((ow.neg(x), ow.relu(x)))
        program.warm()
        assert not pending
        for factor in (1, 2):
            first, second = program.run(x=np.full(2, factor, "f4"))
            assert (first.tolist(), second.tolist()) == ([-factor] * 2, [factor] * 2)


def test_whole_arrays_are_moved_and_results_are_handed_from_call_to_call():
    card = device(_fuse=halves)
    x, w = ow.input("x", (8, 8)), ow.weights({"w": np.ones((8, 8), "f4")})["w"]
    with ow.Scheduler(card) as scheduler:
        program = scheduler.build(ow.neg(ow.relu(x + w)))
        program.run(x=np.ones((8, 8), "f4"))
        before = card.library.moved
        program.run(x=np.ones((8, 8), "f4"))
        assert card.library.moved - before == 2 * 8 * 8 * 4, "the input and the result, and nothing else"
