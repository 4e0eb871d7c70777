"""Called with arbitrary arguments, a public function works, or raises an `OpweaveError` or a `TypeError`."""

# mypy: disable-error-code="arg-type, list-item, dict-item"

from __future__ import annotations

import inspect
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave import ops
from opweave.errors import OpweaveError
from opweave.graph.leaf import Leaf
from opweave.graph.tensor import Tensor, new_leaf

QUANTIZED = new_leaf(Leaf("weight", "w"), (4, 64), ow.as_dtype("q4_0"))
# fmt: off
TENSORS = [
    ow.input("number", ()), ow.input("vector", (4,)), ow.input("matrix", (3, 4)), ow.input("images", (1, 2, 4, 4)),
    ow.input("empty", (0, 3)), ow.input("ids", (3,), "i32"), ow.input("bits", (4,), "bool"),
    ow.input("half", (2, 3), "f16"), ow.input("volume", (2, 3, 4)), ow.input("many", (1,) * 8),
    QUANTIZED, QUANTIZED.T, ow.state("cache", (4, 3)), ow.state("slots", (4, 3))[1:3],
    ow.input("row", (1, 3)).broadcast_to((4, 3)),
]
JUNK = [
    None, True, 0, -1, 2, 5, 10**30, -(10**30), 0.5, -2.5, float("nan"), float("inf"), 1j, Fraction(1, 3),
    "", "f32", "x", "\ud800", b"raw", (), [], {}, set(), [1, [2]], [None], (1, 2), (2, 2, 2), (-1, 3), ("a", "b"),
    {"a": 1}, object(), len, slice(None), Ellipsis, range(3), np.float32(1.5), np.int8(3), np.array(2), np.arange(3),
    np.ones((2, 2)), np.array([None, 1], object), np.array(["a"]), np.array([1j]), np.zeros((0,)),
    np.ones(3, ml_dtypes.bfloat16), np.float64, ow.DTYPES["f16"], ow.DTYPES["q4_0"], type, iter([1]),
    [ow.input("vector", (4,))] * 2,
]
FUNCTIONS = sorted([
    *vars(ops)["__all__"], "input", "constant", "state", "weights", "as_dtype", "read", "write", "place", "compile",
    "define_op", "from_dlpack", "quantize", "dequantize", "opweave_conformance.compare",
])
# fmt: on
ANY = st.sampled_from([*TENSORS, *JUNK])


def outcome(call, *args, **kwargs):
    """What a call returned; ``None`` where it raised an error that may be raised."""
    try:
        return call(*args, **kwargs)
    except (OpweaveError, TypeError) as raised:  # TypeError: also Python's own, for a wrong number of arguments
        error = raised
    assert len(str(error)) > 10, f"{type(error).__name__} says too little: {error}"
    return None


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_arguments_of_any_kind(name: str, data: st.DataObject):
    module, _, name = name.rpartition(".")
    package = pytest.importorskip(module) if module else ow
    function = getattr(package, name, None) or getattr(ops, name)
    parameters = list(inspect.signature(function).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    optional = [p.name for p in parameters if p.default is not p.empty]
    args = [data.draw(ANY) for _ in needed]
    if args and name in vars(ops)["__all__"] and data.draw(st.booleans()):
        args[0] = data.draw(st.sampled_from(TENSORS))  # gets further in
    chosen = data.draw(st.lists(st.sampled_from(optional), unique=True, max_size=3)) if optional else []
    result = outcome(function, *args, **{key: data.draw(ANY) for key in chosen})
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, Tensor):
            assert repr(tensor)


X, Y = ow.input("x", (2,)), ow.exp(ow.input("x", (2,)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: s.build([[Y]]), "one of them is"),
        (lambda s: s.build([5]), "one of them is 5"),
        (lambda s: s.build({"y": None}), "one of them is None"),
        (lambda s: s.build(5), "outputs are"),
        (lambda s: s.build(Y, pins=5), "pins are a mapping"),
        (
            lambda s: s.build(Y, pins={5: "host"}),
            "computed tensors, inputs and states are pinned; place weights when making them, not 5",
        ),
        (lambda s: s.build(Y, pins={Y: 5}), "the name of a device, not 5"),
        (lambda s: s.build(Y, placements=5), "placements are"),
        (lambda s: s.build(Y, placements=[5]), "one of them is 5"),
        (lambda s: s.partition([[Y]]), "one of them is"),
        (lambda s: s.pin(5, "host"), "5"),
        (lambda s: s.reserve(5), "outputs are"),
        (lambda s: s.build(Y).run([np.ones(2)]), "as list"),
        (lambda s: s.build(Y).run(np.ones(2, np.float32)), "as ndarray"),
        (lambda s: s.build(Y).run(5), "as int"),
        (lambda s: s.build(Y).submit([np.ones(2)]), "as list"),
        (lambda s: s.build(Y).run({5: np.ones(2)}), "no value for"),
        (lambda s: s.build(Y).run(x=object()), "takes float32"),
        (lambda s: ow.Scheduler("host", parallel=10**9), "number of slots, not 1000000000"),
        (lambda s: ow.compile(*[5], devices=s), "outputs are a tensor or a sequence of tensors, not 5"),
        (lambda s: ow.Scheduler(5), "not on 5"),
        (lambda s: ow.Scheduler([5]), "not on 5"),
        (lambda s: ow.Scheduler("host", buffer_types=5), "buffer_types are a mapping"),
    ],
)
def test_schedulers_and_programs_say_what_they_take(call, says: str):
    with ow.Scheduler("host") as scheduler, pytest.raises(OpweaveError, match=says):
        call(scheduler)
