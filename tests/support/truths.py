"""What every operation gives, worked out apart from its reference: a table that `test_truths` goes through.

A truth gets the operands as the caller passed them, floats as ``longdouble`` and integers as Python integers, and works
in these: by NumPy's functions for ``longdouble``, by torch in f64, by the ``gguf`` package, or by plain loops. Nothing
of it is shared with ``opweave.ops``.
"""

# mypy: disable-error-code="assignment, misc, index, arg-type"

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import erfc, prod
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch.nn import functional

import opweave as ow
from opweave.graph.dtypes import DTYPES, as_dtype
from opweave.ops.activation import gelu_tanh_backward, relu_backward, silu_backward
from opweave.ops.attention_gradient import attention_backward
from opweave.ops.pooling import avg_pool_backward, max_pool_backward
from opweave.ops.row_gradients import (
    layer_norm_backward,
    log_softmax_backward,
    rms_norm_backward,
    softmax_backward,
)
from tests.support.philox import philox_words

Array = np.ndarray[Any, Any]

FLOATS = ("f64", "f32", "f16", "bf16")
INTS = ("i64", "i32", "i16", "i8", "u8")
NUMBERS = (*FLOATS, *INTS)
PLAIN = (*NUMBERS, "bool")
BLOCKS = tuple(name for name, t in DTYPES.items() if t.is_quantized)


class Given(NamedTuple):
    """An operand.

    Attributes:
        shape: of it.
        dtype: ``""``: the one that is tried; ``"wide"``: f64 for f64, else f32.
        kind: of its values: normal, positive, unit (between -1 and 1), choice (ids below ``high``), mask, few.
        high: see kind.
        state: it is a state.
    """

    shape: tuple[int, ...]
    dtype: str = ""
    kind: str = "normal"
    high: int = 0
    state: bool = False


class Truth(NamedTuple):
    """An operation, its operands and types in the tests, and the independent function that it is compared with."""

    op: str
    build: Callable[..., Any]
    operands: tuple[Given, ...]
    dtypes: tuple[str, ...]
    truth: Callable[..., Any]
    scale: float = 1.0  # by how many units the f64 reference may be away beyond rounding once, in 1e-14 of the largest


X = Given((3, 5))
TABLE: list[Truth] = []


