"""Attention against torch's scaled_dot_product_attention, and what torch has no word for against its formula."""

import numpy as np
import pytest
import torch

import opweave as ow
from opweave.ops.normalization import alibi_slopes
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(21)


def value(tensor):
    return evaluate(tensor, {})


def floats(*shape):
    return RNG.standard_normal(shape)


def operands(heads=4, groups=2, tokens=5, keys=7, size=6, out=3, batch=2):
    return floats(batch, heads, tokens, size), floats(batch, groups, keys, size), floats(batch, groups, keys, out)


def attend(arrays, *args, **options):
    return value(ow.attention(*[ow.constant(a) for a in arrays], *args, **options))


def torchs(arrays, **options):
    tensors = [torch.from_numpy(a) for a in arrays]
    return torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True, **options).numpy()


def softmax_of(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_torchs(heads, groups, scale):
    arrays = operands(heads, groups)
    np.testing.assert_allclose(attend(arrays, scale=scale), torchs(arrays, scale=scale), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 5, 7), (2, 4, 5, 7), (7,), (5, 1)])
def test_the_mask_is_added(shape):
    arrays = operands()
    mask = floats(*shape)
    if shape[-1] > 1:
        mask[..., 1:3] = -np.inf
    want = torchs(arrays, attn_mask=torch.from_numpy(mask).expand(2, 4, 5, 7))
    np.testing.assert_allclose(attend(arrays, ow.constant(mask)), want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("device", ["host", "cpu", "torch:cpu", "opencl"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 5, 7), (2, 4, 5, 7), (7,)])
def test_a_bool_mask_is_torchs(device, shape):
    arrays = [np.float32(a) for a in operands()]
    keep = RNG.random(shape) < 0.6
    keep[..., 2] = True
    q, k, v = arrays
    node = ow.attention(q, k, v, ow.input("keep", shape, "bool"))
    want = torchs(arrays, attn_mask=torch.from_numpy(keep).expand(2, 4, 5, 7))
    np.testing.assert_allclose(ow.compile(node, devices=[device])(keep), want, rtol=1e-5, atol=1e-6)


def test_a_query_whose_keys_are_all_hidden_gives_nan_and_with_sinks_0():
    keep = np.ones((5, 7), bool)
    keep[2] = False
    for sinks, hidden in ((None, np.nan), (ow.constant(np.zeros(4)), 0.0)):
        got = attend(operands(), ow.constant(keep), sinks=sinks)
        np.testing.assert_array_equal(got[:, :, 2], np.full_like(got[:, :, 2], hidden))
        assert np.isfinite(np.delete(got, 2, 2)).all()


def test_causal_is_torchs_for_as_many_keys_as_queries():
    arrays = operands(keys=5)
    np.testing.assert_allclose(attend(arrays, causal=True), torchs(arrays, is_causal=True), rtol=1e-11, atol=1e-13)


def test_causal_lets_the_last_query_see_all_keys():
    arrays = operands(tokens=3, keys=7)
    want = torchs(arrays, attn_mask=torch.ones(3, 7, dtype=torch.bool).tril(4))
    np.testing.assert_allclose(attend(arrays, causal=True), want, rtol=1e-11, atol=1e-13)
    earlier = attend(operands(tokens=4, keys=2), causal=True)
    assert np.isnan(earlier[:, :, :2]).all()
    assert np.isfinite(earlier[:, :, 2:]).all()


def test_soft_cap_bounds_the_scores():
    q, k, v = operands(heads=2, groups=2)
    scores = np.matmul(q, k.swapaxes(-1, -2)) * 0.8
    want = np.matmul(softmax_of(1.5 * np.tanh(scores / 1.5)), v)
    np.testing.assert_allclose(attend((q, k, v), scale=0.8, soft_cap=1.5), want, rtol=1e-11)


@pytest.mark.parametrize("heads", [1, 4, 6])
def test_max_bias_gives_each_head_a_slope(heads):
    arrays = operands(heads, 1, tokens=7)
    distance = -np.abs(np.arange(7)[:, None] - np.arange(7)).astype(np.float64)
    slopes = alibi_slopes(heads, 8.0)[:, None, None]
    want = torchs(arrays, attn_mask=torch.from_numpy(np.broadcast_to(slopes * distance, (2, heads, 7, 7)).copy()))
    np.testing.assert_allclose(attend(arrays, ow.constant(distance), max_bias=8.0), want, rtol=1e-11, atol=1e-13)


