"""Steps that run as one call with products on ``torch:cpu``: their results, and when they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave_torch.device import TorchCpuDevice
from opweave_torch.native import multiplies_bf16
from opweave_torch.packed import packed_types

F = np.float32
Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.skipif(len(packed_types()) < 2, reason="this torch lacks the operators")

RNG = np.random.default_rng(11)
ROWS, INPUTS, OUTPUTS = 9, 512, 640


@pytest.fixture
def device() -> TorchCpuDevice:
    made = TorchCpuDevice()
    made.name = "torch:cpu"
    return made


def matrix(outputs: int = OUTPUTS, inputs: int = INPUTS, scale: float = 0.05) -> Array:
    return (RNG.standard_normal((outputs, inputs)) * scale).astype(F)


def group_sizes(program: ow.Program) -> list[int]:
    """Steps in each call that runs several."""
    return [len(group) for split in program.memory_map().groups for group in split if len(group) > 1]


def nmse(got: Array, want: Array) -> float:
    return float(((got.astype(np.float64) - want) ** 2).mean() / (want.astype(np.float64) ** 2).mean())


def linear(x: Array, w: Array, b: Array | None = None) -> Array:
    found = x.astype(np.float64) @ w.astype(np.float64).T
    return found if b is None else found + b.astype(np.float64)


def run(device: Any, outputs: Any, feeds: dict[str, Array], **options: Any) -> tuple[list[Array], ow.Program]:
    scheduler = ow.Scheduler([device, "host"] if device != "host" else device, **options)
    program = scheduler.build(outputs)
    found = program.run({name: feeds[name] for name in program.inputs})
    return [np.array(value) for value in (found if isinstance(found, tuple | list) else [found])], program


@pytest.mark.parametrize(
    ("dtype", "rows", "precision", "limit"),
    [
        ("f32", "f32", "exact", 1e-12),
        ("f32", "f32", "bf16", 3e-5),
        ("bf16", "bf16", "exact", 2e-5),
        ("q8_0", "f32", "exact", 1e-12),
        ("q8_0", "bf16", "exact", 2e-5),
        ("q8_0", "f32", "int8", 3e-5),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_products_of_the_same_rows_are_one(
    device: TorchCpuDevice, dtype: str, rows: str, precision: str, limit: float, biased: bool
) -> None:
    if {"bf16", "int8"} & {dtype, rows, precision} and not multiplies_bf16():
        pytest.skip("this processor has no instructions for bf16")
    values = {name: matrix(n) for name, n in (("q", 640), ("k", 512), ("v", 512))}
    arrays: dict[str, Any] = dict(values)
    x = ow.input("x", (3, 3, INPUTS), rows)
    if dtype == "bf16":
        arrays = {name: w.astype(ml_dtypes.bfloat16) for name, w in values.items()}
        values = {name: w.astype(F) for name, w in arrays.items()}
    elif dtype != "f32":
        pytest.importorskip("gguf")
        arrays = {name: ow.quantize(w, dtype) for name, w in values.items()}
        values = {name: ow.dequantize(w) for name, w in arrays.items()}
    biases = {name: RNG.standard_normal(len(w)).astype(x.dtype.numpy) for name, w in values.items()}
    weights = ow.weights(arrays | {f"b{name}": b for name, b in biases.items()})
    outputs = [ow.linear(x, weights[n], weights[f"b{n}"] if biased else None) for n in values]
    fed = RNG.standard_normal((3, 3, INPUTS)).astype(x.dtype.numpy)
    found, program = run(device, outputs, {"x": fed}, precision=precision)
    assert group_sizes(program) == [3]
    for got, (name, w) in zip(found, values.items(), strict=True):
        assert nmse(got, linear(fed, w, biases[name] if biased else None)) < limit


def test_weights_in_one_piece_are_counted_once_and_can_be_written(device: TorchCpuDevice) -> None:
    values = {"a": matrix(), "b": matrix(), "bias": RNG.standard_normal(OUTPUTS).astype(F)}
    weights = ow.weights(dict(values))
    x, y = ow.input("x", (ROWS, INPUTS)), ow.input("y", (ROWS, INPUTS))
    fed = RNG.standard_normal((ROWS, INPUTS)).astype(F)
    with ow.Scheduler([device, "host"]) as scheduler:
        both = scheduler.build([ow.linear(x, weights[name], weights["bias"]) for name in "ab"])
        both.run(x=fed)
        assert both.memory["torch:cpu"].library == 0
        alone = scheduler.build(ow.linear(y, weights["b"]))
        assert nmse(np.array(alone.run(y=fed)), linear(fed, values["b"])) < 1e-12
        assert both.memory["torch:cpu"].library == values["b"].nbytes  # packed again, for the one that reads it alone
        new = {"b": matrix(), "bias": RNG.standard_normal(OUTPUTS).astype(F)}
        weights.write(new)
        first, second = both.run(x=fed)
        assert nmse(np.array(first), linear(fed, values["a"], new["bias"])) < 1e-12
        assert nmse(np.array(second), linear(fed, new["b"], new["bias"])) < 1e-12
        assert nmse(np.array(alone.run(y=fed)), linear(fed, new["b"])) < 1e-12
    np.testing.assert_array_equal(ow.read(weights["a"]), values["a"])


CONTINUED: dict[str, Callable[[Any, Any], Any]] = {
    "gelu": lambda x, r: ow.gelu(x),
    "gelu_tanh": lambda x, r: ow.gelu_tanh(x),
    "silu": lambda x, r: ow.silu(x),
    "relu": lambda x, r: ow.relu(x),
    "add": lambda x, r: r + x,
    "add to a row": lambda x, r: x + r[:1],
    "of another shape": lambda x, r: ow.reshape(x, (1, *x.shape)) + r,
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("rows", [7, 150])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_follows_a_product_goes_along(device: TorchCpuDevice, name: str, rows: int, dtype: str) -> None:
    """It is what it is by itself, where the product is needed too; also of infinity and NaN."""
    if dtype == "bf16" and not multiplies_bf16():
        pytest.skip("this processor has no instructions for bf16")
    weights = ow.weights(
        {"w": matrix().astype(ow.as_dtype(dtype).numpy), "b": np.zeros(OUTPUTS, F).astype(ow.as_dtype(dtype).numpy)}
    )
    x, r = ow.input("x", (rows, INPUTS), dtype), ow.input("r", (rows, OUTPUTS), dtype)
    product = ow.linear(x, weights["w"], weights["b"])
    result = CONTINUED[name](product, r)
    for special in (False, True):
        feeds = {
            "x": RNG.standard_normal(x.shape).astype(x.dtype.numpy),
            "r": RNG.standard_normal(r.shape).astype(r.dtype.numpy),
        }
        if special:
            feeds["x"][2, 3], feeds["x"][3, 3], feeds["x"][4, 4] = np.inf, np.nan, -np.inf
        (got,), program = run(device, result, feeds)
        (want, _), both = run(device, [result, product], feeds)
        assert (group_sizes(program), group_sizes(both)) == ([2], [])
        limit = 1e-5 if dtype == "f32" else 2e-2
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=limit, atol=limit)


@pytest.mark.parametrize(("dtype", "precision", "limit"), [("f32", "exact", 1e-5), ("f32", "bf16", 2e-2),
                                                          ("bf16", "exact", 2e-2)])  # fmt: skip
@pytest.mark.parametrize("activation", [ow.gelu, ow.relu])
def test_a_feed_forward_block_is_one_call(
    device: TorchCpuDevice, activation: Any, dtype: str, precision: Any, limit: float
) -> None:
    """Product, activation, product, sum and layer norm; beside the same with every result needed, which run apart, also
    of infinity and NaN, and behind a write to a bias."""
    if "bf16" in (dtype, precision) and not multiplies_bf16():
        pytest.skip("this processor has no instructions for bf16")
    kind = ow.as_dtype(dtype).numpy
    arrays = {"up": matrix(), "down": matrix(INPUTS, OUTPUTS), "b": RNG.standard_normal(OUTPUTS),
              "c": RNG.standard_normal(INPUTS), "g": np.ones(INPUTS), "h": np.zeros(INPUTS)}  # fmt: skip
    w = ow.weights({name: array.astype(kind) for name, array in arrays.items()})
    x = ow.input("x", (2, 35, INPUTS), dtype)
    up = ow.linear(x, w["up"], w["b"])
    active = activation(up)
    down = ow.linear(active, w["down"], w["c"])
    added = x + down
    result = ow.layer_norm(added, w["g"], w["h"])
    feeds = {"x": RNG.standard_normal(x.shape).astype(kind)}
    with ow.Scheduler([device, "host"], precision=precision) as scheduler:
        program, apart = scheduler.build(result), scheduler.build([up, active, down, added, result])
        assert (group_sizes(program), group_sizes(apart)) == ([5], [])
        for turn in range(3):
            got, want = np.array(program.run(feeds)), np.array(apart.run(feeds)[-1])
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=limit, atol=limit)
            if turn == 0:
                w.write({"b": RNG.standard_normal(OUTPUTS).astype(kind)})
            else:
                feeds["x"][0, 3, 4], feeds["x"][1, 4, 4] = np.inf, np.nan


@pytest.mark.parametrize("turned", ["nothing", "sum", "result"])
@pytest.mark.parametrize("form", [(3, 6, 320), (18, 320), (9, 2, 320), (9, 640)])
def test_steps_behind_a_product_may_show_it_in_another_shape(
    device: TorchCpuDevice, form: tuple[int, ...], turned: str
) -> None:
    """What is added may be repeated, or lie in another order; the sum may be left in another order too."""
    w = ow.weights({"up": matrix(640, INPUTS), "down": matrix(640, form[-1])})
    x = ow.input("x", (ROWS, INPUTS))
    active = ow.gelu(ow.linear(x, w["up"]).reshape(form))
    down = ow.linear(active, w["down"])
    other = ow.input("other", down.shape[::-1] if turned == "sum" else down.shape[-1:])
    added = down + (other.transpose(*reversed(range(len(down.shape)))) if turned == "sum" else other)
    result = ow.layer_norm(added)
    if turned == "result":
        result = result.transpose(*reversed(range(len(down.shape))))
    rng = np.random.default_rng(3)
    feeds = {"x": rng.standard_normal(x.shape).astype(F), "other": rng.standard_normal(other.shape).astype(F)}
    outputs = [result, ow.relu(ow.linear(x, w["up"])).reshape(form) * 1.0]
    got, _ = run(device, outputs, feeds)
    want, _ = run("host", outputs, feeds)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


def test_a_norm_of_a_sum_that_others_read_stays_behind_it(device: TorchCpuDevice) -> None:
    """As in decoders: the sum is stored, for the next block too."""
    w = ow.weights({"w": matrix(INPUTS, INPUTS)})
    x = ow.input("x", (ROWS, INPUTS))
    added = x + ow.linear(x, w["w"])
    fed = RNG.standard_normal(x.shape).astype(F)
    (got, total), program = run(device, [ow.layer_norm(added), added * 2], {"x": fed})
    assert group_sizes(program) == [2]
    want = fed + linear(fed, np.array(ow.read(w["w"])))
    assert nmse(total, 2 * want) < 1e-12
    assert nmse(got, (want - want.mean(1, keepdims=True)) / np.sqrt(want.var(1, keepdims=True) + 1e-5)) < 1e-11


@pytest.mark.parametrize("op", [ow.swiglu, ow.geglu, ow.reglu, lambda a, b: ow.geglu(a, b, approximate="tanh")])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_gated_unit_goes_along_with_its_products(device: TorchCpuDevice, op: Any, dtype: str, turned: bool) -> None:
    if dtype == "bf16" and not multiplies_bf16():
        pytest.skip("this processor has no instructions for bf16")
    kind = ow.as_dtype(dtype).numpy
    weights = ow.weights({"up": matrix().astype(kind), "gate": matrix().astype(kind)})
    x = ow.input("x", (2, 4, INPUTS), dtype)
    products = [ow.linear(x, weights[name]) for name in (("gate", "up") if turned else ("up", "gate"))]
    result = op(*(reversed(products) if turned else products))
    feeds = {"x": RNG.standard_normal(x.shape).astype(kind)}
    feeds["x"][0, 1, 5] = np.inf
    (got,), program = run(device, result, feeds)
    (want, *_), apart = run(device, [result, *products], feeds)
    assert (group_sizes(program), group_sizes(apart)) == ([3], [2])
    limit = 1e-5 if dtype == "f32" else 2e-2
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=limit, atol=limit)


def test_attention_writes_its_result_in_the_order_that_is_wanted(device: TorchCpuDevice) -> None:
    q, k, v = (ow.input(name, (2, 4, 6, 8)) for name in "qkv")
    feeds = {name: RNG.standard_normal((2, 4, 6, 8)).astype(F) for name in "qkv"}
    mixed = ow.attention(q, k, v)
    wanted = ow.reshape(mixed.transpose(0, 2, 1, 3), (2, 6, 32)) * 1
    (got,), program = run(device, wanted, feeds)
    (want,), _ = run("host", mixed, feeds)
    assert group_sizes(program) == [2]
    np.testing.assert_allclose(got, want.transpose(0, 2, 1, 3).reshape(2, 6, 32), rtol=1e-5, atol=1e-6)


def test_a_product_stays_before_a_write_to_what_it_reads(device: TorchCpuDevice) -> None:
    """The sum of the product comes after the state that the product reads was written."""
    weights = ow.weights({"w": matrix(), "v": matrix()})
    kept = ow.state("groups.kept", (ROWS, INPUTS), device=device, fill=1)
    before = ow.linear(kept, weights["w"])
    written = ow.assign(kept, ow.input("new", (ROWS, INPUTS)))
    result = before + ow.linear(written, weights["v"])
    new = RNG.standard_normal((ROWS, INPUTS)).astype(F)
    (got,), _ = run(device, result, {"new": new})
    w, v = (np.array(ow.read(weights[name])) for name in "wv")
    assert nmse(got, linear(np.ones((ROWS, INPUTS), F), w) + linear(new, v)) < 1e-12


@pytest.mark.parametrize("turned", [False, True])
def test_a_gated_unit_stays_behind_a_write_to_a_bias(device: TorchCpuDevice, turned: bool) -> None:
    """One of its products reads a bias that is written before the unit comes."""
    weights = ow.weights({"w": matrix(), "v": matrix(), "b": np.zeros(OUTPUTS, F)})
    kept = ow.state(f"groups.bias.{turned}", (OUTPUTS,), device=device, fill=1)
    x = ow.input("x", (ROWS, INPUTS))
    plain, shifted = ow.linear(x, weights["w"], weights["b"]), ow.linear(x, weights["v"], kept)
    written = ow.assign(kept, plain[0] * 100)
    fed = RNG.standard_normal((ROWS, INPUTS)).astype(F)
    values = [plain, shifted]
    (_, got), _ = run(device, [written, ow.reglu(*(values[::-1] if turned else values))], {"x": fed})
    first, second = (linear(fed, np.array(ow.read(weights[name]))) for name in "wv")
    second = second + 1
    want = second * np.maximum(first, 0) if turned else first * np.maximum(second, 0)
    assert nmse(got, want) < 1e-12


def test_without_packed_weights_products_stay_alone(device: TorchCpuDevice) -> None:
    weights = ow.weights({"a": matrix(), "b": matrix()})
    x = ow.input("x", (ROWS, INPUTS))
    outputs = [ow.gelu(ow.linear(x, weights["a"])), ow.linear(x, weights["b"])]
    _, program = run(device, outputs, {"x": RNG.standard_normal((ROWS, INPUTS)).astype(F)}, repack=False)
    assert group_sizes(program) == []
