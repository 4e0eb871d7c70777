"""The causal convolution against torch's conv1d, the selective scan against the loop of the Mamba paper's code."""

import numpy as np
import pytest
import torch

import opweave as ow
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(24)


def value(tensor):
    return evaluate(tensor, {})


def floats(*shape):
    return RNG.standard_normal(shape)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_causal_conv1d_is_torchs_depthwise_convolution(k, bias, tokens):
    x, w, b = floats(2, 3, tokens), floats(3, k), floats(3) if bias else None
    ours = [None if a is None else ow.constant(a) for a in (x, w, b)]
    tensors = [None if a is None else torch.from_numpy(a) for a in (x, w[:, None], b)]
    want = torch.nn.functional.conv1d(*tensors, padding=k - 1, groups=3)[..., :tokens]
    np.testing.assert_allclose(value(ow.causal_conv1d(*ours)), want.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_line_in_two_parts_is_the_whole_line(cut):
    x, w = floats(2, 3, 8), ow.constant(floats(3, 4))
    whole = value(ow.causal_conv1d(ow.constant(x), w))
    head, state = ow.causal_conv1d(ow.constant(x[..., :cut]), w, return_final_states=True)
    assert state.shape == (2, 3, 3)
    tail, last = ow.causal_conv1d(ow.constant(x[..., cut:]), w, initial_states=state, return_final_states=True)
    np.testing.assert_allclose(np.concatenate([value(head), value(tail)], -1), whole, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(value(last), x[..., -3:])


def scan(u, delta, a, b, c, d=None, z=None, delta_bias=None, delta_softplus=False, state=None):
    """In the words of ``selective_scan_ref`` of the paper's code, on torch."""
    u, delta, a, b, c, d, z, delta_bias, state = (
        None if x is None else torch.from_numpy(x) for x in (u, delta, a, b, c, d, z, delta_bias, state)
    )
    if delta_bias is not None:
        delta = delta + delta_bias[..., None]
    if delta_softplus:
        delta = torch.nn.functional.softplus(delta, threshold=1000)
    repeats = u.shape[1] // (b.shape[1] if b.ndim == 4 else 1)
    b, c = (
        m.repeat_interleave(repeats, 1) if m.ndim == 4 else m[:, None].expand(-1, u.shape[1], -1, -1) for m in (b, c)
    )
    x = torch.zeros(u.shape[0], *a.shape, dtype=torch.float64) if state is None else state
    decay = torch.exp(torch.einsum("bdl,dn->bdln", delta, a))
    drive = torch.einsum("bdl,bdnl,bdl->bdln", delta, b, u)
    ys = []
    for i in range(u.shape[2]):
        x = decay[:, :, i] * x + drive[:, :, i]
        ys.append(torch.einsum("bdn,bdn->bd", x, c[..., i]))
    y = torch.stack(ys, 2)
    if d is not None:
        y = y + u * d[:, None]
    if z is not None:
        y = y * torch.nn.functional.silu(z)
    return y.numpy(), x.numpy()


def operands(batch=2, channels=6, tokens=5, n=4, groups=None):
    mixed = (batch, n, tokens) if groups is None else (batch, groups, n, tokens)
    shape = (batch, channels, tokens)
    return floats(*shape), np.abs(floats(*shape)), -np.abs(floats(channels, n)), floats(*mixed), floats(*mixed)


def constants(arrays):
    return [ow.constant(a) for a in arrays]


@pytest.mark.parametrize("groups", [None, 1, 2, 6])
@pytest.mark.parametrize("softplus", [False, True])
def test_selective_scan_is_that_of_the_paper(groups, softplus):
    arrays = operands(groups=groups)
    u, delta, a, b, c = constants(arrays)
    got, last = ow.selective_scan(u, delta, a, b, c, delta_softplus=softplus, return_last_state=True)
    known: dict = dict(zip(("u", "delta", "a", "b", "c"), arrays, strict=True))
    y, h = scan(**known, delta_softplus=softplus)
    np.testing.assert_allclose(value(got), y, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(value(last), h, rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(value(ow.selective_scan(u, delta, a, b, c, delta_softplus=softplus)), value(got))


def test_with_everything():
    arrays = operands()
    d, bias, state, z = floats(6), floats(6), floats(2, 6, 4), floats(2, 6, 5)
    u, delta, a, b, c, skip, gate, shift = constants([*arrays, d, z, bias])
    got = ow.selective_scan(u, delta, a, b, c, skip, gate, shift, True, state=ow.constant(state))
    known: dict = dict(zip(("u", "delta", "a", "b", "c"), arrays, strict=True))
    want, _ = scan(**known, d=d, z=z, delta_bias=bias, delta_softplus=True, state=state)
    np.testing.assert_allclose(value(got), want, rtol=1e-11, atol=1e-12)


def test_a_scan_in_two_parts_is_the_whole_scan():
    u, delta, a, b, c = operands(tokens=7)
    whole, end = ow.selective_scan(u, delta, a, b, c, return_last_state=True)
    parts, state = [], None
    for cut in (slice(0, 3), slice(3, 7)):
        pieces = [x[..., cut].copy() for x in (u, delta, b, c)]
        us, deltas, bs, cs = constants(pieces)
        y, state = ow.selective_scan(us, deltas, a, bs, cs, state=state, return_last_state=True)
        parts.append(value(y))
    np.testing.assert_allclose(np.concatenate(parts, -1), value(whole), rtol=1e-12)
    np.testing.assert_allclose(value(state), value(end), rtol=1e-12)


def test_refusals():
    x, w = ow.input("x", (2, 3, 8)), ow.input("w", (3, 4))
    with pytest.raises(ow.ShapeError, match=r"causal_conv1d: needs x .* and input 'w' f32\[4, 3\]"):
        ow.causal_conv1d(x, ow.input("w", (4, 3)))
    with pytest.raises(ow.ShapeError, match=r"the bias must have shape \(3,\)"):
        ow.causal_conv1d(x, w, ow.input("b", (4,)))
    with pytest.raises(ow.ShapeError, match=r"the elements before must have shape \(2, 3, 3\)"):
        ow.causal_conv1d(x, w, initial_states=ow.input("s", (2, 3, 4)))
    a, b = ow.input("A", (3, 5)), ow.input("B", (2, 5, 8))
    with pytest.raises(ow.ShapeError, match="selective_scan: needs u and delta"):
        ow.selective_scan(x, ow.input("d", (2, 3, 7)), a, b, b)
    with pytest.raises(ow.ShapeError, match="selective_scan: needs u and delta"):
        ow.selective_scan(x, x, a, ow.input("B", (2, 2, 5, 8)), ow.input("C", (2, 2, 5, 8)))
    with pytest.raises(ow.ShapeError, match=r"D must have shape \(3,\)"):
        ow.selective_scan(x, x, a, b, b, ow.input("D", (5,)))
    with pytest.raises(ow.ShapeError, match=r"the state must have shape \(2, 3, 5\)"):
        ow.selective_scan(x, x, a, b, b, state=ow.input("h", (2, 3, 4)))
    with pytest.raises(ow.ShapeError, match="z must have the shape of u"):
        ow.selective_scan(x, x, a, b, b, z=ow.input("z", (3, 8)))
    with pytest.raises(ow.DTypeError, match="does not take q8_0"):
        ow.selective_scan(x, x, ow.input("A", (3, 32), "q8_0"), b, b)


def test_sequences_begin_with_the_states_that_they_name():
    u, delta, a, b, c = constants(operands())
    states, ids = floats(5, 6, 4), np.array([3, 0])
    got = ow.selective_scan(u, delta, a, b, c, state=ow.constant(states), state_ids=ow.constant(ids))
    want = ow.selective_scan(u, delta, a, b, c, state=ow.constant(states[ids]))
    np.testing.assert_array_equal(value(got), value(want))
    with pytest.raises(ow.ShapeError, match="state_ids choose rows of a state"):
        ow.selective_scan(u, delta, a, b, c, state_ids=ow.constant(ids))


@pytest.mark.parametrize("at", [[1], [2, 5], [1, 2, 3, 4, 5]])
def test_snapshots_are_the_last_states_of_shorter_lines(at):
    arrays = operands()
    y, states = ow.selective_scan(*constants(arrays), snapshots=at)
    np.testing.assert_allclose(value(y), value(ow.selective_scan(*constants(arrays))), rtol=1e-12, atol=1e-13)
    assert states.shape == (len(at), 2, 6, 4)
    for i, n in enumerate(at):
        u, delta, a, b, c = arrays
        shorter = constants([u[..., :n], delta[..., :n], a, b[..., :n], c[..., :n]])
        _, last = ow.selective_scan(*shorter, return_last_state=True)
        np.testing.assert_allclose(value(states)[i], value(last), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("at", [[], [0], [2, 2], [6], [3, 1]])
def test_snapshots_ascend_within_the_line(at):
    with pytest.raises(ow.ShapeError, match="snapshots ascend"):
        ow.selective_scan(*constants(operands()), snapshots=at)