def test_a_sink_takes_its_share_and_gives_nothing():
    q, k, v = operands()
    sinks = floats(4)
    # The same as one more key of that score, with a value of zeros.
    k2, v2 = (np.repeat(a, 2, 1) for a in (k, v))
    scores = np.matmul(q, k2.swapaxes(-1, -2)) / np.sqrt(6)
    extra = np.broadcast_to(sinks[:, None, None], (2, 4, 5, 1))
    want = np.matmul(softmax_of(np.concatenate([scores, extra], -1))[..., :-1], v2)
    np.testing.assert_allclose(attend((q, k, v), sinks=ow.constant(sinks)), want, rtol=1e-11)
    hidden = attend((q, k, v), ow.constant(np.full((5, 7), -np.inf)), sinks=ow.constant(sinks))
    assert not hidden.any()


def test_of_no_visible_key_it_is_nan():
    assert np.isnan(attend(operands(), ow.constant(np.full((5, 7), -np.inf)))).all()


def test_nodes_are_normalised():
    q, k, v = (ow.input(n, (1, 4, 3, 16), t) for n, t in (("q", "f16"), ("k", "f32"), ("v", "i32")))
    node = ow.attention(q, k, v)
    assert node.dtype.name == "f32"
    assert node is ow.attention(q, k, v, scale=0.25, causal=False)
    mask = ow.input("m", (3, 3), "f16")
    masked = ow.attention(k, k, k, mask, sinks=ow.input("s", (4,)))
    assert [s.shape for s in masked.srcs] == [(1, 4, 3, 16)] * 3 + [(1, 4, 3, 3), (4,)]
    assert masked.attrs["masked"]
    assert {s.dtype.name for s in masked.srcs} == {"f32"}


def test_refusals():
    q, k = ow.input("q", (1, 4, 3, 8)), ow.input("k", (1, 3, 5, 8))
    with pytest.raises(ow.ShapeError, match=r"multiple of the groups, not input 'q' f32\[1, 4, 3, 8\]"):
        ow.attention(q, k, k)
    with pytest.raises(ow.ShapeError, match="needs q"):
        ow.attention(ow.input("x", (4, 3, 8)), k, k)
    with pytest.raises(ow.ShapeError, match="needs q"):
        ow.attention(q, ow.input("k", (1, 2, 5, 8)), ow.input("v", (1, 2, 6, 8)))
    k = ow.input("k", (1, 2, 5, 8))
    with pytest.raises(ow.ShapeError, match=r"mask input 'm' .* does not broadcast"):
        ow.attention(q, k, k, ow.input("m", (4, 5)))
    with pytest.raises(ow.DTypeError, match="0 keeps, -inf hides"):
        ow.attention(q, k, k, ow.input("m", (3, 5), "i32"))
    with pytest.raises(ow.DTypeError, match="max_bias multiplies a mask that holds minus the distances"):
        ow.attention(q, k, k, ow.input("m", (3, 5), "bool"), max_bias=8.0)
    with pytest.raises(ow.ShapeError, match=r"needs \(4,\) sinks"):
        ow.attention(q, k, k, sinks=ow.input("s", (2,)))
    with pytest.raises(ow.ShapeError, match="there is no mask"):
        ow.attention(q, k, k, max_bias=8.0)
    with pytest.raises(ow.DTypeError, match="soft_cap is a number"):
        ow.attention(q, k, k, soft_cap="much")  # type: ignore[arg-type]
    with pytest.raises(ow.DTypeError, match="not negative"):
        ow.attention(q, k, k, soft_cap=-1)
    with pytest.raises(ow.DTypeError, match="finite and not negative"):
        ow.attention(q, k, k, soft_cap=float("nan"))
    with pytest.raises(ow.DTypeError, match="does not take q8_0"):
        ow.attention(ow.input("q", (1, 4, 3, 32), "q8_0"), k, k)


@pytest.mark.parametrize("dtype", ["i32", "i64", "u8"])
def test_masks_of_integers_are_told_of_bool(dtype):
    mask, q, x = ow.input("m", (3, 3), dtype), ow.input("q", (1, 1, 3, 4)), ow.input("x", (3, 3))
    for build in (lambda: ow.attention(q, q, q, mask), lambda: ow.softmax(x, mask=mask)):
        with pytest.raises(ow.DTypeError, match=r"mask must be of bool .*float type.*astype\('bool'\)"):
            build()
