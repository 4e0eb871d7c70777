"""`composite`: what is one operation of the caller's, and several nodes, computes half types as one node would; all
functions and gradients that are built so, on every device, against truths in f64."""

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
import opweave_models
from opweave.graph.dtypes import as_dtype
from opweave.ops.operands import composite
from tests.support.real_devices import combined

DIGITS = {"f16": 11, "bf16": 8}
RNG = np.random.default_rng(7)
X, Y = RNG.uniform(100, 1000, (2, 4, 1000))
S = RNG.uniform(-4, 4, (4, 1000))
H = RNG.uniform(20000, 40000, 400)


def test_types_of_results() -> None:
    half, other, full = (ow.input(n, (3,), n) for n in ("f16", "bf16", "f32"))
    ids = ow.input("ids", (3,), "i64")
    seen: list[str] = []

    @composite
    def built(*values, more=()):
        seen[:] = [v.dtype.name for v in (*values, *more)]
        return values[0] * 2.0, [values[-1], None], "text"

    first, (last, nothing), text = built(half, half)
    assert (seen, first.dtype.name, last.dtype.name, nothing, text) == (["f32", "f32"], "f16", "f16", None, "text")
    first, (last, _), _ = built(half, ids, more=[other])
    assert (seen, first.dtype.name, last.dtype.name) == (["f32", "i64", "f32"], "f32", "i64")
    assert built(half, full)[0].dtype.name == "f32"
    assert built(other)[0].dtype.name == "bf16"
    assert built(full)[1][0] is full  # nothing is converted


FORWARD = {
    "hyper_connection_post": lambda x, y, s, h: opweave_models.hyper_connection_post(
        x[:2], ow.reshape(y, (2, 2, 1000)), s[:2, :2], ow.reshape(s[:2, :4], (2, 2, 2))
    ),
    "add_relative_positions": lambda x, y, s, h: opweave_models.add_relative_positions(
        ow.reshape(h, (1, 20, 20)), ow.reshape(h[:100], (1, 4, 5, 5)), ow.reshape(-h[100:180], (1, 4, 5, 4))
    ),
}
BACKWARD = {
    "div": lambda x, y, s, h: ow.gradients(x / y, (x, y), 1000.0),
    "square": lambda x, y, s, h: (ow.gradients(ow.square(x), x, s),),
    "pow": lambda x, y, s, h: ow.gradients(ow.pow(x, s * 0.5), (x,), 1.0),
    "sqrt": lambda x, y, s, h: (ow.gradients(ow.sqrt(x), x, 1000.0),),
    "rsqrt": lambda x, y, s, h: (ow.gradients(ow.rsqrt(x), x, 60000.0),),
    "reciprocal": lambda x, y, s, h: (ow.gradients(ow.reciprocal(x), x, 60000.0),),
    "var": lambda x, y, s, h: (ow.gradients(ow.var(x, -1), x, 30.0),),
    "gelu": lambda x, y, s, h: (ow.gradients(ow.gelu(s), s, 1000.0),),
    "hardswish": lambda x, y, s, h: (ow.gradients(ow.hardswish(s), s, 1000.0),),
    "swiglu": lambda x, y, s, h: ow.gradients(ow.swiglu(x, s), (x, s), 10.0),
    "atan": lambda x, y, s, h: (ow.gradients(ow.atan(x), x, 60000.0),),
    "asinh": lambda x, y, s, h: (ow.gradients(ow.asinh(x), x, 1000.0),),
    "max": lambda x, y, s, h: (ow.gradients(ow.max(ow.floor(s), -1), s, 1.0),),
}


def results(devices, dtype, arrays):
    leaves = [ow.input(n, a.shape, dtype) for n, a in zip("xysh", arrays, strict=True)]
    wanted = {name: build(*leaves) for name, build in FORWARD.items()}
    for name, build in BACKWARD.items():
        wanted |= {f"{name} {i}": g for i, g in enumerate(build(*leaves))}
    with ow.Scheduler(devices) as scheduler:
        found = scheduler.build(wanted).run(dict(zip("xysh", arrays, strict=True)))
    return {name: np.array(a) for name, a in found.items()}


@pytest.mark.parametrize("dtype", DIGITS)
@pytest.mark.parametrize("names", ["cpu", "opencl", "opencl 2", "torch", "ort", "host"])
def test_results_are_rounded_once(names, dtype) -> None:
    kind = as_dtype(dtype).numpy
    given = [a.astype(kind) for a in (X, Y, S, H)]
    truth = results(["host"], "f64", [a.astype(np.float64) for a in given])
    with combined(names) as devices:
        found = results([*devices, *(["host"] if names == "ort" else [])], dtype, given)
    wrong = {}
    for name, want in truth.items():
        assert found[name].dtype == kind, name
        got = found[name].astype(np.float64)
        # Gradients read the rounded result of the operation, up to its cube. Numbers below 2^-14 have fewer digits.
        limit = 4.1 * 2.0 ** -DIGITS[dtype] * np.abs(want) + 1e-4 * np.abs(want).max() + 6e-8
        if not (np.abs(got - want) <= limit).all():
            wrong[name] = float((np.abs(got - want) / limit).max())
    assert not wrong
