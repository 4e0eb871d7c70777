"""Linear attention against the recurrences of the papers, written as loops in torch."""

import numpy as np
import pytest
import torch

import opweave as ow
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(7)
BATCH, HEADS, TOKENS, SIZE, WIDTH = 2, 3, 6, 4, 5


def floats(*shape):
    return RNG.standard_normal(shape)


def logs(*shape):
    return -RNG.uniform(0.01, 2, shape)


def keys():
    return floats(BATCH, HEADS, TOKENS, SIZE)


def values():
    return floats(BATCH, HEADS, TOKENS, WIDTH)


def states():
    return floats(BATCH, HEADS, SIZE, WIDTH)


def recurrence(step, before, *operands):
    """``step(S, *rows of a token) -> S, y`` for each head of each batch."""
    s, tensors = torch.from_numpy(before.copy()), [torch.from_numpy(x) for x in operands]
    y = torch.empty(BATCH, HEADS, TOKENS, WIDTH, dtype=torch.float64)
    for n in range(BATCH):
        for h in range(HEADS):
            for t in range(TOKENS):
                s[n, h], y[n, h, t] = step(s[n, h], *[x[n, h, t] for x in tensors])
    return y.numpy(), s.numpy()


def check(got, want):
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(evaluate(ours, {}), theirs, rtol=1e-11, atol=1e-11)


def constants(*arrays):
    return [ow.constant(a) for a in arrays]


def test_gated_linear_attention_is_equation_3():
    q, k, v, g, before = keys(), keys(), values(), logs(BATCH, HEADS, TOKENS, SIZE), states()

    def step(s, q, k, v, g):
        s = torch.diag(torch.exp(g)) @ s + torch.outer(k, v)
        return s, q @ s / SIZE**0.5

    got = ow.gated_linear_attention(*constants(q, k, v, g), state=ow.constant(before), return_last_state=True)
    check(got, recurrence(step, before, q, k, v, g))


@pytest.mark.parametrize("per_row", [False, True])
def test_the_gated_delta_rule_moves_what_is_stored_under_a_key_to_the_value(per_row):
    q, k, v, before = keys(), keys(), values(), states()
    g = logs(BATCH, HEADS, TOKENS, *([SIZE] if per_row else []))
    beta = RNG.uniform(0, 1, (BATCH, HEADS, TOKENS))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)

    def step(s, q, k, v, g, beta):
        s = torch.exp(g).reshape(-1, 1) * s
        s = s + beta * torch.outer(k, v - s.T @ k)
        return s, 0.5 * (s.T @ q)

    given = constants(q, k, v, g, beta)
    got = ow.gated_delta_rule(*given, scale=0.5, state=ow.constant(before), return_last_state=True)
    check(got, recurrence(step, before, q, k, v, g, beta))


def test_after_a_full_write_the_key_gives_the_value():
    k, v = keys(), values()
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    none = np.zeros((BATCH, HEADS, TOKENS))
    y = ow.gated_delta_rule(*constants(k, k, v, none, none + 1), scale=1.0)
    np.testing.assert_allclose(evaluate(y, {}), v, rtol=1e-11, atol=1e-11)


def test_rwkv6_reads_the_state_before_the_token_and_its_bonus():
    r, k, v, w, u, before = keys(), keys(), values(), logs(BATCH, HEADS, TOKENS, SIZE), floats(HEADS, SIZE), states()

    def step(s, r, k, v, w, u):
        kv = torch.outer(k, v)
        return torch.exp(w)[:, None] * s + kv, r @ (s + u[:, None] * kv)

    everywhere = np.broadcast_to(u[None, :, None], r.shape).copy()
    got = ow.rwkv6(*constants(r, k, v, w, u), state=ow.constant(before), return_last_state=True)
    check(got, recurrence(step, before, r, k, v, w, everywhere))


def test_rwkv7_is_equation_17_transposed():
    r, k, v, w, before = keys(), keys(), values(), logs(BATCH, HEADS, TOKENS, SIZE), states()
    a, b = keys() / 2, keys() / 2

    def step(s, r, w, k, v, a, b):
        wide = s.T @ torch.diag(torch.exp(w)) + torch.outer(s.T @ a, b) + torch.outer(v, k)
        return wide.T, wide @ r

    got = ow.rwkv7(*constants(r, w, k, v, a, b), state=ow.constant(before), return_last_state=True)
    check(got, recurrence(step, before, r, w, k, v, a, b))


@pytest.mark.parametrize("cut", [0, 1, 4, 6])
def test_a_line_in_two_parts_is_the_whole_line(cut):
    q, k, v, g = keys(), keys(), values(), logs(BATCH, HEADS, TOKENS, SIZE)
    whole, end = ow.gated_linear_attention(*constants(q, k, v, g), return_last_state=True)
    state, parts = ow.constant(np.zeros((BATCH, HEADS, SIZE, WIDTH))), []
    for part in (np.s_[:, :, :cut], np.s_[:, :, cut:]):
        given = constants(*[x[part] for x in (q, k, v, g)])
        y, state = ow.gated_linear_attention(*given, state=state, return_last_state=True)
        parts.append(evaluate(y, {}))
    np.testing.assert_allclose(np.concatenate(parts, 2), evaluate(whole, {}), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(evaluate(state, {}), evaluate(end, {}), rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_refused():
    q, v = ow.input("q", (2, 3, 6, 4)), ow.input("v", (2, 3, 6, 5))
    with pytest.raises(ow.ShapeError, match="needs q and k"):
        ow.linear_attention(q, ow.input("k", (2, 3, 5, 4)), v)
    with pytest.raises(ow.ShapeError, match="the decay must have shape"):
        ow.linear_attention(q, q, v, decay=ow.input("w", (2, 3, 6, 2)))
    with pytest.raises(ow.ShapeError, match="the state must have shape"):
        ow.linear_attention(q, q, v, state=ow.input("s", (2, 3, 5, 4)))
    with pytest.raises(ow.ShapeError, match="the bonus must have shape"):
        ow.rwkv6(q, q, v, q, ow.input("u", (4,)))
    with pytest.raises(ow.ShapeError, match="given together"):
        ow.linear_attention(q, q, v, removal=q)
    with pytest.raises(ow.ShapeError, match="does not go with"):
        ow.linear_attention(q, q, v, bonus=ow.input("u", (3, 4)), removal=q, insertion=q)
    with pytest.raises(ow.ShapeError, match="gated_delta_rule: needs k"):
        ow.gated_delta_rule(q, q, v, q, q)
    with pytest.raises(ow.DTypeError, match="quantized"):
        ow.linear_attention(q, q, ow.input("v", (2, 3, 6, 32), "q8_0"))
