"""Rows by index, and writing into states."""

import gguf
import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave.graph.opdef import OPS
from opweave.runtime.host.device import HostDevice
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(2)


@pytest.mark.parametrize("ids", [[0, 2, 2], [[4, 0], [1, 3]], 3, np.zeros((0,), np.int64), np.array([4], np.int32)])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3)])
def test_embedding_takes_rows(ids, shape):
    table = RNG.standard_normal(shape).astype(np.float32)
    node = ow.embedding(ow.constant(table), ids)
    got = evaluate(node, {})
    assert got.shape == node.shape
    np.testing.assert_array_equal(got, table[np.asarray(ids)])


@pytest.mark.parametrize("dtype", ["q4_0", "q8_0", "q6_k"])
def test_rows_of_quantized_tables_come_out_decoded(dtype):
    t = as_dtype(dtype)
    kind = getattr(gguf.GGMLQuantizationType, dtype.upper())
    data = RNG.integers(0, 64, (7, 2 * t.itemsize), np.uint8)
    node = ow.embedding(ow.input("w", (7, 2 * t.block), dtype), ow.input("ids", (3,), "i64"))
    assert node.dtype.name == "f32"
    assert node.attrs == {"blocks": t}
    got = OPS["embedding"].reference(data, np.array([6, 0, 6]), **node.attrs)
    np.testing.assert_array_equal(got, gguf.quants.dequantize(data, kind)[[6, 0, 6]])


@pytest.mark.parametrize("bad", [-1, 5, 2**31, -(2**40)])
def test_indices_outside_are_named(bad):
    ids = np.array([[0, 1], [bad, 2]])
    table = ow.constant(np.zeros((5, 3), np.float32))
    with pytest.raises(ow.BoundsError, match=rf"embedding: index {bad} \(number 2\) is outside of 0 \.\. 4"):
        evaluate(ow.embedding(table, ids), {})
    state = ow.state("s", (5, 3))
    node = ow.index_copy(state, ids.reshape(-1), 0.0)
    with pytest.raises(ow.BoundsError, match=rf"index_copy: index {bad} \(number 2\)"):
        evaluate(node, {state: np.zeros((5, 3), np.float32)})


@pytest.mark.parametrize("dtype", ["f32", "i16", "bool", "u8"])
def test_ids_of_other_types_are_refused(dtype):
    ids = ow.input("ids", (3,), dtype)
    with pytest.raises(ow.DTypeError, match=r"embedding: ids are i32 or i64; cast them.*'ids'"):
        ow.embedding(ow.input("t", (5, 3)), ids)
    with pytest.raises(ow.DTypeError, match="index_copy: ids are i32 or i64"):
        ow.index_copy(ow.state("s", (5, 3)), ids, 0.0)


def test_ids_are_known_as_indices():
    assert OPS["embedding"].indices == OPS["index_copy"].indices == (1,)
    assert OPS["argmax"].index_out


def test_index_copy_returns_the_next_version():
    state = ow.state("cache", (5, 3))
    rows = RNG.standard_normal((2, 3)).astype(np.float32)
    after = ow.index_copy(state, [4, 1], rows)
    assert (after.shape, after.dtype, after.memory) == (state.shape, state.dtype, state)
    before = RNG.standard_normal((5, 3)).astype(np.float32)
    want = before.copy()
    want[[4, 1]] = rows
    np.testing.assert_array_equal(evaluate(after, {state: before}), want)
    second = ow.index_copy(after, [0], 7.0)
    want[0] = 7
    np.testing.assert_array_equal(evaluate(second, {state: before}), want)


def test_rows_broadcast_and_take_the_states_dtype():
    state = ow.state("cache", (5, 3), "f16")
    node = ow.index_copy(state, [4, 1], ow.input("row", (3,)))
    assert node.srcs[2].shape == (2, 3)
    assert node.srcs[2].dtype.name == "f16"


def test_writing_a_window_of_a_state():
    state = ow.state("cache", (2, 5, 3))
    before = np.zeros((2, 5, 3), np.float32)
    after = ow.index_copy(state[1], [2], 5.0)
    assert after.shape == (2, 5, 3)
    want = before.copy()
    want[1, 2] = 5
    np.testing.assert_array_equal(evaluate(after, {state: before}), want)
    after = ow.assign(after[:, ::2, 1], ow.constant(np.array([[1], [2]], np.int32)))
    want[:, ::2, 1] = [[1], [2]]
    np.testing.assert_array_equal(evaluate(after, {state: before}), want)


