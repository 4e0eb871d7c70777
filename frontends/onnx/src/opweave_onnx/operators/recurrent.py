"""Recurrent networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import opweave as ow
from opweave.errors import ShapeError
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.operators.quantization import in_bytes
from opweave_onnx.operators.table import MICROSOFT, operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call

Function = Callable[[Tensor], Tensor]
QUANTIZED: Final = "DynamicQuantizeLSTM"
GATES: Final = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS: Final = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}


def _kind(call: Call) -> str:
    return "LSTM" if call.node.op == QUANTIZED else call.node.op


ACTIVATIONS: Final[dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]]] = {
    "sigmoid": (ow.sigmoid, ()),
    "tanh": (ow.tanh, ()),
    "relu": (ow.relu, ()),
    "softplus": (ow.softplus, ()),
    "softsign": (lambda x: x / (ow.abs(x) + 1.0), ()),
    "leakyrelu": (lambda x, a: ow.leaky_relu(x, a), (0.01,)),
    "elu": (lambda x, a: ow.elu(x, a), (1.0,)),
    "thresholdedrelu": (lambda x, a: ow.where(x > a, x, ow.constant(0, x.dtype)), (1.0,)),
    "affine": (lambda x, a, b: ow.scale(x, a, b), (1.0, 0.0)),
    "hardsigmoid": (lambda x, a, b: ow.clamp(ow.scale(x, a, b), 0.0, 1.0), (0.2, 0.5)),
    "scaledtanh": (lambda x, a, b: a * ow.tanh(b * x), (1.0, 1.0)),
}
"""Activation functions by their names in small letters, with the defaults of the alpha and beta that they take."""


def _activation(function: Callable[..., Tensor], *numbers: float) -> Function:
    return lambda x: function(x, *numbers)


def _functions(call: Call, directions: int) -> list[list[Function]]:
    """The activation functions of each direction."""
    names = call.get("activations", ()) or DEFAULTS[_kind(call)] * directions
    given = list(call.get("activation_alpha", ())), list(call.get("activation_beta", ()))
    made: list[Function] = []
    for name in names:
        if name.lower() not in ACTIVATIONS:
            raise call.refuse(f"there is no activation {name.lower()!r}")
        function, defaults = ACTIVATIONS[name.lower()]
        numbers = [values.pop(0) if values else default for values, default in zip(given, defaults, strict=False)]
        made.append(_activation(function, *numbers))
    each = len(DEFAULTS[_kind(call)])
    return [made[i * each : (i + 1) * each] for i in range(directions)]


@composite
def _lstm(call: Call, gates: Tensor, h: Tensor, c: Tensor, parts: dict[str, Any], f: Sequence[Function]) -> Any:
    i, o, forget, g = ow.split(
        gates + (_in_steps(h) if call.node.op == QUANTIZED else h) @ parts["r"] + parts["rb"], 4, -1
    )
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


@composite
def _gru(call: Call, gates: Tensor, h: Tensor, c: Tensor, parts: dict[str, Any], f: Sequence[Function]) -> Any:
    n = h.shape[-1]
    zr = f[0](gates[..., : 2 * n] + h @ parts["r"][:, : 2 * n] + parts["rb"][: 2 * n])
    z, r = zr[..., :n], zr[..., n:]
    weights, bias = parts["r"][:, 2 * n :], parts["rb"][2 * n :]
    before = r * (h @ weights + bias) if call.get("linear_before_reset", 0) else (r * h) @ weights + bias
    return (1.0 - z) * f[1](gates[..., 2 * n :] + before) + z * h, c


@composite
def _rnn(call: Call, gates: Tensor, h: Tensor, c: Tensor, parts: dict[str, Any], f: Sequence[Function]) -> Any:
    return f[0](gates + h @ parts["r"] + parts["rb"]), c


STEPS: Final = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


UNROLLED: Final = 64
"""Networks of up to so many steps are built as nodes of the graph around them."""
AT_ONCE: Final = 32
"""Steps of longer networks in one program, which is run several times."""


def _stacked(rows: Sequence[Tensor], axis: int) -> Tensor:
    return ow.concat([ow.expand_dims(row, axis) for row in rows], axis)


class _Direction(NamedTuple):
    """What the steps of one direction share.

    Attributes:
        number: 0, or 1 for the second one.
        backwards: from the last step to the first.
        parts: recurrent weights, their bias, peepholes.
        functions: of activation.
    """

    number: int
    backwards: bool
    parts: dict[str, Any]
    functions: Sequence[Function]

    def steps(
        self, call: Call, inputs: Sequence[Tensor], state: Tensor, cell: Tensor, there: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """The results of the steps in order, and state and cell after them.

        Args:
            inputs: for each step the gates without the part that depends on the state: (batch, gates).
            there: for each step whether the sequences have not ended, (batch, 1). A sequence that has ended keeps its
                state, and its results are zeros. ``None``: none ends.
        """
        results = []
        step, zero = STEPS[_kind(call)], ow.constant(0, state.dtype)
        for t, gates in enumerate(inputs):
            new, new_cell = step(call, gates, state, cell, self.parts, self.functions)
            if there is not None:
                state, cell = ow.where(there[t], new, state), ow.where(there[t], new_cell, cell)
                new = ow.where(there[t], new, zero)
            else:
                state, cell = new, new_cell
            results.append(new)
        return results, state, cell


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
    count, size, gates = w.shape[0], r.shape[2], GATES[_kind(call)]
    if call.get("hidden_size", size) != size:
        raise ShapeError(f"hidden_size is {call.get('hidden_size', size)}, and the weights are of {size}")
    functions, clip = _functions(call, count), call.get("clip", 0.0)
    if clip:
        functions = [[lambda v, f=f: f(ow.clamp(v, -clip, clip)) for f in row] for row in functions]  # type: ignore[misc]
    zeros = ow.full((batch, size), 0.0, x.dtype)
    directions, inputs = [], []
    for d in range(count):
        rb = ow.full((gates * size,), 0.0, x.dtype) if bias is None else bias[d, gates * size :]
        parts = {"r": ow.swapaxes(r[d], 0, 1), "rb": rb, "p": None if peepholes is None else peepholes[d]}
        backwards = d == 1 or call.get("direction", "forward") == "reverse"
        directions.append(_Direction(d, backwards, parts, functions[d]))
        rows = ow.reshape(x, (steps * batch, x.shape[2]))
        each = ow.linear(rows, w[d], None if bias is None else bias[d, : gates * size])
        inputs.append(ow.reshape(each, (steps, batch, gates * size)))
    states = [zeros if h is None else h[d] for d in range(count)]
    cells = [zeros if c is None else c[d] for d in range(count)]
    array = call.trace.session.array
    known = all(v is None or array(v) is not None for v in (r, bias, peepholes))
    run = _run_again if known and steps > UNROLLED else _unrolled
    y, final, last_cells = run(call, directions, inputs, states, cells, lengths)
    if batch_first:
        y, final, last_cells = (
            ow.transpose(y, (2, 0, 1, 3)),
            ow.swapaxes(final, 0, 1),
            ow.swapaxes(last_cells, 0, 1),
        )
    return (y, final, last_cells) if _kind(call) == "LSTM" else (y, final)


@operator(QUANTIZED, domain=MICROSOFT)
def _quantized(
    call: Call, x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None, lengths: Tensor | None, h: Tensor | None,
    c: Tensor | None, peepholes: Tensor | None, w_scale: Tensor, w_zero: Tensor, r_scale: Tensor, r_zero: Tensor,
) -> Any:  # fmt: skip
    """An LSTM with weights of 8 bits, (directions, inputs, gates). Inputs and states are rounded to 8 bits before they
    are multiplied. The products are those of the integers, times both scales."""

    def weights(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        found = [call.trace.session.array(v) for v in (values, scale, zero)]
        if any(array is None for array in found):
            raise call.refuse("its weights, their scales and zero points have to be initializers")

        def compute() -> Array:
            whole, factor, shift = found
            assert whole is not None
            assert factor is not None
            assert shift is not None
            rows = (len(whole), 1, -1)  # a number for each direction, or for each of its gates
            floats = (whole.astype(np.float32) - shift.astype(np.float32).reshape(rows)) * factor.reshape(rows)
            return np.ascontiguousarray(floats.swapaxes(1, 2))

        return call.trace.session.derived(values, QUANTIZED, compute)

    return _recurrent(call, _in_steps(x), weights(w, w_scale, w_zero), weights(r, r_scale, r_zero), bias, lengths, h, c,
                      peepholes)  # fmt: skip


def _in_steps(x: Tensor) -> Tensor:
    values, scale, zero = in_bytes(x)
    return (values - zero) * scale


def _unrolled(
    call: Call, directions: Sequence[_Direction], inputs: Sequence[Tensor], states: Sequence[Tensor],
    cells: Sequence[Tensor], lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """All steps as nodes of the graph."""
    lasting, finals, last_cells = [], [], []
    for direction, each, state, cell in zip(directions, inputs, states, cells, strict=True):
        order = range(each.shape[0])[:: -1 if direction.backwards else 1]
        there = None
        if lengths is not None:
            there = [ow.expand_dims(lengths > ow.constant(t, lengths.dtype), 1) for t in order]
        results, final, last = direction.steps(call, [each[t] for t in order], state, cell, there)
        none = ow.full((0, *state.shape), 0.0, state.dtype)  # of a sequence without steps
        lasting.append(_stacked(results[::-1] if direction.backwards else results, 0) if results else none)
        finals.append(final)
        last_cells.append(last)
    return _stacked(lasting, 1), _stacked(finals, 0), _stacked(last_cells, 0)


def _run_again(
    call: Call, directions: Sequence[_Direction], inputs: Sequence[Tensor], states: Sequence[Tensor],
    cells: Sequence[Tensor], lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A program for `AT_ONCE` steps, which the host runs as often as needed."""
    n, masked = len(directions), lengths is not None
    steps, batch, gates = inputs[0].shape
    dtype, session = inputs[0].dtype, call.trace.session

    def program(direction: _Direction, length: int) -> Any:
        def build() -> Any:
            given = ow.input("gates", (length, batch, gates), dtype)
            state, cell = (ow.input(name, (batch, states[0].shape[1]), dtype) for name in ("state", "cell"))
            there = ow.input("there", (length, batch, 1), "bool") if masked else None
            rows = None if there is None else [there[t] for t in range(length)]
            results, final, last = direction.steps(call, [given[t] for t in range(length)], state, cell, rows)
            outputs = {"y": _stacked(results, 0), "state": final}
            return session.build(outputs if last is cell else {**outputs, "cell": last})

        return session.body((call.node, direction.number, length, batch, dtype, masked), build)

    def run(*arrays: Array) -> list[Array]:
        found: list[list[Array]] = [[], [], []]
        for direction in directions:
            given, state, cell = (arrays[i * n + direction.number] for i in range(3))
            there = np.arange(steps)[:, None, None] < arrays[-1].reshape(-1, 1) if masked else None
            if direction.backwards:
                given, there = given[::-1], None if there is None else there[::-1]
            results = np.empty((steps, batch, state.shape[1]), dtype.numpy)
            for first in range(0, steps, AT_ONCE):
                some = slice(first, first + AT_ONCE)
                feeds = {"gates": given[some], "state": state, "cell": cell}
                if there is not None:
                    feeds["there"] = there[some]
                made = program(direction, len(feeds["gates"]))
                values = made.run({name: feeds[name] for name in made.inputs})
                results[some], state, cell = values["y"], values["state"], values.get("cell", cell)
            for row, value in zip(found, (results[::-1] if direction.backwards else results, state, cell), strict=True):
                row.append(value)
        return [np.stack(row, axis) for row, axis in zip(found, (1, 0, 0), strict=True)]

    for direction in directions if session.runs else ():
        for length in {AT_ONCE, steps % AT_ONCE} - {0}:
            program(direction, length)  # built now, while the graph is traced
    sources = (*inputs, *states, *cells, *(() if lengths is None else (lengths,)))
    y, final, last = call.found(run, *sources)
    return y, final, last
