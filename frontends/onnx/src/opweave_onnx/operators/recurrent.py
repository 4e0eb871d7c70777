"""Recurrent networks, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave_onnx.operators.table import operator
from opweave_onnx.trace import Call

Function = Callable[[Tensor], Tensor]
GATES: Final = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS: Final = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}


def _functions(call: Call, directions: int) -> list[list[Function]]:
    """The activation functions of each direction."""
    names = call.get("activations", ()) or DEFAULTS[call.node.op] * directions
    alphas, betas = list(call.get("activation_alpha", ())), list(call.get("activation_beta", ()))

    def number(values: list[float], default: float) -> float:
        return values.pop(0) if values else default

    made: list[Function] = []
    for name in names:
        match name.lower():
            case "sigmoid":
                made.append(ow.sigmoid)
            case "tanh":
                made.append(ow.tanh)
            case "relu":
                made.append(ow.relu)
            case "softplus":
                made.append(ow.softplus)
            case "softsign":
                made.append(lambda x: x / (ow.abs(x) + 1.0))
            case "leakyrelu":
                a = number(alphas, 0.01)
                made.append(lambda x, a=a: ow.leaky_relu(x, a))  # type: ignore[misc]
            case "elu":
                a = number(alphas, 1.0)
                made.append(lambda x, a=a: ow.elu(x, a))  # type: ignore[misc]
            case "thresholdedrelu":
                a = number(alphas, 1.0)
                made.append(lambda x, a=a: ow.where(x > a, x, ow.constant(0, x.dtype)))  # type: ignore[misc]
            case "affine":
                a, b = number(alphas, 1.0), number(betas, 0.0)
                made.append(lambda x, a=a, b=b: ow.scale(x, a, b))  # type: ignore[misc]
            case "hardsigmoid":
                a, b = number(alphas, 0.2), number(betas, 0.5)
                made.append(lambda x, a=a, b=b: ow.clamp(ow.scale(x, a, b), 0.0, 1.0))  # type: ignore[misc]
            case "scaledtanh":
                a, b = number(alphas, 1.0), number(betas, 1.0)
                made.append(lambda x, a=a, b=b: a * ow.tanh(b * x))  # type: ignore[misc]
            case other:
                raise call.refuse(f"there is no activation {other!r}")
    each = len(DEFAULTS[call.node.op])
    return [made[i * each : (i + 1) * each] for i in range(directions)]


def _lstm(call: Call, gates: Tensor, h: Tensor, c: Tensor, parts: dict[str, Any], f: Sequence[Function]) -> Any:
    i, o, forget, g = ow.split(gates + h @ parts["r"] + parts["rb"], 4, -1)
    peephole = parts["p"]
    if peephole is not None:
        n = h.shape[-1]
        i, forget = i + peephole[:n] * c, forget + peephole[2 * n :] * c
    gate = f[0](i)
    keep = 1.0 - gate if call.get("input_forget", 0) else f[0](forget)
    c = keep * c + gate * f[1](g)
    if peephole is not None:
        o = o + peephole[n : 2 * n] * c
    return f[0](o) * f[2](c), c


def _gru(call: Call, gates: Tensor, h: Tensor, c: Tensor, parts: dict[str, Any], f: Sequence[Function]) -> Any:
    n = h.shape[-1]
    zr = f[0](gates[..., : 2 * n] + h @ parts["r"][:, : 2 * n] + parts["rb"][: 2 * n])
    z, r = zr[..., :n], zr[..., n:]
    weights, bias = parts["r"][:, 2 * n :], parts["rb"][2 * n :]
    before = r * (h @ weights + bias) if call.get("linear_before_reset", 0) else (r * h) @ weights + bias
    return (1.0 - z) * f[1](gates[..., 2 * n :] + before) + z * h, c


def _rnn(call: Call, gates: Tensor, h: Tensor, c: Tensor, parts: dict[str, Any], f: Sequence[Function]) -> Any:
    return f[0](gates + h @ parts["r"] + parts["rb"]), c


STEPS: Final = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


@operator("RNN", "GRU", "LSTM")
def _recurrent(
    call: Call, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
    h: Tensor | None = None, c: Tensor | None = None, peepholes: Tensor | None = None,
) -> Any:  # fmt: skip
    batch_first = bool(call.get("layout", 0))
    if batch_first:
        x = ow.swapaxes(x, 0, 1)
        h, c = (None if v is None else ow.swapaxes(v, 0, 1) for v in (h, c))
    steps, batch = x.shape[:2]
    directions, size = w.shape[0], r.shape[2]
    gates, step = GATES[call.node.op], STEPS[call.node.op]
    functions, clip = _functions(call, directions), call.get("clip", 0.0)
    if clip:
        functions = [[lambda v, f=f: f(ow.clamp(v, -clip, clip)) for f in row] for row in functions]  # type: ignore[misc]
    zeros = ow.full((batch, size), 0.0, x.dtype)
    lasting: list[Tensor] = []
    last_h, last_c = [], []
    for d in range(directions):
        rb = ow.full((gates * size,), 0.0, x.dtype) if bias is None else bias[d, gates * size :]
        parts = {"r": ow.swapaxes(r[d], 0, 1), "rb": rb, "p": None if peepholes is None else peepholes[d]}
        inputs = ow.linear(ow.reshape(x, (steps * batch, -1)), w[d], None if bias is None else bias[d, : gates * size])
        inputs = ow.reshape(inputs, (steps, batch, gates * size))
        state, cell = zeros if h is None else h[d], zeros if c is None else c[d]
        backwards = d == 1 or call.get("direction", "forward") == "reverse"
        results: list[Tensor] = []
        for t in reversed(range(steps)) if backwards else range(steps):
            new, new_cell = step(call, inputs[t], state, cell, parts, functions[d])
            if lengths is not None:  # behind its end a sequence keeps its state, and gives zeros
                there = ow.expand_dims(lengths > ow.constant(t, lengths.dtype), 1)
                state, cell = ow.where(there, new, state), ow.where(there, new_cell, cell)
                results.append(ow.where(there, new, ow.constant(0, x.dtype)))
            else:
                state, cell = new, new_cell
                results.append(new)
        lasting.append(ow.concat([ow.expand_dims(v, 0) for v in (results[::-1] if backwards else results)], 0))
        last_h.append(ow.expand_dims(state, 0))
        last_c.append(ow.expand_dims(cell, 0))
    y = ow.concat([ow.expand_dims(v, 1) for v in lasting], 1)
    final, cells = ow.concat(last_h, 0), ow.concat(last_c, 0)
    if batch_first:
        y, final, cells = ow.transpose(y, (2, 0, 1, 3)), ow.swapaxes(final, 0, 1), ow.swapaxes(cells, 0, 1)
    return (y, final, cells) if call.node.op == "LSTM" else (y, final)
