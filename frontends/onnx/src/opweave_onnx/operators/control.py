"""Control flow. A condition selects a graph, whose nodes are built in place; a condition that is computed is read by
the host first. Loops of few iterations are unrolled; others run a program for their body in each iteration."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.graph.dtypes import as_dtype
from opweave.graph.tensor import Tensor
from opweave_onnx.graphs import Graph
from opweave_onnx.operators.movement import axis_of
from opweave_onnx.operators.table import operator
from opweave_onnx.tensors import Array
from opweave_onnx.trace import Call

UNROLLED: Final = 16
"""Loops of up to so many iterations are built as nodes, one iteration after the other."""
ENDLESS: Final = np.iinfo(np.int64).max


@operator("If", raw=True)
def _if(call: Call, condition: Any) -> Any:
    branch = "then_branch" if bool(call.known(condition).reshape(())) else "else_branch"
    return tuple(call.inline(call.node.attributes[branch]))


@operator("Loop", raw=True)
def _loop(call: Call, limit: Any = None, condition: Any = None, *carried: Any) -> Any:
    body: Graph = call.node.attributes["body"]
    goes_on = body.outputs[0].name
    produced = next((node for node in body.nodes if goes_on in node.outputs), None)
    fixed = produced is not None and (
        produced.op == "Constant" or (produced.op == "Identity" and produced.inputs[0] == body.inputs[1].name)
    )
    fixed = fixed or goes_on in body.initializers
    count = ENDLESS if limit is None else int(call.known(limit).reshape(()))
    begins = True if condition is None else bool(call.known(condition).reshape(()))
    if not begins or count <= 0:
        never = call.never(body, 1 + len(carried), ow.input("iteration", (), "i64"), np.array(True), *carried)
        return (*carried, *[_none_of(value, 0) for value in never])
    if fixed and count <= UNROLLED:
        return _unrolled(call, body, count, carried)
    return _run_again(call, body, count, carried)


def _unrolled(call: Call, body: Graph, count: int, carried: tuple[Any, ...]) -> Any:
    n = len(carried)
    values = list(carried)
    rows: list[list[Any]] = [[] for _ in body.outputs[1 + n :]]
    for i in range(count):
        goes_on, *results = call.inline(body, np.array(i, np.int64), np.array(True), *values)
        values = results[:n]
        for row, value in zip(rows, results[n:], strict=True):
            row.append(value)
        if isinstance(goes_on, np.ndarray) and not goes_on.item():
            break
    return (*values, *[_stacked(call, row, 0) for row in rows])


def _stacked(call: Call, row: list[Any], axis: int) -> Any:
    if all(isinstance(v, np.ndarray) for v in row):
        return np.stack(row, axis)
    return ow.concat([ow.expand_dims(call.tensor(v), axis) for v in row], axis)


def _none_of(value: Any, axis: int) -> Array:
    """What is stacked of no values of this shape and dtype, along an axis of the result."""
    shape = list(value.shape)
    shape.insert(axis % (len(shape) + 1), 0)
    return np.zeros(shape, as_dtype(value.dtype).numpy)


def _run_again(call: Call, body: Graph, count: int, carried: tuple[Any, ...]) -> Any:
    """The loop as a function of arrays, which runs a program for the body in each iteration."""
    runner = call.trace.session.runner(body)
    names = [value.name for value in body.inputs]
    captured = sorted(runner.captured)
    around = [call.trace.frame[name] for name in captured]
    n = len(carried)

    def loop(*arrays: Any) -> list[Any]:
        outer = dict(zip(captured, arrays[n:], strict=True))
        values = list(arrays[:n])
        rows: list[list[Any]] = [[] for _ in body.outputs[1 + n :]]
        i, goes_on = 0, True
        while goes_on and i < count:
            feeds = dict(zip(names, (np.array(i, np.int64), np.array(True), *values), strict=True)) | outer
            found = [*runner.run(feeds).values()]
            goes_on = bool(np.asarray(found[0]).reshape(()))
            values = found[1 : 1 + n]
            for row, value in zip(rows, found[1 + n :], strict=True):
                row.append(value)
            i += 1
        return [*values, *[np.stack(row) for row in rows]]

    return tuple(call.found(loop, *carried, *around))


# --- over the elements of an axis -----------------------------------------------------------------------------------


@operator("Scan", raw=True)
def _scan(call: Call, *inputs: Any) -> Any:
    if call.before(9):  # with a batch, and a first input for the lengths
        if inputs[0] is not None:
            raise call.refuse("lengths of sequences are not supported in version 8")
        given = [call.tensor(v) for v in inputs[1:]]
        batch = given[0].shape[0]
        if not batch:
            n = len(given) - call.get("num_scan_inputs", 1)
            one = [ow.input("one", v.shape[1 if i < n else 2 :], v.dtype) for i, v in enumerate(given)]
            never, steps = call.never(call.node.attributes["body"], 0, *one), given[-1].shape[1]
            shapes = [(0, *v.shape) if i < n else (0, steps, *v.shape) for i, v in enumerate(never)]
            return tuple([np.zeros(s, as_dtype(v.dtype).numpy) for s, v in zip(shapes, never, strict=True)])
        parts = [_scanned(call, [v[b] for v in given], 8) for b in range(batch)]
        return tuple([_stacked(call, list(values), 0) for values in zip(*parts, strict=True)])
    return tuple(_scanned(call, list(inputs), 9))


def _scanned(call: Call, inputs: list[Any], version: int) -> list[Any]:
    body: Graph = call.node.attributes["body"]
    scans = call.get("num_scan_inputs", 1)
    n = len(inputs) - scans
    backwards = call.get("scan_input_directions", call.get("directions", ())) or (0,) * scans
    axes = (call.get("scan_input_axes", ()) if version > 8 else ()) or (0,) * scans
    values: list[Any] = list(inputs[:n])
    series = [(call.tensor(v), axis_of(v, a), b) for v, a, b in zip(inputs[n:], axes, backwards, strict=True)]
    count = series[0][0].shape[series[0][1]]
    if count > UNROLLED * 4:
        return _scanned_again(call, body, values, series, count)
    rows: list[list[Any]] = [[] for _ in body.outputs[n:]]
    at = call.get("scan_output_axes", ()) or (0,) * len(rows)
    if not count:
        elements = [ow.input("element", [m for i, m in enumerate(v.shape) if i != axis], v.dtype)
                    for v, axis, _ in series]  # fmt: skip
        never = call.never(body, n, *values, *elements)
        return [*values, *[_none_of(value, axis) for value, axis in zip(never, at, strict=True)]]
    for i in range(count):
        parts = [_element(v, axis, count - 1 - i if back else i) for v, axis, back in series]
        results = call.inline(body, *values, *parts)
        values = results[:n]
        for row, value in zip(rows, results[n:], strict=True):
            row.append(value)
    reverse = call.get("scan_output_directions", ()) or (0,) * len(rows)
    stacked = []
    for row, back, axis in zip(rows, reverse, at, strict=True):
        rank = len(row[0].shape) + 1
        stacked.append(_stacked(call, row[::-1] if back else row, axis % rank))
    return [*values, *stacked]


def _element(x: Tensor, axis: int, i: int) -> Tensor:
    return x[tuple([slice(None)] * axis + [i])]


def _scanned_again(call: Call, body: Graph, values: list[Any], series: Any, count: int) -> list[Any]:
    """As a function of arrays, which runs a program for the body in each iteration."""
    runner = call.trace.session.runner(body)
    names, captured = [value.name for value in body.inputs], sorted(runner.captured)
    around = [call.trace.frame[name] for name in captured]
    n, scans = len(values), len(series)
    outputs = len(body.outputs) - n
    reverse = call.get("scan_output_directions", ()) or (0,) * outputs
    at = call.get("scan_output_axes", ()) or (0,) * outputs

    def scan(*arrays: Any) -> list[Any]:
        outer = dict(zip(captured, arrays[n + scans :], strict=True))
        state = list(arrays[:n])
        rows: list[list[Any]] = [[] for _ in range(outputs)]
        for i in range(count):
            parts = [
                np.take(a, count - 1 - i if back else i, axis)
                for a, (_, axis, back) in zip(arrays[n : n + scans], series, strict=True)
            ]
            found = [*runner.run(dict(zip(names, (*state, *parts), strict=True)) | outer).values()]
            state = found[:n]
            for row, value in zip(rows, found[n:], strict=True):
                row.append(value)
        return [*state, *[np.stack(r[::-1] if back else r, a) for r, back, a in zip(rows, reverse, at, strict=True)]]

    return list(call.found(scan, *values, *[v for v, _, _ in series], *around))
