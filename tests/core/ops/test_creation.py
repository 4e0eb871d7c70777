"""Values out of nothing, and what the scheduler makes of nodes without sources."""

import numpy as np
import pytest

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave.graph.graph import Graph
from opweave.runtime.host.device import HostDevice
from tests.support.evaluate import evaluate


@pytest.mark.parametrize(
    "numbers", [(5,), (0,), (-3,), (2, 9), (9, 2), (9, 2, -2), (0, 10, 3), (0.5, 3.0), (3, 0, -0.25), (1.0, 1.5, 0.2)]
)
def test_arange_is_numpys(numbers):
    node = ow.arange(*numbers)
    want = np.arange(*numbers)
    assert node.dtype.name == ("i64" if want.dtype.kind == "i" else "f32")
    assert node.shape == want.shape
    np.testing.assert_allclose(evaluate(node, {}), want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64", "i8", "u8", "i32"])
def test_arange_has_the_wanted_dtype(dtype):
    got = evaluate(ow.arange(3, 100, 7, dtype), {})
    assert got.dtype == as_dtype(dtype).numpy
    np.testing.assert_array_equal(got, np.arange(3, 100, 7))


def test_full_takes_the_dtype_of_its_number():
    assert ow.full((2,), 1).dtype.name == "i64"
    assert ow.full((2,), 1.0).dtype.name == "f32"
    assert ow.full((2,), True).dtype.name == "bool"
    got = evaluate(ow.full((2, 3), 0.1, "bf16"), {})
    np.testing.assert_array_equal(got, np.full((2, 3), 0.1, as_dtype("bf16").numpy))
    assert ow.full(3, 0).shape == (3,)
    assert ow.full((), 7).shape == ()


def test_equal_ones_are_one():
    assert ow.arange(5) is ow.arange(0, 5) is ow.arange(0, 5, 1)
    assert ow.full((2,), 1.0) is ow.full([2], 1, "f32")
    assert ow.full((2,), 0.0) is not ow.full((2,), -0.0)
    assert np.signbit(evaluate(ow.full((2,), -0.0), {})).all()
    assert not np.signbit(evaluate(ow.full((2,), 0.0), {})).any()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ow.arange(0, 5, 0), ow.ShapeError, "the step is 0"),
        (lambda: ow.arange("5"), ow.DTypeError, "finite Python numbers"),  # type: ignore[arg-type]
        (lambda: ow.arange(float("inf")), ow.DTypeError, "finite Python numbers, not inf"),
        (lambda: ow.arange(1 << 70), ow.ShapeError, "elements have more bytes than the address space"),
        (lambda: ow.arange(1 << 62), ow.ShapeError, "arange: .* has more bytes than the address space"),
        (lambda: ow.full((1 << 40, 1 << 40), 1.0), ow.ShapeError, "full: .* has more bytes than the address space"),
        (lambda: ow.full((1 << 70, 0), 1.0), ow.ShapeError, "full: .* has more bytes than the address space"),
        (lambda: ow.arange(300, dtype="u8"), ow.DTypeError, "arange: 299 does not fit into u8"),
        (lambda: ow.arange(-1, 3, dtype="u8"), ow.DTypeError, "-1 does not fit into u8"),
        (lambda: ow.arange(0.5, 3, dtype="i32"), ow.DTypeError, "0.5 does not fit into i32"),
        (lambda: ow.arange(2, dtype="bool"), ow.DTypeError, "bool has no arithmetic"),
        (lambda: ow.arange(32, dtype="q8_0"), ow.DTypeError, "cannot produce q8_0"),
        (lambda: ow.full((32,), 0, "q8_0"), ow.DTypeError, "cannot produce q8_0"),
        (lambda: ow.full((2, -1), 0), ow.ShapeError, "full: .*negative length"),
        (lambda: ow.full((2,), 256, "u8"), ow.DTypeError, "256 does not fit into u8"),
        (lambda: ow.full((2,), "x"), ow.DTypeError, "is a number, not 'x'"),  # type: ignore[arg-type]
        (lambda: ow.full((2,), ow.input("x", ())), ow.DTypeError, "is a number"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- nodes without sources ------------------------------------------------------------------------------------------


class WithoutCreation(HostDevice):
    """A device of higher priority that does not make values."""

    def _why_not(self, step):
        return f"no kernel for {step.op}" if step.op in ("arange", "full") else super()._why_not(step)


class Last(HostDevice):
    pass


def test_a_graph_may_have_no_leaves():
    graph = Graph(ow.arange(4) * ow.full((4,), 2))
    assert [t.name for t in graph.nodes] == ["arange", "full", "mul"]
    assert graph.leaves == ()
    with ow.Scheduler(HostDevice()) as scheduler:
        program = scheduler.build([graph.outputs[0], ow.full((2,), 1.5), ow.full((0,), 1)])
        for _ in range(2):
            product, made, empty = program.run()
            np.testing.assert_array_equal(product, [0, 2, 4, 6])
            np.testing.assert_array_equal(made, [1.5, 1.5])
            assert empty.shape == (0,)


def test_a_value_out_of_nothing_is_made_where_it_is_read():
    x = ow.input("x", (4,))
    ramp = ow.arange(4, dtype="f32")
    y = ow.exp(x) * ramp
    with ow.Scheduler([WithoutCreation(), Last()]) as scheduler:
        plan = scheduler.partition(y)
        # It does not place other nodes on the only device that supports it ...
        assert plan.device_of(y).name == "withoutcreation"
        assert (plan.device_of(ramp).name, plan.cause_of(ramp)) == ("last", "host")
        got = scheduler.build(y).run({"x": np.zeros(4, np.float32)})
        np.testing.assert_array_equal(got, [0, 1, 2, 3])
    with ow.Scheduler([Last(), WithoutCreation()]) as scheduler:
        # ... and where its reader's device can make it, it follows.
        plan = scheduler.partition(y)
        assert (plan.device_of(ramp).name, plan.cause_of(ramp)) == ("last", "reader")


def test_a_value_that_no_device_makes_is_refused_with_reasons():
    class Other(WithoutCreation):
        pass

    with (
        ow.Scheduler([WithoutCreation(), Other()]) as scheduler,
        pytest.raises(ow.UnsupportedOpError, match=r"no device runs arange[^\0]*no kernel for arange"),
    ):
        scheduler.build(ow.neg(ow.arange(4)))


def test_a_value_out_of_nothing_can_be_written_into_a_state():
    state = ow.state("s", (4,))
    with ow.Scheduler(HostDevice()) as scheduler:
        scheduler.build(ow.assign(state, ow.arange(4))).run()
        np.testing.assert_array_equal(ow.read(state), [0, 1, 2, 3])
