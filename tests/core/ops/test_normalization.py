"""Softmax and its kin, layer, RMS, group and Euclidean normalization against torch."""

import numpy as np
import pytest
import torch

import opweave as ow
from opweave.graph import opdef
from opweave.graph.graph import Graph
from opweave.ops.normalization import alibi_slopes
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(9)


def value(tensor):
    return evaluate(tensor, {})


def floats(*shape):
    return RNG.standard_normal(shape)


def op_names(tensor):
    return [t.name for t in Graph(tensor).nodes if not t.is_view]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_softmax_is_torchs(axis):
    x = floats(3, 4, 5) * 4
    got = value(ow.softmax(ow.constant(x), axis))
    np.testing.assert_allclose(got, torch.softmax(torch.from_numpy(x), axis).numpy(), rtol=1e-13)


@pytest.mark.parametrize("mask", [(3, 4, 5), (4, 5), (5,), (3, 1, 1), ()])
@pytest.mark.parametrize("axis", [-1, 0])
def test_softmax_scales_then_masks(mask, axis):
    x, m = floats(3, 4, 5), np.where(RNG.random(mask) < 0.3, -np.inf, floats(*mask))
    m = m if m.shape else np.array(0.5)
    got = value(ow.softmax(ow.constant(x), axis, mask=ow.constant(m), scale=0.25))
    want = torch.softmax(torch.from_numpy(x) * 0.25 + torch.from_numpy(m), axis)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-13)


def test_softmax_does_not_overflow_and_of_nothing_left_is_nan():
    assert value(ow.softmax(ow.constant([1e30, 1e30]))).tolist() == [0.5, 0.5]
    hidden = ow.softmax(ow.constant([1.0, 2.0]), mask=ow.constant([-np.inf, -np.inf]))
    assert np.isnan(value(hidden)).all()


def test_softmax_nodes_work_along_the_last_axis():
    x = ow.input("x", (3, 4, 5))
    for axis in (0, 1, 2):
        node = ow.softmax(x, axis, scale=2)
        assert node.shape == x.shape
        (step,) = [t for t in Graph(node).nodes if not t.is_view]
        assert step.attrs == {"scale": 2.0}
        assert step.shape[-1] == x.shape[axis]
    masked = ow.softmax(x, mask=ow.input("m", (5,), "f16"))
    assert [s.shape for s in masked.srcs] == [x.shape] * 2
    assert op_names(masked) == ["cast", "softmax"]


