"""Linear algebra beyond products."""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.linalg import hadamard_factors, hadamard_matrix
from opweave_cpu.kernels.table import KERNELS
from opweave_cpu.tiles import Array, compute_dtype, constant, in_turn


def _converted(step: Step) -> Arrays:
    """Sources and output in the type to compute in, where they have another one."""
    dtype = compute_dtype(step.out.dtype)
    arrays = {f"wide{i}": (dtype, arg.shape) for i, arg in enumerate(step.srcs) if arg.dtype is not dtype}
    return {**arrays, **({"result": (dtype, step.out.shape)} if step.out.dtype is not dtype else {})}


# --- Hadamard transform ---------------------------------------------------------------------------------------------


def _hadamard_workspace(step: Step) -> Arrays:
    return {**_converted(step), "half": (compute_dtype(step.out.dtype), step.out.shape)}


@KERNELS("hadamard_transform", workspace=_hadamard_workspace)
def hadamard_transform(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    scale: float,
    half: Arg,
    wide0: Arg | None = None,
    result: Arg | None = None,
) -> Call:
    """Multiplies each row, as a matrix (m, n), by smaller transforms from both sides."""
    dtype = compute_dtype(out.dtype).numpy
    m, n = hadamard_factors(x.shape[-1])
    left, right = hadamard_matrix(m).astype(dtype), (hadamard_matrix(n) * scale).astype(dtype)
    shape = (prod(x.shape[:-1]), m, n)
    source, target = (wide0 or x).view, (result or out).view
    rows, between = source.reshape(shape), half.view.reshape(shape)
    calls: list[Call] = [] if wide0 is None else [partial(np.copyto, source, x.view)]
    if wide0 is None and not np.shares_memory(rows, source):  # strided rows do not lie as matrices
        rows = target.reshape(shape)
        calls.append(partial(np.copyto, target, source))
    calls.append(partial(np.matmul, left, rows, between))
    calls.append(partial(np.matmul, between, right, target.reshape(shape)))
    if result is not None:
        calls.append(partial(np.copyto, out.view, target, "unsafe"))
    return in_turn(calls)


# --- triangular systems ---------------------------------------------------------------------------------------------


def _solve_workspace(step: Step) -> Arrays:
    b = step.srcs[1]
    dtype = compute_dtype(step.out.dtype)
    return {**_converted(step), "row": (dtype, (*b.shape[:-2], 1, b.shape[-1]))}


@KERNELS("solve_triangular", inplace=True, workspace=_solve_workspace)
def solve_triangular(
    stream: Stream,
    op: str,
    out: Arg,
    a: Arg,
    b: Arg,
    *,
    upper: bool,
    unitriangular: bool,
    row: Arg,
    wide0: Arg | None = None,
    wide1: Arg | None = None,
    result: Arg | None = None,
) -> Call:
    matrix, x = (wide0 or a).view, (result or out).view
    calls: list[Call] = [] if wide0 is None else [partial(np.copyto, matrix, a.view)]
    if not np.may_share_memory(x, b.view):
        calls.append(partial(np.copyto, x, b.view))
    calls.append(partial(_substitute, matrix, x, row.view, upper, unitriangular))
    if result is not None:
        calls.append(partial(np.copyto, out.view, x, "unsafe"))
    return in_turn(calls)


def _substitute(a: Array, x: Array, row: Array, upper: bool, unitriangular: bool) -> None:
    n = a.shape[-1]
    for i in range(n - 1, -1, -1) if upper else range(n):
        known = slice(i + 1, n) if upper else slice(0, i)
        solved = x[..., i : i + 1, :]
        if known.start < known.stop:
            np.matmul(a[..., i : i + 1, known], x[..., known, :], row)
            np.subtract(solved, row, solved)
        if not unitriangular:
            np.divide(solved, a[..., i : i + 1, i : i + 1], solved)


# --- doubly stochastic matrices -------------------------------------------------------------------------------------


def _sinkhorn_workspace(step: Step) -> Arrays:
    dtype, shape = compute_dtype(step.out.dtype), step.out.shape
    sums = {"of_rows": (dtype, (*shape[:-1], 1)), "of_columns": (dtype, (*shape[:-2], 1, shape[-1]))}
    return {**sums, **({"result": (dtype, shape)} if step.out.dtype is not dtype else {})}


@KERNELS("sinkhorn", workspace=_sinkhorn_workspace)
def sinkhorn(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    iterations: int,
    eps: float,
    of_rows: Arg,
    of_columns: Arg,
    result: Arg | None = None,
) -> Call:
    m, rows, columns = (result or out).view, of_rows.view, of_columns.view
    small = constant(eps, compute_dtype(out.dtype))

    def run() -> None:
        np.copyto(m, x.view)
        np.maximum.reduce(m, -1, out=rows, keepdims=True)
        np.subtract(m, rows, m)
        np.exp(m, m)
        np.add.reduce(m, -1, out=rows, keepdims=True)
        np.divide(m, rows, m)
        np.add(m, small, m)
        _normalise(m, columns, -2)
        for _ in range(iterations - 1):
            _normalise(m, rows, -1)
            _normalise(m, columns, -2)

    def _normalise(m: Array, sums: Array, axis: int) -> None:
        np.add.reduce(m, axis, out=sums, keepdims=True)
        np.add(sums, small, sums)
        np.divide(m, sums, m)

    return run if result is None else in_turn([run, partial(np.copyto, out.view, m, "unsafe")])
