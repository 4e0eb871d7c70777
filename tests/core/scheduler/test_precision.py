"""Products in a half type: what is rounded, and what is not."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.host.device import HostDevice
from opweave.scheduler.precision import converted_leaf, rebuilt, with_products_in
from tests.support.evaluate import evaluate

F = np.float32
BF16 = ow.as_dtype("bf16").numpy


def rounded(array: np.ndarray) -> np.ndarray:
    return array.astype(BF16).astype(np.float64)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def test_operands_and_results_of_products_are_rounded_and_the_rest_stays_in_f32():
    x, w = values(4, 8), values(6, 8, seed=1)
    weight = ow.weights({"w": w})["w"]
    f = ow.compile(lambda x: ow.exp(ow.linear(x, weight)), devices=HostDevice(), compute_dtype="bf16")
    product = (rounded(x) @ rounded(w).T).astype(BF16).astype(F)
    np.testing.assert_array_equal(f(x), np.exp(product.astype(np.float64)).astype(F))
    plain = ow.compile(lambda x: ow.exp(ow.linear(x, weight)), devices=HostDevice())
    assert not np.array_equal(plain(x), f(x))


def test_weights_are_converted_once_for_all_programs_also_through_views():
    weight = ow.weights({"w": values(8, 8)})["w"]
    x = ow.input("x", (4, 8))
    first = with_products_in("bf16", [x @ weight])[0]
    second = with_products_in("bf16", [x @ weight.T])[0]
    leaves = {t for out in (first, second) for t in ow.Graph((out,)).leaves if t.name == "w"}
    assert leaves == {converted_leaf(weight, ow.as_dtype("bf16"))}
    ops = [n.op.name for n in ow.Graph((second,)).nodes if n.op is not None]
    assert ops.count("cast") == 2, "the input to bf16 and the result back; never the weight"
    got = ow.Scheduler(HostDevice()).build(second).run(x=values(4, 8, seed=2))
    want = (rounded(values(4, 8, seed=2)) @ rounded(values(8, 8)).T).astype(BF16).astype(F)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_every_kind_of_product_has_its_dtype(dtype):
    x = ow.input("x", (1, 2, 6, 6))
    kernel = ow.weights({"k": values(4, 2, 3, 3)})["k"]
    q = ow.input("q", (1, 2, 4, 8))
    experts, ids = ow.weights({"e": values(3, 5, 8)})["e"], ow.input("ids", (4, 2), "i32")
    outputs = [ow.conv2d(x, kernel), ow.attention(q, q, q), ow.expert_linear(q[0, 0], experts, ids)]
    for made, output in zip(with_products_in(dtype, outputs), outputs, strict=True):
        assert made.dtype is output.dtype
        inner = [n for n in ow.Graph((made,)).nodes if n.op is output.op]
        assert [n.dtype.name for n in inner] == [dtype]


def test_other_types_and_quantized_weights_are_left_alone():
    ints = ow.input("i", (4, 4), "i32")
    doubles = ow.input("d", (4, 4), "f64")
    outputs = [ints @ ints, doubles @ doubles]
    assert list(with_products_in("bf16", outputs)) == outputs
    assert list(with_products_in("f32", outputs)) == outputs


def test_states_keep_their_dtype():
    cache, x = ow.state("cache", (4, 4)), ow.input("x", (4, 4))
    written = ow.assign(cache, ow.linear(x, cache))
    made = with_products_in("bf16", [written])[0]
    assert made.dtype.name == "f32"
    assert made.memory is cache


def test_names_of_outputs_and_forms_stay():
    w = ow.weights({"w": values(8, 8)})["w"]
    f = ow.compile(lambda x: {"a": x @ w, "b": x}, devices=HostDevice(), compute_dtype="bf16")
    result = f(values(4, 8))
    assert list(result) == ["a", "b"]
    np.testing.assert_array_equal(result["b"], values(4, 8))


@pytest.mark.parametrize("dtype", ["i32", "f64", "q4_0"])
def test_types_that_products_are_not_computed_in_are_refused(dtype):
    with pytest.raises(ow.DTypeError, match="f32, f16 or bf16"):
        ow.compile(lambda x: x, devices=HostDevice(), compute_dtype=dtype)


def test_weights_are_converted_on_loading():
    w = ow.weights({"w": values(4, 4), "ids": np.arange(3)}, compute_dtype="bf16")
    assert {name: t.dtype.name for name, t in w.items()} == {"w": "bf16", "ids": "i64"}
    with pytest.raises(ow.DTypeError, match="float type"):
        ow.weights({"w": values(4, 4)}, compute_dtype="i8")


def test_rebuilding_keeps_views_and_states_apart():
    x, y = ow.input("x", (4, 6)), ow.input("y", (4, 6))
    out = ow.exp(x.T[1:3]) + x[:, 2]
    (again,) = rebuilt((out,), {x: y})
    fed = values(4, 6)
    np.testing.assert_array_equal(evaluate(again, {y: fed}), evaluate(out, {x: fed}))
    assert [leaf.name for leaf in ow.Graph((again,)).leaves] == ["y"]
