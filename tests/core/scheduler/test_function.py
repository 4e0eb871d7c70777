"""`ow.compile`: functions over tensors, or outputs, called with arrays."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from tests.support.devices import Plain, Separate

F = np.float32


def test_a_function_is_traced_once_for_each_combination_of_shapes():
    traces = []

    @ow.compile(devices=Plain())
    def double(x, y):
        traces.append(x.shape)
        return x + y

    a = np.ones((2, 3), F)
    np.testing.assert_array_equal(double(a, a), a * 2)
    double(a, y=a)
    double(np.ones((5, 3), F), np.ones((5, 3), F))
    assert traces == [(2, 3), (5, 3)]
    assert double.__name__ == "double"


def test_other_arguments_stay_as_they_are_and_belong_to_the_key():
    @ow.compile(devices=Plain())
    def f(x, factor=2.0, *, negate=False):
        y = ow.scale(x, factor)
        return ow.neg(y) if negate else y

    a = np.ones(3, F)
    assert f(a).tolist() == [2, 2, 2]
    assert f(a, 3.0).tolist() == [3, 3, 3]
    assert f(a, negate=True).tolist() == [-2, -2, -2]
    with pytest.raises(ow.SchedulerError, match="hashable"):
        f(a, factor={})


def test_results_keep_the_form_that_the_function_returned():
    def f(x):
        return {"sum": x + x, "neg": ow.neg(x)}

    g = ow.compile(f, devices=Plain())
    assert set(g(np.ones(2, F))) == {"sum", "neg"}
    assert isinstance(ow.compile(lambda x: [x + x], devices=Plain())(np.ones(2, F)), tuple)
    with pytest.raises(ow.SchedulerError, match="must return tensors"):
        ow.compile(lambda x: "text", devices=Plain())(np.ones(2, F))


def test_outputs_are_called_with_arrays_in_the_order_of_their_inputs_or_by_name():
    x, y = ow.input("x", (2,)), ow.input("y", (2,))
    f = ow.compile(x - y, devices=Plain())
    a, b = np.array([5, 6], F), np.array([1, 2], F)
    assert f(a, b).tolist() == [4, 4]
    assert f(y=b, x=a).tolist() == [4, 4]
    with pytest.raises(ow.SchedulerError, match="takes 2 arrays"):
        f(a, b, a)


def test_warm_builds_the_programs_of_calls_to_come():
    @ow.compile(devices="host")
    def f(x, y, times=1):
        return x * float(times) + y

    f.warm([(ow.Spec((2, n), "f32"), ow.Spec((n,), "f32")) for n in (3, 5)])
    f.warm([{"x": ow.Spec((2, 3), "f32"), "y": np.ones(3, np.float32), "times": 7}])
    built = f.scheduler.stats.built
    assert built == 3
    np.testing.assert_array_equal(f(np.ones((2, 5), np.float32), np.ones(5, np.float32)), np.full((2, 5), 2))
    np.testing.assert_array_equal(f(np.ones((2, 3), np.float32), np.ones(3, np.float32), 7), np.full((2, 3), 8))
    assert f.scheduler.stats.built == built
    with pytest.raises(ow.SchedulerError, match="keeps 64 programs"):
        f.warm([(ow.Spec((1, n), "f32"), 0.0) for n in range(1, 66)])
    with pytest.raises(ow.ShapeError):
        f.warm([(ow.Spec((2, -1), "f32"), 0.0)])


def test_max_shapes_take_the_memory_once():
    device = Separate("g")
    f = ow.compile(lambda x: ow.exp(ow.neg(x)) + x, devices=device, max_shapes={"x": (1000, 16)})
    f(np.ones((3, 16), F))
    size = f.scheduler.buffer_size(device)
    assert size >= 2 * 1000 * 16 * 4
    for n in (1000, 5, 77):
        f(np.ones((n, 16), F))
    assert f.scheduler.buffer_size(device) == size
    with pytest.raises(ow.SchedulerError, match="not parameters to trace"):
        ow.compile(lambda x: x, devices=device, max_shapes={"z": (1,)})


def test_explain_and_program_of_a_call():
    f = ow.compile(lambda x: ow.neg(x), devices=Plain())
    assert "split 0 on plain" in f.explain(np.ones(2, F))
    assert f.program(np.ones(2, F)) is f.program(np.zeros(2, F))
    f.close()
    with pytest.raises(ow.LifetimeError):
        f(np.ones(2, F))


@pytest.mark.parametrize("kind", ["numpy", "scalar", "tensor", "parameter"])
def test_constants_of_other_libraries_may_be_returned_as_arrays_are(kind):
    torch = pytest.importorskip("torch")
    values = np.arange(3, dtype=F)
    constant = {
        "numpy": values,
        "scalar": F(7),
        "tensor": torch.from_numpy(values),
        "parameter": torch.nn.Parameter(torch.from_numpy(values)),
    }[kind]
    result = ow.compile(lambda x: {"x": x + 1.0, "c": constant}, devices="host")(values)
    np.testing.assert_array_equal(result["c"], F(7) if kind == "scalar" else values)
    np.testing.assert_array_equal(result["x"], values + 1)
    assert result["c"].dtype == F
    with pytest.raises(ow.SchedulerError, match="must return tensors, not str"):
        ow.compile(lambda x: "text", devices="host")(values)