def test_assign_of_a_number():
    state = ow.state("total", ())
    assert evaluate(ow.assign(state, state + 2.5), {state: np.array(1, np.float32)}) == 3.5
    assert evaluate(ow.assign(state, 4), {state: np.array(1, np.float32)}) == 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda s: ow.assign(ow.input("x", (5, 3)), 1.0), ow.HazardError, "assign writes into .* must be a state"),
        (lambda s: ow.index_copy(s + 1.0, [0], 1.0), ow.HazardError, "must be a state"),
        (lambda s: ow.assign(np.zeros(3), 1.0), ow.DTypeError, r"writes into a state \(ow\.state\)"),
        (lambda s: ow.assign(s, np.zeros((4, 3))), ow.ShapeError, "assign: .* does not broadcast"),
        (lambda s: ow.assign(s[0].broadcast_to((2, 3)), 1.0), ow.LayoutError, "share bytes"),
        (lambda s: ow.index_copy(s, [[0]], 1.0), ow.ShapeError, r"ids \(m,\)"),
        (lambda s: ow.index_copy(s, [0], np.zeros((2, 3))), ow.ShapeError, "index_copy: .* does not broadcast"),
        (lambda s: ow.embedding(1.0, [0]), ow.ShapeError, "embedding: a number has no rows"),
        (lambda s: ow.embedding(ow.input("q", (32,), "q4_0"), [0]), ow.LayoutError, "cut the blocks"),
        (lambda s: ow.assign(s, ow.input("q", (3, 32), "q4_0")), ow.DTypeError, "does not take q4_0"),
    ],
)
def test_what_cannot_be_written_or_read(make, error, message):
    with pytest.raises(error, match=message):
        make(ow.state("s", (5, 3)))


# --- elements along an axis -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "count", "axis"),
    [
        ((5,), (3,), 0), ((4, 5), (4, 2), 1), ((4, 5), (7, 5), 0), ((4, 5), (1, 5), 0), ((1, 5), (4, 2), 1),
        ((4, 5), (9,), None),
    ],
)  # fmt: skip
def test_take_along_axis_is_numpys_and_torchs(shape, count, axis):
    array = RNG.standard_normal(shape).astype(np.float32)
    ids = RNG.integers(0, 4 if axis != 1 else 5, count)
    node = ow.take_along_axis(ow.constant(array), ow.constant(ids), axis)
    want = np.take_along_axis(array, ids, axis)
    assert node.shape == want.shape
    np.testing.assert_array_equal(evaluate(node, {}), want)
    if axis is not None and shape[0] == count[0]:
        other = torch.gather(torch.from_numpy(array), axis, torch.from_numpy(ids))
        np.testing.assert_array_equal(evaluate(node, {}), other.numpy())


def test_take_along_axis_undoes_a_sort():
    array = RNG.standard_normal((6, 9)).astype(np.float16)
    order = ow.constant(np.argsort(array, -1))
    np.testing.assert_array_equal(evaluate(ow.take_along_axis(ow.constant(array), order), {}), np.sort(array, -1))


# --- adding up by id ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [(), (7,), (3, 4)])
@pytest.mark.parametrize("rest", [(), (5,), (2, 3)])
def test_index_add_is_torchs_and_the_counterpart_of_embedding(count, rest):
    ids = RNG.integers(0, 4, count)
    rows = RNG.standard_normal((*count, *rest)).astype(np.float32)
    node = ow.index_add(ids, rows, 6)
    assert node.shape == (6, *rest)
    got = evaluate(node, {})
    want = torch.zeros((6, *rest)).index_add(
        0, torch.from_numpy(ids.reshape(-1)), torch.from_numpy(rows.reshape(-1, *rest))
    )
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-6)
    # <embedding(t, ids), rows> = <t, index_add(ids, rows)>, by which one is the gradient of the other
    table = RNG.standard_normal((6, *rest)).astype(np.float32)
    picked = evaluate(ow.embedding(ow.constant(table), ids), {})
    np.testing.assert_allclose(np.sum(picked * rows), np.sum(table * got), rtol=1e-4, atol=1e-5)


def test_half_types_add_up_in_single_precision():
    ids, rows = np.zeros(4096, np.int64), np.full((4096, 1), 0.25, np.float16)
    assert evaluate(ow.index_add(ids, rows, 1), {})[0, 0] == 1024


# --- regions --------------------------------------------------------------------------------------------------------