def add(
    op: str, truth: Callable[..., Any], *operands: Given, dtypes: tuple[str, ...] = FLOATS,
    build: Callable[..., Any] | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    TABLE.append(Truth(op, build or getattr(ow, op), operands or (X,), dtypes, truth, scale))


def given(op: str, **options: Any) -> Callable[..., Any]:
    return lambda *xs: getattr(ow, op)(*xs, **options)


L = np.longdouble


def t64(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(x, np.float64 if np.asarray(x).dtype.kind in "fV" else np.int64))


def by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    return lambda *xs: function(*[t64(x) for x in xs]).numpy()


# --- element by element ---------------------------------------------------------------------------------------------

TWO = (X, X)
add("add", lambda a, b: a + b, *TWO, dtypes=NUMBERS)
add("sub", lambda a, b: a - b, *TWO, dtypes=NUMBERS)
add("mul", lambda a, b: a * b, *TWO, dtypes=NUMBERS)
add("div", lambda a, b: a / b, X, Given((3, 5), kind="positive"))
add("neg", lambda x: -x, dtypes=NUMBERS)
add("abs", lambda x: np.where(x < 0, -x, x), dtypes=NUMBERS)
add("sign", lambda x: (x > 0) * 1 - (x < 0) * 1, dtypes=NUMBERS)
add("square", lambda x: x * x, dtypes=NUMBERS)
add("scale", lambda x: x * L(0.3) + L(1.7), build=lambda x: ow.scale(x, 0.3, 1.7))
add("scale", lambda x: x + L(0.1), build=lambda x: x + 0.1)
for name in ("exp", "expm1", "sin", "cos", "tanh"):
    add(name, getattr(np, name))
for name in ("log", "log1p", "sqrt"):
    add(name, getattr(np, name), Given((3, 5), kind="positive"))
for name in ("tan", "sinh", "cosh", "atan", "asinh"):
    add(name, getattr(np, {"atan": "arctan", "asinh": "arcsinh"}.get(name, name)))
for name in ("asin", "acos", "atanh"):
    add(name, getattr(np, name.replace("a", "arc", 1)), Given((3, 5), kind="unit"))
add("acosh", lambda x: np.arccosh(x), Given((3, 5), kind="positive"))
add("erf", by_torch(torch.erf))
add("rsqrt", lambda x: 1 / np.sqrt(x), Given((3, 5), kind="positive"))
add("reciprocal", lambda x: 1 / x)
add("pow", np.power, Given((3, 5), kind="positive"), X)
add("pow", lambda a, b: a**b, X, Given((3, 5), kind="few"), dtypes=INTS)
for source in PLAIN:
    for target in PLAIN:
        if source != target:

            def converted(x: Array, target: str = target) -> Array:
                whole = target in INTS
                return np.trunc(x.astype(L)).astype(object) if whole else x != 0 if target == "bool" else x

            add("cast", converted, Given((4, 9), source, "few"), dtypes=(target,),
                build=lambda x, target=target: ow.cast(x, target))  # fmt: skip

add("relu", lambda x: np.where(x > 0, x, 0 * x), dtypes=NUMBERS)
add("leaky_relu", lambda x: np.where(x > 0, x, L(0.07) * x), build=given("leaky_relu", negative_slope=0.07))
add("elu", lambda x: np.where(x > 0, x, L(1.3) * np.expm1(np.minimum(x, 0))), build=given("elu", alpha=1.3))
add("xielu", lambda x: np.where(x > 0, L(0.7) * x * x + L(0.25) * x,
                                L(1.25) * (np.expm1(np.minimum(x, L(-1e-6))) - x) + L(0.25) * x),
    build=given("xielu", alpha_p=0.7, alpha_n=1.25, beta=0.25))  # fmt: skip
add("softplus", lambda x: np.log1p(np.exp(x)))


def sigmoid(x: Array) -> Array:
    return (1 + np.tanh(x / 2)) / 2


def gelu(x: Array) -> Array:
    return np.array([L(0.5) * v * L(erfc(-float(v) / 2**0.5)) for v in x.ravel()], L).reshape(x.shape)


def gelu_tanh(x: Array) -> Array:
    return x * (1 + np.tanh(np.sqrt(L(2) / L(np.pi)) * (x + L(0.044715) * x * x * x))) / 2


def hard(x: Array) -> Array:
    return np.minimum(np.maximum(x + 3, 0), 6) / 6


add("sigmoid", sigmoid, scale=10)
add("hardsigmoid", hard)
add("gelu", gelu)
add("gelu_tanh", gelu_tanh, scale=10)
add("gelu_quick", lambda x: x * sigmoid(L(1.702) * x), scale=10)
add("silu", lambda x: x * sigmoid(x), scale=10)
add("hardswish", lambda x: x * hard(x))

for name, function in (("floor", np.floor), ("ceil", np.ceil), ("round", np.rint), ("trunc", np.trunc)):
    add(name, function, Given((4, 9), kind="few"))

add("minimum", np.minimum, *TWO, dtypes=PLAIN)
add("maximum", np.maximum, *TWO, dtypes=PLAIN)
add("clamp", lambda x: np.minimum(np.maximum(x, L(-0.3)), L(0.7)), build=given("clamp", min=-0.3, max=0.7))
add("clamp", lambda x: np.minimum(np.maximum(x, 3), 50), build=given("clamp", min=3, max=50), dtypes=INTS)
add("step", lambda x: (x > 0) * 1, dtypes=NUMBERS)
add("less", np.less, *TWO, dtypes=PLAIN)
add("less_equal", np.less_equal, *TWO, dtypes=PLAIN)
add("equal", np.equal, *TWO, dtypes=PLAIN)
add("not_equal", np.not_equal, *TWO, dtypes=PLAIN)
add("where", lambda c, a, b: np.where(c, a, b), Given((3, 5), "bool"), X, X, dtypes=PLAIN)

add("relu_backward", lambda g, y: np.where(y > 0, g, 0), *TWO, build=relu_backward)
add("silu_backward", lambda g, x: g * sigmoid(x) * (1 + x * sigmoid(-x)), *TWO, build=silu_backward, scale=10)
add("gelu_tanh_backward", by_torch(lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh")), *TWO,
    build=gelu_tanh_backward, scale=100)  # fmt: skip
add("reglu", lambda x, g: x * np.maximum(g, 0), *TWO)
for form, function in (("none", gelu), ("tanh", gelu_tanh), ("quick", lambda g: g * sigmoid(L(1.702) * g))):
    add("geglu", lambda x, g, function=function: x * function(g), *TWO, build=given("geglu", approximate=form),
        scale=10)  # fmt: skip
add("swiglu", lambda x, g: x * g * sigmoid(g), *TWO, scale=10)


def swiglu_oai(x: Array, gate: Array) -> Array:
    v, g = np.clip(x, -L(0.9), L(0.9)), np.minimum(gate, L(0.9))
    return g * sigmoid(L(1.2) * g) * (v + 1)


add("swiglu_oai", swiglu_oai, *TWO, build=given("swiglu_oai", alpha=1.2, limit=0.9), scale=10)

# --- values out of nothing, other orders ----------------------------------------------------------------------------

for dtype in PLAIN:
    value = 1 if dtype == "bool" else 7 if dtype in INTS else 0.1
    add("full", lambda value=value: np.full((2, 3), value, L if isinstance(value, float) else object), dtypes=(dtype,),
        build=lambda value=value, dtype=dtype: ow.full((2, 3), value, dtype))  # fmt: skip
    TABLE[-1] = TABLE[-1]._replace(operands=())
    if dtype != "bool":
        by = 3 if dtype in INTS else 0.1
        add("arange", lambda by=by: np.array([1 + i * (L(by) if isinstance(by, float) else by) for i in range(33)]),
            dtypes=(dtype,), build=lambda by=by, dtype=dtype: ow.arange(1, 1 + by * 33 - by / 2, by, dtype)
            if isinstance(by, float) else ow.arange(1, 100, 3, dtype))  # fmt: skip
        TABLE[-1] = TABLE[-1]._replace(operands=())

DIGITS = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}


def even(key: Array, counter: Array, dtype: str, n: int) -> Array:
    words = philox_words(int(key), int(counter), 2 * n)
    if dtype == "f64":
        words = [a << 32 | b for a, b in zip(words[::2], words[1::2], strict=True)]
    bits = 64 if dtype == "f64" else 32
    return np.array([L(w >> bits - DIGITS[dtype]) for w in words[:n]]) * L(2) ** -DIGITS[dtype]


def bell(key: Array, counter: Array, dtype: str, n: int) -> Array:
    """Box and Muller's pairs as points of the plane, each turned into its eighth by reflections."""
    words, values = philox_words(int(key), int(counter), 2 * n + 4), []
    for at in range(0, 2 * n, 4 if dtype == "f64" else 2):
        if dtype == "f64":
            a, b, top, rest = words[at : at + 4]
            u, part = L((a << 21 | b >> 11) + 1) * L(2) ** -53, L((top % 2**29) << 32 | rest) * L(2) ** -61
        else:
            a, top = words[at : at + 2]
            u, part = L(np.float32(a + 1)) * L(2) ** -32, L(top % 2**29) * L(2) ** -29
        radius, angle = np.sqrt(-2 * np.log(u)), part * np.arctan(L(1))
        x, y = radius * np.cos(angle), radius * np.sin(angle)
        x, y = (y, x) if top & 1 << 31 else (x, y)
        values += [-x if top & 1 << 30 else x, -y if top & 1 << 29 else y]
    return np.array(values[:n])


for dtype in FLOATS:
    for name, of_words in (("uniform", even), ("normal", bell)):
        add(name, lambda key, counter, of_words=of_words, dtype=dtype: of_words(key, counter, dtype, 33),
            Given((), "i64"), Given((), "i64"), dtypes=(dtype,),
            build=lambda k, c, name=name, dtype=dtype: getattr(ow, name)((33,), k, c, dtype))  # fmt: skip

add("copy", lambda x: x, dtypes=PLAIN)
add("contiguous", lambda x: x.T, dtypes=PLAIN, build=lambda x: ow.contiguous(x.T))
add("concat", lambda a, b: np.concatenate([a, b], 1), *TWO, dtypes=PLAIN, build=lambda a, b: ow.concat([a, b], 1))
add("flip", lambda x: x[::-1], dtypes=PLAIN, build=given("flip", axis=0))
add("roll", lambda x: np.stack([x[:, (i - 2) % 5] for i in range(5)], 1), dtypes=PLAIN,
    build=given("roll", shift=2, axis=1))  # fmt: skip


def framed(x: Array) -> Array:
    out = np.full((3, 9), x.dtype.type(1) if x.dtype != object else 1, x.dtype)
    out[:, 1:6] = x
    return out


add("pad", framed, dtypes=PLAIN, build=lambda x: ow.pad(x, ((0, 0), (1, 3)), value=1))
for mode, order in (("edge", [0, 0, *range(5), 4]), ("reflect", [2, 1, *range(5), 3]), ("wrap", [3, 4, *range(5), 0])):
    add("pad", lambda x, order=order: x[:, order], dtypes=PLAIN,
        build=lambda x, mode=mode: ow.pad(x, ((0, 0), (2, 1)), mode))  # fmt: skip
add("tril", lambda x: np.array([[x[i, j] if j <= i + 1 else 0 * x[0, 0] for j in range(5)] for i in range(3)]),
    dtypes=PLAIN, build=given("tril", k=1))  # fmt: skip
add("triu", lambda x: np.array([[x[i, j] if j >= i - 1 else 0 * x[0, 0] for j in range(5)] for i in range(3)]),
    dtypes=PLAIN, build=given("triu", k=-1))  # fmt: skip
add("diag_embed", lambda x: np.array([np.diag(row, 1) for row in x]), dtypes=PLAIN, build=given("diag_embed", offset=1))

# --- reductions, orders ---------------------------------------------------------------------------------------------

R = Given((4, 33, 7))
SUMS = (*FLOATS, "i64")


def serial(x: Array, axis: int) -> Array:
    """Running sums, one addition after the other."""
    total, out = None, []
    for row in np.moveaxis(x, axis, 0):
        total = row if total is None else total + row
        out.append(total)
    return np.moveaxis(np.array(out), 0, axis)


add("sum", lambda x: serial(x, 1)[:, -1], R, dtypes=SUMS, build=given("sum", axis=1), scale=10)
add("sum", lambda x: serial(x.reshape(-1), 0)[-1], R, dtypes=SUMS, scale=100)
add("mean", lambda x: serial(x, 0)[-1] / 4, R, build=given("mean", axis=0), scale=10)
add("prod", lambda x: x[0] * x[1] * x[2] * x[3], R, dtypes=SUMS, build=given("prod", axis=0), scale=10)


def var(x: Array) -> Array:
    mean = serial(x, 1)[:, -1:] / 33
    return serial((x - mean) ** 2, 1)[:, -1] / 32


add("var", var, R, build=given("var", axis=1), scale=10)
add("max", lambda x: np.sort(x, 1)[:, -1], R, dtypes=PLAIN, build=given("max", axis=1))
add("min", lambda x: np.sort(x, 1)[:, 0], R, dtypes=PLAIN, build=given("min", axis=1))
add("argmax", lambda x: np.array([list(row).index(max(row)) for row in x.reshape(4, -1)]), R, dtypes=PLAIN,
    build=lambda x: ow.argmax(x.reshape(4, -1), 1))  # fmt: skip
FEW = Given((6, 5), kind="few")
add("count_equal", lambda a, b: sum(p == q for p, q in zip(a.ravel(), b.ravel(), strict=True)), FEW, FEW, dtypes=PLAIN)
add("cumsum", lambda x: serial(x, 1), R, dtypes=SUMS, build=given("cumsum", axis=1), scale=10)
add("argsort", lambda x: np.array([sorted(range(5), key=list(row).__getitem__) for row in x]), FEW, dtypes=PLAIN,
    build=given("argsort", stable=True))  # fmt: skip
add("top_k", lambda x: np.array([sorted(range(5), key=lambda i, row=row: (-row[i], i))[:3] for row in 1 * x]), FEW,
    dtypes=PLAIN, build=lambda x: ow.top_k(x, 3)[1])  # fmt: skip

# --- normalization --------------------------------------------------------------------------------------------------

N = Given((2, 3, 16))


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


add("softmax", lambda x: softmax(x * L(0.7)), N, build=given("softmax", scale=0.7), scale=10)
add("softmax", lambda x, m: softmax(x + m), N, Given((16,), kind="mask"), build=lambda x, m: ow.softmax(x, mask=m),
    scale=10)  # fmt: skip


def slopes(heads: int, bias: float) -> Array:
    """As the paper on ALiBi has them, for a power of two."""
    return np.array([L(2) ** (-L(bias) * (h + 1) / heads) for h in range(heads)])


def with_sinks(x: Array, sinks: Array, distances: Array) -> Array:
    z = x + slopes(2, 4.0)[:, None, None] * distances
    extra = np.broadcast_to(sinks[:, None, None], (*z.shape[:-1], 1))
    return softmax(np.concatenate([z, extra], -1))[..., :-1]


add("head_softmax", with_sinks, Given((2, 2, 3, 16)), Given((2,)), Given((3, 16), kind="unit"),
    build=lambda x, s, m: ow.softmax(x, mask=m, sinks=s, max_bias=4.0), scale=10)  # fmt: skip
add("log_softmax", lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True)), N, scale=10)
COLUMNS = Given((16,))