@pytest.mark.parametrize("device", ["host", "cpu", "torch:cpu", "opencl"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_bool_mask_keeps_where_it_is_true(device, sinks):
    x, keep = np.float32(floats(2, 3, 5)), RNG.random((3, 5)) < 0.6
    keep[:, 0], keep[1] = True, False
    extra = ow.constant(np.zeros(2, np.float32)) if sinks else None
    m = ow.input("m", keep.shape, "bool")
    got = ow.compile(ow.softmax(ow.constant(x), mask=m, sinks=extra), devices=[device])(keep)
    hidden = torch.from_numpy(x).masked_fill(~torch.from_numpy(keep), -torch.inf)
    want = torch.softmax(torch.cat([hidden, torch.zeros(2, 3, 1)], -1) if sinks else hidden, -1)[..., :5]
    np.testing.assert_allclose(got, want.numpy(), rtol=2e-6)  # NaN where everything is hidden, with sinks 0
    assert np.isnan(got[:, 1]).all() != sinks


def test_softmax_refuses():
    x = ow.input("x", (3, 4))
    with pytest.raises(ow.BoundsError, match="softmax: axis 2 is out of range for 2 axes; the operand is input 'x'"):
        ow.softmax(x, 2)
    with pytest.raises(ow.BoundsError):
        ow.softmax(ow.input("n", ()))
    with pytest.raises(ow.ShapeError, match=r"mask .*'m'.* does not broadcast to the shape of .*'x'"):
        ow.softmax(x, mask=ow.input("m", (3,)))
    with pytest.raises(ow.ShapeError, match="does not broadcast"):
        ow.softmax(x, mask=ow.input("m", (2, 3, 4)))
    with pytest.raises(ow.DTypeError, match="0 keeps, -inf hides"):
        ow.softmax(x, mask=ow.input("m", (4,), "i32"))
    with pytest.raises(ow.DTypeError, match="max_bias multiplies a mask that holds minus the distances"):
        ow.softmax(ow.input("h", (2, 3, 4)), mask=ow.input("m", (4,), "bool"), max_bias=8)
    with pytest.raises(ow.DTypeError, match="scale is a number"):
        opdef.build("softmax", x, scale="small")


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_layer_norm_is_torchs(weight, bias, eps):
    x, w, b = floats(2, 3, 7), floats(7) if weight else None, floats(7) if bias else None
    ours = [None if v is None else ow.constant(v) for v in (x, w, b)]
    got = value(ow.layer_norm(ours[0], ours[1], ours[2], eps))
    tensors = [None if v is None else torch.from_numpy(v) for v in (w, b)]
    want = torch.nn.functional.layer_norm(torch.from_numpy(x), (7,), *tensors, eps=eps)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rms_norm_is_torchs(weight, eps):
    x, w = floats(2, 3, 7), floats(7) if weight else None
    got = value(ow.rms_norm(ow.constant(x), None if w is None else ow.constant(w), eps=eps))
    want = torch.nn.functional.rms_norm(torch.from_numpy(x), (7,), None if w is None else torch.from_numpy(w), eps=eps)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-12)


def test_operands_are_promoted_and_defaults_filled():
    x, w = ow.input("x", (3, 4), "f16"), ow.input("w", (4,))
    assert ow.layer_norm(x, w).dtype.name == "f32"
    assert ow.layer_norm(x).dtype.name == "f16"
    assert ow.layer_norm(x) is ow.layer_norm(x, eps=1e-5)
    assert ow.rms_norm(x) is ow.rms_norm(x, eps=1e-6)
    assert ow.rms_norm(ow.input("i", (4,), "i32")).dtype.name == "f32"
    assert op_names(ow.layer_norm(ow.input("y", (3, 4)), bias=w)) == ["layer_norm", "add"]


@pytest.mark.parametrize("norm", [ow.layer_norm, ow.rms_norm])
def test_norms_refuse_parameters_that_do_not_fit(norm):
    x = ow.input("x", (3, 4))
    for shape in ((3,), (1,), (3, 4), ()):
        with pytest.raises(ow.ShapeError, match=rf"{norm.__name__}: weight and bias must have shape \(4,\)"):
            norm(x, ow.input("w", shape))
    with pytest.raises(ow.ShapeError, match=f"{norm.__name__}: a number has no last axis"):
        norm(ow.input("n", ()))
    with pytest.raises(ow.ShapeError, match="bias must have shape"):
        ow.layer_norm(x, bias=ow.input("b", (3,)))
    with pytest.raises(ow.DTypeError, match="does not take q4_0"):
        norm(ow.input("x", (3, 32)), ow.input("q", (32,), "q4_0"))


# --- softmax by heads -----------------------------------------------------------------------------------------------


def test_slopes_are_those_of_the_paper():
    np.testing.assert_allclose(alibi_slopes(8, 8), 0.5 ** np.arange(1, 9), rtol=1e-15)
    np.testing.assert_allclose(alibi_slopes(16, 8), 0.5 ** (np.arange(1, 17) / 2), rtol=1e-15)
    # 12 heads: those of 8, then every other one of 16.
    want = np.concatenate([0.5 ** np.arange(1, 9), 0.5 ** (np.array([1, 3, 5, 7]) / 2)])
    np.testing.assert_allclose(alibi_slopes(12, 8), want, rtol=1e-15)
    assert alibi_slopes(5, 0).tolist() == [1] * 5


def test_alibi_scales_the_mask_of_each_head():
    heads, n = 6, 7
    x = floats(2, heads, n, n)
    distance = np.arange(n)[:, None] - np.arange(n)
    mask = np.where(distance < 0, -np.inf, -distance)
    got = value(ow.softmax(ow.constant(x), mask=ow.constant(mask), scale=0.5, max_bias=8))
    slopes = torch.from_numpy(alibi_slopes(heads, 8))[:, None, None]
    want = torch.softmax(torch.from_numpy(x) * 0.5 + slopes * torch.from_numpy(mask), -1)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_sinks_take_part_in_the_denominator_only(masked):
    x, sinks = floats(2, 3, 4, 5) * 3, floats(3) * 3
    mask = np.where(RNG.random((4, 5)) < 0.3, -np.inf, 0.0) if masked else np.zeros((4, 5))
    given = ow.constant(mask) if masked else None
    got = value(ow.softmax(ow.constant(x), mask=given, sinks=ow.constant(sinks)))
    extra = torch.from_numpy(sinks)[:, None, None].expand(2, 3, 4, 1)
    want = torch.softmax(torch.cat([torch.from_numpy(x + mask), extra], -1), -1)[..., :-1]
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-12)


def test_with_a_sink_rows_may_be_hidden_as_a_whole():
    x = ow.constant(np.zeros((1, 1, 2)))
    hidden = ow.constant(np.full((1, 1, 2), -np.inf))
    assert value(ow.softmax(x, mask=hidden, sinks=ow.constant([0.0]))).tolist() == [[[0, 0]]]
    assert value(ow.softmax(x, sinks=ow.constant([1e4]))).tolist() == [[[0, 0]]]