def test_regions_of_a_tensor_are_replaced_and_added_to_in_a_copy():
    array = RNG.standard_normal((4, 5)).astype(np.float32)
    part = RNG.standard_normal((2, 3)).astype(np.float32)
    x = ow.constant(array)
    replaced, added = array.copy(), array.copy()
    replaced[1:3, 2:] = part
    added[1:3, 2:] += part
    np.testing.assert_array_equal(evaluate(ow.set_region(x, part, (1, 2)), {}), replaced)
    np.testing.assert_allclose(evaluate(ow.add_region(x, part, (1, 2)), {}), added, rtol=1e-6)
    np.testing.assert_array_equal(evaluate(x, {}), array)


def test_a_region_takes_the_dtype_and_gets_the_axes_of_its_tensor():
    x = ow.input("x", (3, 4, 5), "f16")
    node = ow.set_region(x, ow.input("v", (2,)), (1, 2, 3))
    assert (node.srcs[1].shape, node.srcs[1].dtype.name) == ((1, 1, 2), "f16")
    assert ow.set_region(x, 0.0, (0, 0, 0)).srcs[1].shape == (1, 1, 1)
    assert ow.add_region(ow.input("y", (9,)), 1.0, 3).attrs == {"offsets": (3,)}


def test_accumulate_adds_to_a_state():
    state = ow.state("sum", (4, 3), "f16")
    before = np.arange(12, dtype=np.float16).reshape(4, 3)
    after = ow.accumulate(state[1:3], ow.input("row", (3,)))
    assert after.memory is state
    assert after.shape == (4, 3)
    want = before.copy()
    want[1:3] += np.float16(0.5)
    row = np.full(3, 0.5, np.float32)
    np.testing.assert_array_equal(evaluate(after, {state: before, after.srcs[1].root.srcs[0].root: row}), want)


def test_accumulating_twice_adds_twice():
    state = ow.state("twice", (2,), "i8")
    node = ow.accumulate(ow.accumulate(state, 100), 100)
    with ow.Scheduler(HostDevice()) as scheduler:
        program = scheduler.build(node)
        np.testing.assert_array_equal(program.run(), np.array([200, 200], np.int32).astype(np.int8))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: ow.take_along_axis(x, [[0, 1]], 2), ow.BoundsError, "take_along_axis: axis 2"),
        (lambda x: ow.take_along_axis(x, [0, 1], 1), ow.ShapeError, "must agree with the operand in all axes"),
        (lambda x: ow.take_along_axis(x, [[0], [1], [1]], 1), ow.ShapeError, "take_along_axis: .* do not broadcast"),
        (lambda x: ow.take_along_axis(x, x), ow.DTypeError, "ids are i32 or i64"),
        (lambda x: ow.index_add([0, 1], x, 3), ow.ShapeError, "one row for each id"),
        (lambda x: ow.index_add([0] * 5, x, -1), ow.ShapeError, "-1 rows are less than none"),
        (lambda x: ow.index_add([0] * 5, x, 1.5), ow.ShapeError, "the number of rows is an integer"),  # type: ignore[arg-type]
        (lambda x: ow.index_add([0], np.array([True]), 1), ow.DTypeError, "bool has no arithmetic"),
        (lambda x: ow.set_region(x, x, (0, 1)), ow.BoundsError, r"set_region: the region 1 \.\. 3 reaches out"),
        (lambda x: ow.set_region(x, x, (-1, 0)), ow.BoundsError, "set_region: the region -1"),
        (lambda x: ow.set_region(x, x, (0,)), ow.ShapeError, "an offset for each axis"),
        (lambda x: ow.set_region(x, x[None], (0, 0)), ow.ShapeError, "a value of no more axes"),
        (lambda x: ow.set_region(x, 1.0, (0.5, 0)), ow.ShapeError, "an offset is an integer"),
        (lambda x: ow.add_region(np.array([True]), True, 0), ow.DTypeError, "bool has no arithmetic"),
        (lambda x: ow.accumulate(x, 1.0), ow.HazardError, "must be a state"),
        (lambda x: ow.accumulate(ow.state("b", (2,), "bool"), True), ow.DTypeError, "bool has no arithmetic"),
        (lambda x: ow.accumulate(ow.state("n", (2,)), np.zeros(3)), ow.ShapeError, "does not broadcast"),
    ],
)  # fmt: skip
def test_what_does_not_fit_an_index_or_a_region_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make(ow.input("x", (5, 3)))


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_indices_outside_of_an_axis_are_named(bad):
    with pytest.raises(ow.BoundsError, match=rf"take_along_axis: index {bad} \(number 1\) is outside of 0 \.\. 3"):
        evaluate(ow.take_along_axis(np.zeros((2, 4), np.float32), [[0, bad], [1, 1]], 1), {})
    with pytest.raises(ow.BoundsError, match=rf"index_add: index {bad} \(number 1\)"):
        evaluate(ow.index_add([0, bad], np.zeros((2, 4), np.float32), 4), {})


