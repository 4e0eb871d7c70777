"""The proof of the checks about compilers: a device that is right passes them, each planted fault turns some red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opweave.contract import Backend, Group, Structure
from opweave.functional import ArrayMemory, device, memory
from opweave.registry import Registry
from opweave.runtime import functional, listing
from opweave_conformance.suite import Suite
from tests.support.array_device import Array, ArrayStream, FunctionalBackend


def red(*only: str, backend: type[Backend] = FunctionalBackend) -> dict[str, str]:
    """Ids and reasons of what fails among the checks about compilers."""
    registry = Registry(environ={}, search=[])
    registry.register(backend)
    found = Suite(backend.name, using=registry, levels=[4], only=only or ["compiler-*"])
    return {o.id: o.reason for item in found.items if (o := found.perform(item)).status != "passed"}


def halves(self: ArrayStream, steps: Any) -> list[Group]:
    return [Group((step,)) for step in steps]


@pytest.mark.parametrize("fuse", [None, halves])
def test_the_sound_device_passes(fuse: Any, monkeypatch: pytest.MonkeyPatch):
    if fuse is not None:
        monkeypatch.setattr(ArrayStream, "_fuse", fuse)
    assert red() == {}


def stripped(**changes: Any) -> Callable[[Structure], Any]:
    """A key that overlooks some of what operands are."""

    def key(structure: Structure) -> Any:
        def arg(a: Any) -> Any:
            values = {name: getattr(a, name) for name in ("offset", "dtype", "shape", "strides", "value")} | changes
            return tuple(values.values())

        steps = tuple([(s.op, listing._frozen(s.attrs), arg(s.out), tuple(map(arg, s.srcs))) for s in structure.steps])
        return steps, tuple(map(arg, structure.inputs)), tuple(map(arg, structure.outputs))

    return key


@pytest.mark.parametrize(
    "overlooked", [{"offset": 0}, {"strides": ()}, {"value": 0}], ids=["offsets", "strides", "which operand"]
)
def test_artefacts_that_are_used_for_other_structures_are_found(
    overlooked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Structure, "key", property(stripped(**overlooked)))
    assert "compiler-structures" in red()


def test_attributes_left_out_of_the_key_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listing, "_frozen", lambda value: () if isinstance(value, dict) or not value else value)
    monkeypatch.setattr(Structure, "key", property(lambda s: (tuple([x.op for x in s.steps]), s.inputs, s.outputs)))
    assert "compiler-structures" in red()


def test_constants_that_belong_to_another_program_are_found(monkeypatch: pytest.MonkeyPatch):
    right = ArrayStream._compile_functional

    def packing(self: ArrayStream, *args: Any) -> Any:
        inner = right(self, *args)
        packed: list[Array] = []

        def function(*arrays: Array) -> Any:
            packed[:] = packed or arrays[1:]
            return inner(*[Array(a.values.copy()) for a in (*arrays[:1], *packed)])

        return function

    monkeypatch.setattr(ArrayStream, "_compile_functional", packing)
    assert "compiler-structures" in red()


def test_arrays_that_are_donated_although_somebody_reads_them_are_found(monkeypatch: pytest.MonkeyPatch):
    right = listing.structure_of

    def generous(group: Group) -> Structure:
        structure = right(group)
        return structure._replace(donated=tuple(i for i in range(len(group.reads)) if i not in group.constant))

    monkeypatch.setattr(functional, "structure_of", generous)
    assert "compiler-life-times" in red()


def test_values_that_are_dropped_although_somebody_reads_them_are_found(monkeypatch: pytest.MonkeyPatch):
    right = functional.FunctionCall.__init__

    def forgetful(self: functional.FunctionCall, compiled: Any, group: Group) -> None:
        right(self, compiled, group._replace(dead=frozenset(range(len(group.reads))) - group.constant))

    monkeypatch.setattr(functional.FunctionCall, "__init__", forgetful)
    assert "compiler-life-times" in red()


def test_a_state_of_which_the_old_version_is_given_up_too_early_is_found(monkeypatch: pytest.MonkeyPatch):
    def evaluate(library: Any, apply: Any, steps: Any, *rest: Any) -> Any:
        # Whatever writes a state comes first.
        from opweave.functional import evaluate as right
        from opweave.graph.opdef import OPS

        order = sorted(steps, key=lambda s: s.op == "sub" and not OPS[s.op].writes and bool(s.out.offset))
        last = [s for s in order if OPS[s.op].writes]
        first = order.index(last[0]) if last else 0
        return right(library, apply, [*order[1 : first + 1], order[0], *order[first + 1 :]] if last else steps, *rest)

    monkeypatch.setattr("tests.support.array_device.evaluate", evaluate)
    assert "compiler-states" in red("compiler-states")


def test_results_that_were_given_out_and_are_donated_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory.Cell, "owned", lambda self: self.load())
    assert "compiler-results-on-device" in red()


def test_fed_arrays_that_are_kept_beyond_the_run_are_found(monkeypatch: pytest.MonkeyPatch):
    def lent(self: Any, mem: ArrayMemory, offset: int, dtype: Any, shape: Any) -> Callable[[Any, bool], None]:
        def put(array: Any, borrowed: bool) -> None:
            mem.put(offset, dtype, shape, Array(array) if isinstance(array, np.ndarray) else array, False)

        return put

    monkeypatch.setattr(device.ArrayDevice, "_bind_put", lent)
    assert "compiler-results-on-device" in red()