def standard(x: Array) -> Array:
    mean = x.sum(-1, keepdims=True) / x.shape[-1]
    return (x - mean) / np.sqrt(((x - mean) ** 2).sum(-1, keepdims=True) / x.shape[-1] + L(1e-5))


add("layer_norm", standard, N, scale=10)
add("layer_norm", lambda x, w, b: standard(x) * w + b, N, COLUMNS, COLUMNS, scale=10)
add("rms_norm", lambda x, w: x / np.sqrt((x * x).sum(-1, keepdims=True) / 16 + L(1e-6)) * w, N, COLUMNS, scale=10)
add("l2_norm", lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True)), N, scale=10)
add("group_norm", lambda x, w, b: standard(x.reshape(2, 2, -1)).reshape(2, 6, 5) * w[:, None] + b[:, None],
    Given((2, 6, 5)), Given((6,)), Given((6,)), build=lambda x, w, b: ow.group_norm(x, 2, w, b), scale=10)  # fmt: skip


def gradient(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    """Of a function of x (and a weight), times what arrives at its result, which is the first operand."""

    def truth(g: Array, x: Array, *weight: Array) -> Array:
        given = t64(x).requires_grad_()
        function(given, *[t64(w) for w in weight]).backward(t64(g))
        assert given.grad is not None
        return given.grad.numpy()

    return truth


aten = torch.ops.aten
add("softmax_backward", by_torch(lambda g, y: 0.7 * aten._softmax_backward_data(g, y, -1, torch.float64)), N, N,
    build=lambda g, y: softmax_backward(g, y, 0.7), scale=10)  # fmt: skip
add("log_softmax_backward", by_torch(lambda g, y: aten._log_softmax_backward_data(g, y, -1, torch.float64)), N, N,
    build=log_softmax_backward, scale=10)  # fmt: skip
for weights in ((), (COLUMNS,)):
    add("rms_norm_backward", gradient(lambda x, *w: functional.rms_norm(x, (16,), *w, eps=1e-6)), N, N, *weights,
        build=lambda g, x, *w: rms_norm_backward(g, x, *w, eps=1e-6), scale=10)  # fmt: skip
    add("layer_norm_backward", gradient(lambda x, *w: functional.layer_norm(x, (16,), *w, eps=1e-5)), N, N, *weights,
        build=lambda g, x, *w: layer_norm_backward(g, x, *w, eps=1e-5), scale=10)  # fmt: skip

# --- products -------------------------------------------------------------------------------------------------------


def product(a: Array, b: Array) -> Array:
    return (a[..., :, None, :] * np.moveaxis(b, -2, -1)[..., None, :, :]).sum(-1)


add("matmul", product, Given((2, 3, 17)), Given((2, 17, 5)), dtypes=NUMBERS, scale=10)
add("linear", lambda x, w, b: product(x, w.T) + b, Given((3, 17)), Given((5, 17)), Given((5,)), dtypes=NUMBERS,
    scale=10)  # fmt: skip
IDS = Given((4, 2), "i32", "choice", 3)


def routed(x: Array, w: Array, ids: Array) -> Array:
    return np.array([[(w[e] * row).sum(-1) for e in some] for row, some in zip(x, ids, strict=True)])


add("expert_linear", routed, Given((4, 9)), Given((3, 5, 9)), IDS, dtypes=NUMBERS, scale=10)
add("add_expert", lambda x, t, i: x + t[i.astype(int)], Given((4, 2, 5)), Given((3, 5)), IDS, dtypes=NUMBERS)
for name in BLOCKS:
    n = 2 * DTYPES[name].block

    def decoded(raw: Array, name: str = name) -> Array:
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
        return values.astype(L)

    add("linear", lambda x, w, b, d=decoded: product(x, d(w).T) + b, Given((3, n)), Given((5, n), name),
        Given((5,)), scale=100)  # fmt: skip
    add("expert_linear", lambda x, w, i, d=decoded: routed(x, d(w), i), Given((4, n)), Given((3, 5, n), name), IDS,
        scale=100)  # fmt: skip
    add("embedding", lambda t, i, d=decoded: d(t)[i.astype(int)], Given((5, n), name),
        Given((3,), "i64", "choice", 5), dtypes=("f32",))  # fmt: skip
    add("dequantize", lambda w, d=decoded: d(w), Given((5, n), name), dtypes=("f32",))
    for op in ("copy", "contiguous"):
        # A type with gaps between its rows, so that there is something to pack.
        add(op, lambda w: w[::2], Given((5, n), name), dtypes=(name,),
            build=lambda w, op=op: getattr(ow, op)(w[::2]))  # fmt: skip

for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0", "mxfp4"):

    def encoded(x: Array, name: str = name) -> Array:
        data: Array = gguf.quants.quantize(x.astype(np.float32), gguf.GGMLQuantizationType[name.upper()])
        return data

    add("quantize", encoded, Given((5, 2 * DTYPES[name].block)), dtypes=("f32",),
        build=lambda x, name=name: ow.quantize(x, name))  # fmt: skip

# --- reading and writing by index -----------------------------------------------------------------------------------

ROWS = Given((3,), "i64", "choice", 4)
add("embedding", lambda t, i: t[i.astype(int)], Given((4, 5)), ROWS, dtypes=PLAIN)
add("take_along_axis", lambda x, i: np.array([[row[k] for k in some] for row, some in zip(x, i, strict=True)]),
    Given((4, 5)), Given((4, 3), "i32", "choice", 5), dtypes=PLAIN)  # fmt: skip


def added(ids: Array, rows: Array) -> Array:
    out = [0 * rows[0] for _ in range(4)]
    for i, row in zip(ids, rows, strict=True):
        out[i] = out[i] + row
    return np.array(out)


add("index_add", added, Given((9,), "i64", "choice", 4), Given((9, 5)), dtypes=NUMBERS, build=given("index_add", n=4),
    scale=10)  # fmt: skip


def region(x: Array, value: Array, add_up: bool) -> Array:
    out = x.copy()
    out[1:3, 2:4] = x[1:3, 2:4] + value if add_up else value
    return out


PART = (X, Given((2, 2)))
add("set_region", lambda x, v: region(x, v, False), *PART, dtypes=PLAIN, build=given("set_region", offsets=(1, 2)))
add("add_region", lambda x, v: region(x, v, True), *PART, dtypes=NUMBERS, build=given("add_region", offsets=(1, 2)))


def rows_replaced(state: Array, ids: Array, rows: Array) -> Array:
    out = state.copy()
    for i, row in zip(ids, rows, strict=True):
        out[i] = row
    return out


STATE = Given((4, 5), state=True)
add("index_copy", rows_replaced, STATE, Given((2,), "i64", "distinct", 4), Given((2, 5)), dtypes=PLAIN)
add("set_rows", rows_replaced, Given((4, 5)), Given((2,), "i64", "distinct", 4), Given((2, 5)), dtypes=PLAIN)
add("assign", lambda s, v: v, STATE, Given((4, 5)), dtypes=PLAIN)
add("accumulate", lambda s, v: s + v, STATE, Given((4, 5)), dtypes=NUMBERS)

# --- attention, positions -------------------------------------------------------------------------------------------


def attention(q: Array, k: Array, v: Array, mask: Array, sinks: Array) -> Array:
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    scores = product(q, np.moveaxis(k, -1, -2)) * L(0.25)
    scores = L(3) * np.tanh(scores / L(3)) + slopes(4, 8.0)[:, None, None] * mask
    extra = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    return product(softmax(np.concatenate([scores, extra], -1))[..., :-1], v)


add("attention", attention, Given((1, 4, 3, 8)), Given((1, 2, 6, 8)), Given((1, 2, 6, 5)), Given((3, 6), kind="unit"),
    Given((4,)), build=lambda q, k, v, m, s: ow.attention(
        q, k, v, m, scale=0.25, max_bias=8.0, soft_cap=3.0, sinks=s), scale=10)  # fmt: skip
add("attention", by_torch(lambda *qkv: functional.scaled_dot_product_attention(*qkv, is_causal=True)),
    *[Given((2, 3, 7, 8))] * 3, build=given("attention", causal=True), scale=100)  # fmt: skip


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    scores = 3 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 0.25 / 3)
    scores = scores + torch.from_numpy(np.float64(slopes(4, 8.0)))[:, None, None] * m
    extra = s[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1] @ v.repeat_interleave(2, 1)


