"""Linear algebra beyond products."""

from __future__ import annotations

from functools import partial
from math import prod

import torch

from opweave.contract import Arg, Call, Step, Stream
from opweave.contract.workspace import Arrays
from opweave.ops.linalg import hadamard_factors, hadamard_matrix
from opweave_torch.kernels.binding import conversion_arrays, converted, in_order, widened
from opweave_torch.kernels.table import KERNELS
from opweave_torch.memory import tensor


def _arrays(step: Step) -> Arrays:
    """Operands of another type than the one to compute in, and the result in that type."""
    dtype = widened(step.out.dtype)
    result = {} if step.out.dtype is dtype else {"result": (dtype, step.out.shape)}
    return {**conversion_arrays(dtype, step.srcs), **result}


def _hadamard_arrays(step: Step) -> Arrays:
    return {**_arrays(step), "rows": (widened(step.out.dtype), step.out.shape),
            "half": (widened(step.out.dtype), step.out.shape)}  # fmt: skip


@KERNELS("hadamard_transform", workspace=_hadamard_arrays)
def hadamard_transform(stream: Stream, op: str, out: Arg, x: Arg, *, scale: float, **arrays: Arg) -> Call:
    """Rows as matrices (m, n), multiplied by the small transforms from both sides."""
    m, n = hadamard_factors(x.shape[-1])
    shape = (prod(x.shape[:-1]), m, n)
    rows, half = tensor(arrays["rows"]), tensor(arrays["half"]).view(shape)
    left, right = (torch.from_numpy(hadamard_matrix(k)).to(rows) for k in (m, n))
    target = tensor(arrays.get("result", out))
    calls: list[Call] = [
        partial(rows.copy_, tensor(x)),
        partial(torch.matmul, left, rows.view(shape), out=half),
        partial(torch.matmul, half, right * scale, out=rows.view(shape)),
        partial(target.copy_, rows),
    ]
    if "result" in arrays:
        calls.append(partial(tensor(out).copy_, target))
    return in_order(calls)


@KERNELS("solve_triangular", workspace=_arrays)
def solve_triangular(
    stream: Stream, op: str, out: Arg, *srcs: Arg, upper: bool, unitriangular: bool, **arrays: Arg
) -> Call:
    (a, b), calls = converted(widened(out.dtype), srcs, arrays)
    target = tensor(arrays.get("result", out))
    calls.append(partial(torch.linalg.solve_triangular, a, b, upper=upper, unitriangular=unitriangular, out=target))
    if "result" in arrays:
        calls.append(partial(tensor(out).copy_, target))
    return in_order(calls)


def _sinkhorn_arrays(step: Step) -> Arrays:
    dtype, shape = widened(step.out.dtype), step.out.shape
    sums: Arrays = {"of_rows": (dtype, (*shape[:-1], 1)), "of_columns": (dtype, (*shape[:-2], 1, shape[-1]))}
    return {"matrices": (dtype, shape), **sums}


@KERNELS("sinkhorn", workspace=_sinkhorn_arrays)
def sinkhorn(
    stream: Stream,
    op: str,
    out: Arg,
    x: Arg,
    *,
    iterations: int,
    eps: float,
    matrices: Arg,
    of_rows: Arg,
    of_columns: Arg,
) -> Call:
    m, rows, columns = tensor(matrices), tensor(of_rows), tensor(of_columns)

    def divided(sums: torch.Tensor, axis: int) -> list[Call]:
        return [
            partial(torch.sum, m, axis, keepdim=True, out=sums),
            partial(sums.add_, eps),
            partial(torch.div, m, sums, out=m),
        ]

    calls: list[Call] = [partial(m.copy_, tensor(x)), partial(torch.softmax, m, -1, out=m), partial(m.add_, eps)]
    calls += divided(columns, -2)
    for _ in range(iterations - 1):
        calls += [*divided(rows, -1), *divided(columns, -2)]
    calls.append(partial(tensor(out).copy_, m))
    return in_order(calls)
