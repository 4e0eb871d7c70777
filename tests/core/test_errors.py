"""The exception tree: one base, Python's own classes where they fit, and messages that help."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import inspect
import pickle

import pytest

from opweave import errors
from opweave.errors import (
    AllocationError,
    Broken,
    ExecutionError,
    OpweaveError,
    PluginError,
    UnknownNameError,
    UnsupportedOpError,
)

ALL = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


def test_everything_is_an_opweave_error():
    assert len(ALL) == len(errors.__all__) > 15
    assert all(issubclass(c, OpweaveError) and c.__name__ in errors.__all__ and c.__doc__ for c in ALL)


def test_the_tree_at_the_top_is_the_tree():
    drawn = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        name = line.lstrip(" │├└─").split(" ")[0]
        if "── " in line:
            depth = line.index("── ") // 4
            path[depth:] = [name]
            bases = line.split("(")[1].split(")")[0].split(", ") if f"{name} (" in line else []
            drawn[name] = {path[depth - 1] if depth > 1 else "OpweaveError", *bases}
    assert set(drawn) == set(errors.__all__) - {"OpweaveError"}
    for name, bases in drawn.items():
        assert {b.__name__ for b in getattr(errors, name).__bases__} == bases


@pytest.mark.parametrize(
    ("name", "known", "says"),
    [
        ("opencl0", ["opencl:0", "cpu"], "there is no device named 'opencl0'; did you mean 'opencl:0'?"),
        ("CPUU", ["opencl:0", "cpu"], "did you mean 'cpu'?"),
        ("zzz", ["b", "a"], "there are: a, b"),
        ("zzz", [], "there is no device named 'zzz'"),
    ],
)
def test_unknown_names_get_suggestions(name, known, says):
    error = UnknownNameError("device", name, known)
    assert says in str(error)
    assert (error.what, error.name, error.known) == ("device", name, sorted(known))
    hinted = str(UnknownNameError("device", name, known, "Look there."))
    assert hinted.endswith((". Look there.", "? Look there."))


def test_names_are_listed_beside_suggestions_where_asked_for():
    error = UnknownNameError("device", "opencl0", ["opencl:0", "cpu"], "Look there.", listed=True)
    assert str(error).endswith("did you mean 'opencl:0'? There are: cpu, opencl:0. Look there.")
    assert str(UnknownNameError("device", "zzz", ["b", "a"], listed=True)).count("there are") == 1


def test_unknown_names_are_key_errors_without_the_quotes():
    with pytest.raises(KeyError) as caught:
        raise UnknownNameError("weight", "w", ["v"])
    assert str(caught.value) == "there is no weight named 'w'; there are: v"


def test_refusals_list_every_reason():
    error = UnsupportedOpError("no device runs tanh", {"a": "no kernel", "b": "f16, not f32"})
    assert str(error) == "no device runs tanh\n  a: no kernel\n  b: f16, not f32"
    assert error.reasons == {"a": "no kernel", "b": "f16, not f32"}


def test_allocation_errors_say_how_much():
    error = AllocationError("gpu:0", 5_000_000, 1_024, "fragmented")
    assert str(error) == "gpu:0 cannot allocate 5,000,000 bytes (free: 1,024): fragmented"
    assert (error.device, error.requested, error.free) == ("gpu:0", 5_000_000, 1_024)
    assert "free: unknown" in str(AllocationError("gpu:0", 1, None))


def test_failed_runs_say_what_may_be_half_written():
    error = ExecutionError("failed", node="add 'y'", device="cpu", states=["cache"])
    assert (error.node, error.device, error.states) == ("add 'y'", "cpu", ("cache",))


def test_plugin_errors_name_the_package_and_the_remedy():
    error = Broken("its code failed", remedy="upgrade", plugin="acme", distribution="opweave-acme", version="1.2")
    assert str(error) == "plugin 'acme' (opweave-acme 1.2): its code failed\n  remedy: upgrade"
    assert str(PluginError("plain")) == "plain"


@pytest.mark.parametrize(
    "error",
    [
        UnknownNameError("device", "x", ["xy"], "hint"),
        UnsupportedOpError("no", {"a": "b"}),
        AllocationError("gpu", 3, None, "why"),
        ExecutionError("failed", node="n", device="d", states=["s"]),
        Broken("m", remedy="r", plugin="p", distribution="d", version="v"),
        errors.ShapeError("s"),
        errors.PathError("no folder"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_travel_between_processes(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