def packed_gradient(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    """The gradients of q, k and v by torch, one behind the other for each group of keys."""

    def truth(g: Array, *operands: Array) -> Array:
        q, k, v, *rest = map(t64, operands)
        for x in (q, k, v):
            x.requires_grad_()
        made = torch.autograd.grad(function(q, k, v, *rest), (q, k, v), t64(g))
        return torch.cat([x.reshape(*k.shape[:2], -1) for x in made], -1).numpy()

    return truth


def of_attention(**options: Any) -> Callable[..., Any]:
    def build(g: Any, q: Any, k: Any, v: Any, mask: Any = None, sinks: Any = None) -> Any:
        made = ow.attention(q, k, v, mask, sinks=sinks, **options)
        return attention_backward(g, *made.srcs, **made.attrs)

    return build


add("attention_backward", packed_gradient(attended), Given((1, 4, 3, 5)), Given((1, 4, 3, 8)), Given((1, 2, 6, 8)),
    Given((1, 2, 6, 5)), Given((3, 6), kind="unit"), Given((4,)), build=of_attention(
        scale=0.25, max_bias=8.0, soft_cap=3.0), scale=100)  # fmt: skip
add("attention_backward",
    packed_gradient(lambda *qkv: functional.scaled_dot_product_attention(*qkv, is_causal=True)),
    *[Given((2, 3, 7, 8))] * 4, build=of_attention(causal=True), scale=100)  # fmt: skip


def turned(x: Array, positions: Array, factors: Array | None = None, half: bool = False) -> Array:
    pairs = x.shape[-1] // 2
    out = x.copy()
    for t, position in enumerate(positions):
        for i in range(pairs):
            angle = L(int(position)) * L(10000) ** (-L(2 * i) / (2 * pairs))
            angle = angle if factors is None else angle / factors[i]
            one, two = (i, i + pairs) if half else (2 * i, 2 * i + 1)
            a, b = x[:, t, one], x[:, t, two]
            out[:, t, one], out[:, t, two] = (
                a * np.cos(angle) - b * np.sin(angle),
                a * np.sin(angle) + b * np.cos(angle),
            )
    return out


TOKENS = Given((2, 6, 16))
AT = Given((6,), "i32", "choice", 4000)
for pairing in ("adjacent", "half"):
    half = pairing == "half"
    add("rope", lambda x, p, half=half: turned(x, p, None, half), TOKENS, AT, build=given("rope", pairing=pairing),
        scale=1000)  # fmt: skip
    # Factors as files have them, in f32: beside a half type they must not be rounded to it.
    add("rope", lambda x, p, f, half=half: turned(x, p, f, half), TOKENS, AT, Given((8,), "wide", "positive"),
        build=given("rope", pairing=pairing), scale=1000)  # fmt: skip


def waves(t: Array) -> Array:
    angles = t[:, None] * L(10000) ** (-np.arange(4).astype(L) / 4)
    return np.concatenate([np.cos(angles), np.sin(angles), 0 * angles[:, :1]], 1)


add("timestep_embedding", waves, Given((5,)), build=given("timestep_embedding", dim=9), scale=10)

# --- convolution, pooling, resampling, state space ------------------------------------------------------------------


def convolved(name: str, *shapes: tuple[int, ...], **options: Any) -> None:
    function = getattr(functional, name)
    add(name, by_torch(lambda *xs: function(*xs, **options)), *map(Given, shapes), build=given(name, **options),
        scale=100)  # fmt: skip


convolved("conv1d", (2, 4, 11), (6, 2, 3), (6,), stride=2, padding=1, dilation=2, groups=2)
convolved("conv2d", (2, 4, 7, 6), (6, 2, 3, 2), (6,), stride=(1, 2), padding=(1, 0), groups=2)
convolved("conv3d", (1, 2, 4, 5, 6), (3, 2, 2, 3, 2), (3,), padding=1)
convolved("conv_transpose1d", (2, 4, 6), (4, 3, 3), (6,), stride=2, padding=1, output_padding=1, groups=2)
convolved("conv_transpose2d", (2, 4, 4, 3), (4, 2, 3, 2), (2,), stride=2, padding=1, dilation=2)


def columns(x: Array) -> Array:
    padded = np.array(np.zeros((2, 3, 8, 6)), x.dtype)
    padded[:, :, 1:-1, 1:-1] = x
    windows = [padded[:, :, i : i + 3, j : j + 2].reshape(2, -1) for i in range(6) for j in range(5)]
    return np.stack(windows, -1)


add("im2col", columns, Given((2, 3, 6, 4)), dtypes=PLAIN, build=given("im2col", kernel_size=(3, 2), padding=1))
add("col2im", by_torch(lambda x: functional.fold(x, (6, 5), (3, 2), 1, 1, (2, 1))), Given((2, 18, 18)),
    build=given("col2im", size=(6, 5), kernel_size=(3, 2), padding=1, stride=(2, 1)), scale=10)  # fmt: skip
for rank in (1, 2):
    shape = (2, 3, 9, 8)[: 2 + rank]
    options = {"kernel_size": 3, "stride": 2, "padding": 1}

    def largest(x: Array, rank: int = rank) -> Array:
        least = min(x.ravel()) - 1
        padded = np.full([*x.shape[:2], *[n + 2 for n in x.shape[2:]]], least, x.dtype)
        padded[(..., *[slice(1, -1)] * rank)] = x
        starts = [range(0, n - 2, 2) for n in padded.shape[2:]]
        out = np.empty([*x.shape[:2], *map(len, starts)], x.dtype)
        for place in np.ndindex(*out.shape[2:]):
            cut = tuple([slice(2 * p, 2 * p + 3) for p in place])
            out[(..., *place)] = padded[(..., *cut)].reshape(*x.shape[:2], -1).max(-1)
        return out

    add(f"max_pool{rank}d", largest, Given(shape), dtypes=NUMBERS, build=given(f"max_pool{rank}d", **options))
    if rank == 2:

        def scattered(grad: Array, x: Array) -> Array:
            out = np.zeros(x.shape, grad.dtype)
            for n, c, i, j in np.ndindex(*grad.shape):
                window = [(a, b) for a in range(2 * i - 1, 2 * i + 2) for b in range(2 * j - 1, 2 * j + 2)
                          if 0 <= a < x.shape[2] and 0 <= b < x.shape[3]]  # fmt: skip
                best = max(window, key=lambda at: x[(n, c, *at)])
                out[(n, c, *best)] += grad[n, c, i, j]
            return out

        places = tuple([(n - 1) // 2 + 1 for n in shape[2:]])
        add("max_pool_backward", scattered, Given((*shape[:2], *places)), Given(shape),
            build=lambda grad, x: max_pool_backward(grad, x, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1),
                                                    dilation=(1, 1), ceil_mode=False), scale=10)  # fmt: skip
    averages = getattr(functional, f"avg_pool{rank}d")
    add(f"avg_pool{rank}d", by_torch(lambda x, f=averages: f(x, 3, 2, 1)), Given(shape),
        build=given(f"avg_pool{rank}d", **options), scale=10)  # fmt: skip


def shared_out(grad: Array) -> Array:
    x = torch.zeros((2, 3, 9, 8), dtype=torch.float64, requires_grad=True)
    made = functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
    return torch.autograd.grad(made, x, t64(grad))[0].numpy()


add("avg_pool_backward", shared_out, Given((2, 3, 5, 5)),
    build=lambda grad: avg_pool_backward(grad, (9, 8), kernel_size=(3, 3), stride=(2, 2), padding=(1, 1),
                                         dilation=(1, 1), ceil_mode=True, count_include_pad=False, divisor=0),
    scale=10)  # fmt: skip
add("interpolate", lambda x: x[:, :, [0, 0, 1, 1, 2, 2, 3]], Given((1, 2, 4)), dtypes=PLAIN,
    build=given("interpolate", size=7))  # fmt: skip
for mode, shape, size in (
    ("linear", (1, 2, 5), 9),
    ("bilinear", (1, 2, 4, 5), (7, 3)),
    ("bicubic", (1, 2, 4, 5), (9, 3)),
    ("trilinear", (1, 1, 3, 4, 2), (5, 2, 4)),
):
    resampled = by_torch(lambda x, mode=mode, size=size: functional.interpolate(x, size, mode=mode))
    add("interpolate", resampled, Given(shape),
        build=given("interpolate", size=size, mode=mode), scale=100)  # fmt: skip


def causal(x: Array, w: Array, b: Array, before: Array) -> Array:
    line = np.concatenate([before, x], -1)
    return np.stack([(line[:, :, t : t + 3] * w).sum(-1) + b for t in range(x.shape[-1])], -1)


add("causal_conv1d", causal, Given((2, 4, 6)), Given((4, 3)), Given((4,)), Given((2, 4, 2)),
    build=lambda x, w, b, s: ow.causal_conv1d(x, w, b, initial_states=s), scale=10)  # fmt: skip


def scanned(u: Array, delta: Array, a: Array, b: Array, c: Array, d: Array, h: Array) -> Array:
    out, h = u.copy(), h.copy()
    for n, ch in np.ndindex(u.shape[:2]):
        for t in range(u.shape[2]):
            step = np.log1p(np.exp(delta[n, ch, t]))
            h[n, ch] = np.exp(step * a[ch]) * h[n, ch] + step * b[n, :, t] * u[n, ch, t]
            out[n, ch, t] = (h[n, ch] * c[n, :, t]).sum() + d[ch] * u[n, ch, t]
    return out


add("selective_scan", scanned, Given((2, 4, 6)), Given((2, 4, 6)), Given((4, 3), kind="unit"), Given((2, 3, 6)),
    Given((2, 3, 6)), Given((4,)), Given((2, 4, 3)),
    build=lambda u, dt, a, b, c, d, h: ow.selective_scan(u, dt, a, b, c, d, delta_softplus=True, state=h),
    scale=100)  # fmt: skip


add("hadamard_transform", lambda x: np.array([[(-1) ** (i & j).bit_count() for j in range(8)] for i in range(8)]) @ x,
    Given((8,)), build=ow.hadamard_transform, scale=10)  # fmt: skip


add("indexer_scores", lambda q, k, w: (np.maximum(q @ k[:, None].swapaxes(2, 3), 0) * w[..., None]).sum(1),
    Given((2, 3, 4, 5)), Given((2, 6, 5)), Given((2, 3, 4)), build=ow.indexer_scores, scale=10)  # fmt: skip


def solved(a: Array, b: Array) -> Array:
    x = b.copy()
    for i in range(len(a)):
        x[i] = (b[i] - a[i, :i] @ x[:i]) / a[i, i]
    return x


add("solve_triangular", solved, Given((4, 4), kind="positive"), Given((4, 3)), build=ow.solve_triangular, scale=1000)


def balanced(x: Array) -> Array:
    m = np.exp(x) / np.exp(x).sum(-1, keepdims=True) + L(1e-6)
    m = m / (m.sum(0) + L(1e-6))
    m = m / (m.sum(1, keepdims=True) + L(1e-6))
    return m / (m.sum(0) + L(1e-6))


add("sinkhorn", balanced, Given((4, 4)), build=lambda x: ow.sinkhorn(x, 2), scale=10)


def recurred(q: Array, k: Array, v: Array, w: Array, a: Array, b: Array, h: Array) -> Array:
    out, h = v.copy(), h.copy()
    for n, head, t in np.ndindex(q.shape[:3]):
        s = h[n, head]
        s[...] = (
            w[n, head, t, :, None] * s
            + np.outer(b[n, head, t], a[n, head, t] @ s)
            + np.outer(k[n, head, t], v[n, head, t])
        )
        out[n, head, t] = q[n, head, t] @ s
    return out


add("linear_attention", recurred, Given((2, 2, 4, 3)), Given((2, 2, 4, 3)), Given((2, 2, 4, 5)),
    *(3 * [Given((2, 2, 4, 3), kind="unit")]), Given((2, 2, 3, 5)),
    build=lambda q, k, v, w, a, b, h: ow.linear_attention(q, k, v, decay=w, removal=a, insertion=b, state=h),
    scale=100)  # fmt: skip


def backwards(x: Array) -> Array:
    return x[::-1]


add("custom", backwards, dtypes=PLAIN, build=lambda x: ow.custom(backwards, x, like=x))


# --- values ---------------------------------------------------------------------------------------------------------


def values_of(rng: np.random.Generator, operand: Given, tried: str) -> tuple[str, Array]:
    """The type of an operand and values for it, full of bits that a rounding to a lesser type would change."""
    name = operand.dtype or tried
    if name == "wide":
        name = "f64" if tried == "f64" else "f32"
    dtype, size = as_dtype(name), prod(operand.shape)
    if dtype.is_quantized:
        floats = rng.standard_normal(operand.shape).astype(np.float32)
        return name, _blocks(rng, floats, name)
    if operand.kind in ("choice", "distinct"):
        many = (
            rng.permutation(operand.high)[:size] if operand.kind == "distinct" else rng.integers(0, operand.high, size)
        )
        return name, many.reshape(operand.shape).astype(dtype.numpy)
    if dtype.kind == "b":
        return name, rng.integers(0, 2, operand.shape).astype(np.bool_)
    if operand.kind == "few":
        low = 0 if dtype.kind == "u" else -3
        whole = rng.integers(low, 5, operand.shape)
        return name, (whole if dtype.is_integer else whole + rng.choice([0.0, 0.25, 0.5], operand.shape)).astype(
            dtype.numpy
        )
    if dtype.is_integer:
        limits = np.iinfo(dtype.numpy)  # sums and products wrap around
        return name, rng.integers(limits.min, limits.max, operand.shape, dtype.numpy, endpoint=True)
    floats = rng.standard_normal(operand.shape)
    if operand.kind == "positive":
        floats = np.abs(floats) + 0.3
    elif operand.kind == "unit":
        floats = np.tanh(floats)
    elif operand.kind == "mask":
        floats = np.where(rng.random(operand.shape) < 0.3, -np.inf, floats)
    return name, floats.astype(dtype.numpy)


def _blocks(rng: np.random.Generator, floats: Array, name: str) -> Array:
    from opweave_conformance.case import Operand
    from opweave_conformance.values import make_values

    return make_values(rng, Operand(floats.shape, name), floats.shape, as_dtype(name))


def exact(values: Array, dtype: str) -> Array:
    """Values as a truth gets them: without loss."""
    t = as_dtype(dtype)
    if t.is_quantized:
        return values
    if t.is_float:
        return values.astype(np.float64).astype(L)
    return values.astype(object) if t.is_integer else values


def cases() -> Iterator[tuple[str, str]]:
    """(op, dtype), each once."""
    yield from dict.fromkeys((t.op, dtype) for t in TABLE for dtype in t.dtypes)