def test_softmax_of_heads_nodes():
    x, m, sinks = ow.input("x", (2, 3, 4, 5), "f16"), ow.input("m", (4, 5)), ow.input("s", (3,))
    node = ow.softmax(x, mask=m, sinks=sinks, max_bias=8)
    assert node.name == "head_softmax"
    assert [s.shape for s in node.srcs] == [(2, 3, 4, 5), (3,), (2, 3, 4, 5)]
    assert {s.dtype.name for s in node.srcs} == {"f16"}
    assert node.attrs == {"scale": 1.0, "max_bias": 8.0}
    assert ow.softmax(x, mask=m, max_bias=0.0).name == "softmax"
    assert ow.softmax(x, mask=m, max_bias=8) is ow.softmax(x, mask=m, max_bias=8)


def test_softmax_of_heads_refuses():
    x, m = ow.input("x", (3, 4, 5)), ow.input("m", (4, 5))
    with pytest.raises(ow.ShapeError, match="max_bias scales the mask, and there is none"):
        ow.softmax(x, max_bias=8)
    with pytest.raises(ow.ShapeError, match="heads, queries, keys"):
        ow.softmax(ow.input("y", (4, 5)), mask=m, max_bias=8)
    with pytest.raises(ow.ShapeError, match="the axis is the last one"):
        ow.softmax(x, 0, sinks=ow.input("s", (3,)))
    with pytest.raises(ow.ShapeError, match="one logit for each head"):
        ow.softmax(x, sinks=ow.input("s", (4,)))
    with pytest.raises(ow.DTypeError, match="the sinks must be of a float type"):
        ow.softmax(x, sinks=ow.input("s", (3,), "i32"))


# --- log_softmax, groups, Euclidean ---------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_log_softmax_is_torchs(axis):
    x = floats(3, 4, 5) * 50
    got = value(ow.log_softmax(ow.constant(x), axis))
    np.testing.assert_allclose(got, torch.log_softmax(torch.from_numpy(x), axis).numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("eps", [1e-12, 2.0])
def test_l2_norm_is_torchs_normalize(axis, eps):
    x = floats(3, 4, 5)
    x[0] = 0
    got = value(ow.l2_norm(ow.constant(x), axis, eps))
    want = torch.nn.functional.normalize(torch.from_numpy(x), dim=axis, eps=eps)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-12)


@pytest.mark.parametrize(("groups", "rest"), [(1, ()), (3, ()), (1, (5,)), (2, (5,)), (6, (5,)), (3, (4, 3))], ids=str)
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_group_norm_is_torchs(groups, rest, weight, bias):
    x, w, b = floats(2, 6, *rest) + 1, floats(6) if weight else None, floats(6) if bias else None
    our_w, our_b = (None if v is None else ow.constant(v) for v in (w, b))
    got = value(ow.group_norm(ow.constant(x), groups, our_w, our_b, eps=0.01))
    tensors = [None if v is None else torch.from_numpy(v) for v in (w, b)]
    want = torch.nn.functional.group_norm(torch.from_numpy(x), groups, *tensors, eps=0.01)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-11, atol=1e-12)


def test_group_norm_refuses():
    x = ow.input("x", (2, 6, 4))
    assert ow.group_norm(x, np.int64(2)) is ow.group_norm(x, 2)  # type: ignore[arg-type]
    for groups in (0, 4, 7):
        with pytest.raises(ow.ShapeError, match=f"channels make {groups} equal groups"):
            ow.group_norm(x, groups)
    with pytest.raises(ow.ShapeError, match=r"groups is an integer, not 2\.0"):
        ow.group_norm(x, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ow.ShapeError, match="group_norm: needs x"):
        ow.group_norm(ow.input("v", (6,)), 2)
    with pytest.raises(ow.ShapeError, match=r"must have shape \(6,\), the channels"):
        ow.group_norm(x, 2, ow.input("w", (4,)))
    with pytest.raises(ow.ShapeError, match=r"bias must have shape \(6,\)"):
        ow.group_norm(x, 2, bias=ow.input("b", (4,)))


@pytest.mark.parametrize("function", [ow.log_softmax, ow.l2_norm])
def test_functions_along_an_axis_refuse(function):
    with pytest.raises(ow.BoundsError, match="axis 2 is out of range"):
        function(ow.input("x", (3, 4)), 2)
    with pytest.raises(ow.DTypeError, match="does not take q4_0"):
        function(ow.input("q", (3, 32), "q4_0"))
    assert function(ow.input("i", (3,), "i32")).dtype.name == "f32"