def test_writing_nothing_leaves_the_state_as_it_is():
    state, ids, rows = ow.state("s", (4, 3)), np.zeros(0, np.int64), np.zeros((0, 3), np.float32)
    assert ow.index_copy(state, ids, rows) is state
    assert ow.index_copy(state[1:3], ids, rows) is state
    assert ow.assign(state[2:2], rows) is state
    later = ow.assign(state, 1.0)
    assert ow.accumulate(later[2:2], rows) is later
    with pytest.raises(ow.HazardError, match="must be a state"):
        ow.index_copy(ow.input("x", (4, 3)), ids, rows)


def test_writing_an_input_without_elements_gives_the_same_version_which_depends_on_it():
    state, ids, rows = ow.state("s", (4, 3)), ow.input("i", (0,), "i64"), ow.input("r", (0, 3))
    later = ow.assign(state, 1.0)
    made = [
        (ow.index_copy(state, ids, rows), state, {state, ids, rows}),
        (ow.index_copy(state[1:3], ids, rows), state, {state, ids, rows}),
        (ow.index_copy(state, ids, 1.0), state, {state, ids}),
        (ow.assign(state[2:2], rows), state, {state, rows}),
        (ow.assign(ow.index_copy(state, ids, 1.0)[2:2], rows), state, {state, ids, rows}),
        (ow.accumulate(later[2:2], rows), later, {state, rows}),
    ]
    for version, root, leaves in made:
        assert (version.root, version.shape, version.offset) == (root, (4, 3), 0)
        assert version.is_dense
        assert {t for t in ow.Graph(version).leaves if t.leaf is not None and t.leaf.kind != "constant"} == leaves
    with pytest.raises(ow.HazardError, match="must be a state"):
        ow.index_copy(ow.input("x", (4, 3)), ids, rows)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (4, 0, 3)])
def test_states_without_elements_are_written_like_others(shape):
    state = ow.state("s", shape)
    assert ow.assign(state, 1.0) is state
    assert ow.assign(state.T, 1.0) is state
    if len(shape) == 2:
        rows = np.zeros((0, *shape[1:]), np.float32)
        assert ow.index_copy(state, np.zeros(0, np.int64), rows) is state


def test_rows_are_replaced_in_a_new_tensor():
    x, rows = RNG.standard_normal((5, 3)), RNG.standard_normal((2, 3))
    got = evaluate(ow.set_rows(ow.constant(x), np.array([4, 1]), ow.constant(rows)), {})
    np.testing.assert_array_equal(got[[4, 1]], rows)
    np.testing.assert_array_equal(got[[0, 2, 3]], x[[0, 2, 3]])
    last = evaluate(ow.set_rows(ow.constant(x), np.array([2, 2]), ow.constant(rows)), {})
    np.testing.assert_array_equal(last[2], rows[1])
    with pytest.raises(ow.BoundsError, match="set_rows: index 5"):
        evaluate(ow.set_rows(ow.constant(x), np.array([5]), 0.0), {})
    with pytest.raises(ow.ShapeError, match="set_rows"):
        ow.set_rows(ow.constant(x), np.array([1]), ow.constant(np.ones((2, 3))))
    with pytest.raises(ow.DTypeError, match="set_rows: ids are i32 or i64"):
        ow.set_rows(ow.constant(x), np.array([1.0]), 0.0)


def test_gradients_of_replaced_rows_are_those_of_torch():
    x, rows, ids = RNG.standard_normal((5, 3)), RNG.standard_normal((2, 3)), np.array([4, 1])
    a, b = ow.input("rows_replaced", (5, 3), "f64"), ow.input("rows_new", (2, 3), "f64")
    loss = ow.sum(ow.square(ow.set_rows(a, ids, b)))
    got = [evaluate(g, {a: x, b: rows}) for g in ow.gradients(loss, [a, b])]
    u, v = (torch.from_numpy(t).requires_grad_() for t in (x, rows))
    u.index_copy(0, torch.from_numpy(ids), v).square().sum().backward()
    for mine, theirs in zip(got, (u.grad, v.grad), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-12)
    with pytest.raises(ow.HazardError, match="set_rows: index 4 repeats"):
        ow.gradients(ow.sum(ow.set_rows(a, np.array([4, 4]), b)), [b])
