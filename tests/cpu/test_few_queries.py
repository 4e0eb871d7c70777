"""Attention of few queries, which reads keys and values as they lie: compared with NumPy in f64, on both sides of each
limit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from opweave_cpu import CpuDevice
from opweave_cpu.threads import THREADS
from opweave_cpu.tunables import COMPILED_WORK

pytest.importorskip("llvmlite")

pytestmark = pytest.mark.usefixtures("compiling")

TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
LIMITS = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3}
"""Beside values of up to about 3, whose results are rounded to their type."""


def defined(q, k, v, mask, scale, soft_cap):
    """The definition, in f64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    times = q.shape[1] // k.shape[1]
    with np.errstate(invalid="ignore"):
        scores = q @ np.repeat(k, times, 1).swapaxes(2, 3) * scale
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores = scores + (0 if mask is None else mask.astype(np.float64))
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        return shares / shares.sum(-1, keepdims=True) @ np.repeat(v, times, 1)


def made(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(TYPES[dtype])


def check(arrays, mask, dtype, *, compiled=True, scale=0.2, soft_cap=0.0, causal=False, lines=False):
    """Compare; with ``lines`` keys and values lie as a cache holds them, (keys, groups, size)."""
    device = CpuDevice()
    inputs = {}
    arrays = [*arrays, mask]

    def operand(name, data):
        if data is None:
            return None
        turned = lines and name in "kv"
        data = np.ascontiguousarray(data.transpose(0, 2, 1, 3)) if turned else data
        node = ow.input(name, data.shape, dtype)
        inputs[name] = data
        return node.transpose(0, 2, 1, 3) if turned else node

    nodes = [operand(name, data) for name, data in zip("qkvm", arrays, strict=True)]
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(ow.attention(*nodes, scale=scale, soft_cap=soft_cap, causal=causal))
        program.run(**{name: np.full_like(data, np.nan) for name, data in inputs.items()})
        got = np.asarray(program.run(**inputs)).astype(np.float64)
    assert ("attention" in {key[0] for *_, key in device.artefacts}) == compiled
    q, k, v, _ = arrays
    want = defined(q, k, v, mask, scale, soft_cap)
    np.testing.assert_allclose(got, want, atol=LIMITS[dtype], rtol=LIMITS[dtype])


def operands(batch, groups, heads, tokens, keys, size, out, dtype):
    shapes = (batch, groups * heads, tokens, size), (batch, groups, keys, size), (batch, groups, keys, out)
    return [made(shape, dtype, i) for i, shape in enumerate(shapes)]


def hidden(shape, dtype, seed=9):
    """A mask that hides a third of the keys, not the first one."""
    rng = np.random.default_rng(seed)
    mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape)).astype(TYPES[dtype])
    mask[..., 0] = 0
    return mask


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_shape_mask_and_layout(data):
    def draw(*choices):
        return data.draw(st.sampled_from(choices))

    heads, tokens = draw((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (8, 1), (16, 1), (1, 2), (3, 3), (2, 8))
    batch, groups, dtype = draw(1, 3), draw(1, 2), draw(*TYPES)
    keys = draw(1, 2, 7, 16, 33, 255, 256, 257, 530, 1025)
    arrays = operands(batch, groups, heads, tokens, keys, 16 * draw(1, 2, 5), 16 * draw(1, 3, 4), dtype)
    shapes = {
        "one": (keys,), "tokens": (tokens, keys), "heads": (batch, groups * heads, 1, keys),
        "all": (batch, groups * heads, tokens, keys),
    }  # fmt: skip
    kind = draw("none", *shapes)
    mask = None if kind == "none" else hidden(shapes[kind], dtype)
    causal = tokens == 1 and draw(False, True)
    check(arrays, mask, dtype, soft_cap=draw(0.0, 3.0), causal=causal, lines=draw(False, True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("heads", "tokens", "size", "out", "compiled"),
    [(16, 1, 32, 32, True), (17, 1, 32, 32, False), (3, 5, 32, 32, True), (3, 6, 32, 32, False),
     (2, 1, 512, 16, True), (2, 1, 528, 16, False), (2, 1, 16, 512, True), (2, 1, 16, 528, False),
     (2, 1, 24, 16, False), (2, 1, 16, 8, False)],
)  # fmt: skip
def test_on_both_sides_of_each_limit(heads, tokens, size, out, compiled, dtype):
    arrays = operands(1, 2, heads, tokens, 300, size, out, dtype)
    check(arrays, hidden((tokens, 300), dtype), dtype, compiled=compiled)


def test_threads_take_stretches_of_keys(monkeypatch):
    monkeypatch.setattr(THREADS, "cores", 3)
    monkeypatch.setattr(COMPILED_WORK, "value", 1 << 8)
    for keys in (257, 768, 1999):
        check(operands(1, 1, 4, 1, keys, 64, 64, "f16"), hidden((1, keys), "f16"), "f16")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["q", "k", "v", "mask"])
def test_infinities_and_nan_reach_what_they_do_by_definition(where, value):
    arrays, mask = operands(1, 2, 2, 2, 600, 16, 16, "f32"), hidden((1, 4, 2, 600), "f32")
    dict(zip(("q", "k", "v", "mask"), (*arrays, mask), strict=True))[where][0, 1, 1, 5] = value
    check(arrays, mask, "f32")


@pytest.mark.parametrize("keys", [5, 600])
def test_a_query_of_which_all_keys_are_hidden_gives_nan_and_no_other_does(keys):
    mask = np.zeros((3, keys), np.float32)
    mask[1] = -np.inf
    mask[2, : keys // 2] = -np.inf
    check(operands(1, 1, 2, 3, keys, 16, 16, "f32"), mask, "f32")


@pytest.mark.parametrize(
    ("keys", "values"),
    [("q8_0", "q8_0"), ("q4_0", "q8_0"), ("q5_1", "q6_k"), ("q4_k", "f16"), ("bf16", "q4_0"), ("q8_0", "f32")],
)
@pytest.mark.parametrize(("heads", "count"), [(1, 9), (4, 300), (16, 257)])
def test_keys_and_values_in_other_types_are_read_as_they_lie(keys, values, heads, count):
    """Nothing is decoded, or converted, into memory."""
    size = 256
    q, k, v = operands(2, 1, heads, 1, count, size, size, "f32")
    blocks = {}
    for name, data, kind in (("k", k, keys), ("v", v, values)):
        blocks[name] = data.astype(TYPES[kind]) if kind in TYPES else ow.quantize(data, kind)
    leaves = ow.weights(blocks)
    mask = hidden((1, count), "f32")
    node = ow.attention(ow.input("q", q.shape), leaves["k"], leaves["v"], ow.input("mask", mask.shape), scale=0.2)
    device = CpuDevice()
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(node)
        nbytes = program.memory[device.name].temporaries
        got = program.run(q=q, mask=mask)
    assert nbytes < k.nbytes + 2 * 48 * q.nbytes
    wide = [ow.dequantize(x) if kind not in TYPES else x for x, kind in ((blocks["k"], keys), (blocks["v"], values))]
    np.testing.assert_allclose(got, defined(q, wide[0], wide[1], mask, 0.2, 0.0), atol=1e-5)


def test_what_is_decoded_for_another_reader_too_is_right_for_both():
    q, k, v = operands(1, 1, 2, 1, 40, 32, 32, "f32")
    leaves = ow.weights({"k": ow.quantize(k, "q8_0"), "v": ow.quantize(v, "q8_0")})
    wide = [ow.dequantize(leaves[name]) for name in "kv"]
    with ow.Scheduler([CpuDevice()]) as scheduler:
        program = scheduler.build([ow.attention(ow.input("q", q.shape), *wide), ow.sum(wide[0]), wide[1]])
        got, total, values = program.run(q=q)
    want = [ow.dequantize(ow.quantize(x, "q8_0")) for x in (k, v)]
    np.testing.assert_allclose(got, defined(q, want[0], want[1], None, 32**-0.5, 0.0), atol=1e-5)
    np.testing.assert_allclose(total, want[0].sum(), rtol=1e-4)
    np.testing.assert_array_equal(values, want[1])


# --- keys and values in blocks --------------------------------------------------------------------------------------


def pool_of(kind, shape, seed):
    """Blocks in a type: (blocks, keys of a block, groups, size)."""
    data = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return data.astype(TYPES[kind]) if kind in TYPES else ow.quantize(data, kind)


def seen_of(x, table, reach):
    """The first keys of each sequence, gathered: nodes, or arrays."""
    pool = ow.embedding(x, table) if isinstance(x, ow.Tensor) else x[table]
    return pool.reshape(table.shape[0], -1, *x.shape[2:])[:, :reach].transpose(0, 2, 1, 3)


def run_paged(q, pools, mask, *tables, build):
    """For each of the tables the result, and whether it was read; ``build(k, v, table)`` gives keys and values."""
    leaves, ids = ow.weights(dict(zip("kv", pools, strict=True))), ow.input("ids", tables[0].shape, tables[0].dtype)
    k, v = build(leaves["k"], leaves["v"], ids)
    device = CpuDevice()
    nodes = ow.input("q", q.shape, k.dtype), k, v, ow.input("mask", mask.shape, k.dtype)
    with ow.Scheduler([device]) as scheduler:
        program = scheduler.build(ow.attention(*nodes, scale=0.2))
        results = [np.asarray(program.run(q=q, mask=mask, ids=table)) for table in tables]
    return results[-1], any(form.paged for *_, (op, form, *_) in device.artefacts if op == "attention")


@pytest.mark.parametrize(
    ("kind", "other", "room", "columns", "reach"),
    [("f32", "f32", 16, 20, 257), ("f16", "f16", 7, 37, 256), ("bf16", "bf16", 300, 2, 599),
     ("q8_0", "q8_0", 64, 2, 65), ("q8_0", "q4_0", 16, 33, 513), ("bf16", "f32", 9, 1, 4), ("f16", "f16", 1, 40, 40)],
)  # fmt: skip
def test_keys_and_values_are_read_by_a_block_table(kind, other, room, columns, reach):
    """The results are those of gathered keys and values, to the bit."""
    dtype = kind if kind == other and kind in TYPES else "f32"
    pools = [pool_of(name, (3 * columns + 3, room, 2, 32), i) for i, name in enumerate((kind, other))]
    table = np.random.default_rng(3).permutation(3 * columns + 3)[: 3 * columns].reshape(3, columns)
    table[1, : columns // 2] = table[0, : columns // 2]  # a beginning in common
    q, mask = made((3, 6, 1, 32), dtype, 0), hidden((3, 1, 1, reach), dtype)

    def build(k, v, ids):
        return [seen_of(x, ids, reach).astype(dtype) for x in (k, v)]

    got, read = run_paged(q, pools, mask, table[::-1], table, build=build)
    assert read
    wide = [x.astype(TYPES[dtype]) if isinstance(x, np.ndarray) else ow.dequantize(x) for x in pools]
    k, v = (seen_of(x, table, reach) for x in wide)
    want = defined(q, k, v, mask, 0.2, 0.0)
    np.testing.assert_allclose(got.astype(np.float64), want, atol=LIMITS[dtype], rtol=LIMITS[dtype])
    nodes = ow.input("q", q.shape, dtype), *[ow.constant(x.copy()) for x in (k, v)], ow.input("m", mask.shape, dtype)
    with ow.Scheduler([CpuDevice()]) as scheduler:
        np.testing.assert_array_equal(got, scheduler.build(ow.attention(*nodes, scale=0.2)).run(q=q, m=mask))


VIEWS: dict[str, Any] = {
    "parts of blocks": lambda k, v, ids: [seen_of(x[:, 4:12], ids, 20) for x in (k, v)],
    "i32": lambda k, v, ids: [seen_of(x, ids, 40) for x in (k, v)],
    "one gathered": lambda k, v, ids: [seen_of(k, ids, 48), v[:6].reshape(2, 48, 2, 32).transpose(0, 2, 1, 3)],
    "two tables": lambda k, v, ids: [seen_of(k, ids, 40), seen_of(v, ids + 1, 40)],
    "some groups": lambda k, v, ids: [seen_of(x, ids, 40)[:, 1:] for x in (k, v)],
    "last keys": lambda k, v, ids: [seen_of(x, ids, 48)[:, :, 8:] for x in (k, v)],
    "some elements": lambda k, v, ids: [seen_of(x, ids, 40)[..., 16:] for x in (k, v)],
    "one for both": lambda k, v, ids: [seen_of(k, ids, 40)] * 2,
}


@pytest.mark.parametrize("view", VIEWS)
def test_other_views_of_gathered_blocks_are_right(view):
    pools = [pool_of("f32", (9, 16, 2, 32), i) for i in (1, 2)]
    table = np.random.default_rng(3).integers(0, 6, (2, 3)).astype(np.int32 if view == "i32" else np.int64)
    k, v = VIEWS[view](*pools, table)
    q, mask = made((2, 2, 1, k.shape[-1]), "f32", 0), hidden((2, 1, 1, k.shape[2]), "f32")
    got, read = run_paged(q, pools, mask, table, build=VIEWS[view])
    assert read == (view == "parts of blocks")
    np.testing.assert_allclose(got, defined(q, k, v, mask, 0.2, 0.0), atol=1e-5)


@pytest.mark.parametrize("wrong", [-1, 9])
def test_a_block_that_does_not_exist_is_an_error(wrong):
    pools = [pool_of("f16", (9, 16, 2, 32), i) for i in (1, 2)]
    table, q, mask = np.zeros((2, 3), np.int64), made((2, 2, 1, 32), "f16", 0), hidden((2, 1, 1, 40), "f16")
    table[1, 2] = wrong
    with pytest.raises(ow.ExecutionError, match=f"index {wrong} at .1, 2. is outside of 0 .. 8"):
        run_paged(q, pools, mask, table, build=lambda k, v, ids: [seen_of(x, ids, 40) for x in (k, v)])
