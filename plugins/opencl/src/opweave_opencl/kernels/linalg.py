"""Linear algebra beyond products: one work-item for each element, column or matrix."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Final

from opweave.contract import Arg, Call, Step
from opweave.contract.workspace import Arrays
from opweave.graph.dtypes import DType, f32, f64
from opweave_opencl.kernels.pointwise import spread
from opweave_opencl.kernels.table import KERNELS
from opweave_opencl.kernels.words import as_word
from opweave_opencl.layouts import coalesce, element_offset, element_strides, padded, padded_strides

if TYPE_CHECKING:
    from opweave_opencl.stream import OpenCLStream

__all__: list[str] = []

TYPES: Final = "f64 f32 f16 bf16"

MOST_ROWS: Final = 16
"""Rows of the matrices that fit the registers of a work-item. Larger ones are refused."""


def _words(operands: Sequence[Arg], axes: int) -> list[int]:
    """Layouts of the output, the source and perhaps a matrix, with the last ``axes`` apart from those in front."""
    out = operands[0]
    strides = [element_strides(arg) for arg in operands]
    shape, leads = coalesce(out.shape[:-axes], [own[:-axes] for own in strides])
    none = [()] * (3 - len(operands))
    steps = [step for own in strides for step in (own[-2:] if axes == 2 else (0, own[-1]))]
    return [
        len(shape), *padded(shape, 1), out.shape[-2] if axes == 2 else out.shape[-1], out.shape[-1],
        *padded_strides([*leads, *none]), *padded(steps, 0, 6), *padded([*map(element_offset, operands)], 0, 3),
    ]  # fmt: skip


def _computed(dtype: DType) -> DType:
    return f64 if dtype is f64 else f32


def _macros(kernel: str, out: Arg, **macros: str) -> dict[str, str]:
    return {kernel: "1", "T": out.dtype.name, **({"WIDE": "1"} if out.dtype is f64 else {}), **macros}


@KERNELS("hadamard_transform", dtypes=TYPES)
def hadamard_transform(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, scale: float) -> Call:
    program = stream.target.programs.get("linalg", _macros("HADAMARD", out))
    words = [*_words([out, x], 1), 0, 0, 0, as_word(scale, _computed(out.dtype))]
    size, group = spread((out.shape[-1], prod(out.shape[:-1]), 1), stream.target.tuning.group)
    return stream.launch(program, "hadamard", size, group, [out, x], words)


def _solution(step: Step) -> Arrays:
    return {"known": (_computed(step.out.dtype), step.out.shape)}


@KERNELS("solve_triangular", dtypes=TYPES, workspace=_solution)
def solve_triangular(
    stream: OpenCLStream, op: str, out: Arg, a: Arg, b: Arg, *, upper: bool, unitriangular: bool, known: Arg
) -> Call:
    program = stream.target.programs.get("linalg", _macros("SOLVE", out, A=a.dtype.name))
    words = [*_words([out, b, a], 2), int(upper), int(unitriangular), element_offset(known), 0]
    size, group = spread((out.shape[-1], prod(out.shape[:-2]), 1), stream.target.tuning.group)
    return stream.launch(program, "solve", size, group, [out, a, b, known], words)


def _why_not(step: Step) -> str | None:
    n = step.out.shape[-1]
    return f"matrices of {n} rows, not at most {MOST_ROWS}" if n > MOST_ROWS else None


@KERNELS("sinkhorn", dtypes=TYPES, when=_why_not)
def sinkhorn(stream: OpenCLStream, op: str, out: Arg, x: Arg, *, iterations: int, eps: float) -> Call:
    program = stream.target.programs.get("linalg", _macros("SINKHORN", out, SIZE=str(out.shape[-1])))
    words = [*_words([out, x], 2), 0, 0, iterations, as_word(eps, _computed(out.dtype))]
    return stream.launch(program, "sinkhorn", (prod(out.shape[:-2]),), (1,), [out, x], words)
