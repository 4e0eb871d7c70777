"""LSTM, GRU and plain recurrent layers: one product for the inputs of all steps, then step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import opweave as ow
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_torch.frontend.call import Call
from opweave_torch.frontend.native import name_of
from opweave_torch.frontend.operators.table import operator

__all__: list[str] = []

State = tuple[Tensor, ...]


@composite
def _lstm_step(gates: Tensor, state: State, w: Tensor, b: Tensor | None) -> State:
    h, c = state
    i, f, g, o = ow.split(gates + ow.linear(h, w, b), 4, -1)
    c = ow.sigmoid(f) * c + ow.sigmoid(i) * ow.tanh(g)
    return ow.sigmoid(o) * ow.tanh(c), c


@composite
def _gru_step(gates: Tensor, state: State, w: Tensor, b: Tensor | None) -> State:
    (h,) = state
    r, z, n = ow.split(gates, 3, -1)
    hr, hz, hn = ow.split(ow.linear(h, w, b), 3, -1)
    z = ow.sigmoid(z + hz)
    n = ow.tanh(n + ow.sigmoid(r + hr) * hn)
    return ((1.0 - z) * n + z * h,)


def _plain_step(function: Callable[[Tensor], Tensor]) -> Callable[..., State]:
    return composite(lambda gates, state, w, b: (function(gates + ow.linear(state[0], w, b)),))


STEPS: Final[dict[str, Callable[..., State]]] = {
    "lstm": _lstm_step, "gru": _gru_step, "rnn_tanh": _plain_step(ow.tanh), "rnn_relu": _plain_step(ow.relu),
}  # fmt: skip


@operator("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def _recurrent(
    call: Call, x: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    name = name_of(call.node.target)
    step = STEPS[name]
    states = tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    projected = each % 2 == 1  # the last parameter of a cell makes its state smaller (``proj_size``)
    if (train and dropout) or not x.shape[0 if not batch_first else 1] or x.ndim != 3:
        return call.fallback(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    if batch_first:
        x = ow.swapaxes(x, 0, 1)
    finals: list[State] = []
    for layer in range(num_layers):
        sides = []
        for direction in range(directions):
            place = layer * directions + direction
            w, u, *others = params[place * each : (place + 1) * each]
            b, ub = others[:2] if has_biases else (None, None)
            gates = ow.linear(x, w, b)
            state: State = tuple([s[place] for s in states])
            found: dict[int, Tensor] = {}
            for t in reversed(range(x.shape[0])) if direction else range(x.shape[0]):
                state = step(gates[t], state, u, ub)
                if projected:
                    state = ow.linear(state[0], others[-1]), *state[1:]
                found[t] = ow.expand_dims(state[0], 0)
            finals.append(state)
            sides.append(ow.concat([found[t] for t in range(x.shape[0])], 0))
        x = ow.concat(sides, -1) if directions == 2 else sides[0]
    last = [ow.concat([ow.expand_dims(state[i], 0) for state in finals], 0) for i in range(len(states))]
    return (ow.swapaxes(x, 0, 1) if batch_first else x), *last
