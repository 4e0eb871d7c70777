"""Products of matrices by OpenBLAS, called from compiled code.

The parts of a product are done by the threads that wait for parts of compiled kernels, without the interpreter: to wake
a thread through it takes as long as a product of some million multiplications.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from llvmlite import ir

from opweave.contract import Call
from opweave_cpu.hardware import openblas_function
from opweave_cpu.jit.compiler import ENTRY, MachineCode, target
from opweave_cpu.jit.team import Parts
from opweave_cpu.tiles import Array

__all__ = ["bind_gemm"]

_I64: Final = ir.IntType(64)
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112  # of cblas

_NUMBERS: Final = {"f4": (ir.FloatType(), "s"), "f8": (ir.DoubleType(), "d")}


def bind_gemm(parts: Sequence[tuple[Array, Array, Array]]) -> Call | None:
    """The call that computes ``out = a @ b`` for each ``(a, b, out)``, matrices of one type, in a thread each; ``None``
    where a matrix does not lie as BLAS reads it, or there is no OpenBLAS."""
    kind = parts[0][2].dtype.str[1:]
    function = _function(kind)
    if function is None:
        return None
    words: list[bytes] = []
    for a, b, out in parts:
        if out.strides[1] != out.itemsize:  # column after column: the product of the transposed matrices
            a, b, out = b.T, a.T, out.T
        (left, right), into = [_layout(x) for x in (a, b)], _layout(out)
        if left is None or right is None or into is None or into[0] != _PLAIN:
            return None
        numbers = (function, left[0], right[0], *out.shape, a.shape[1], *left[1:], *right[1:], *into[1:])
        words.append(np.array(numbers, np.int64).tobytes())
    work = 2 * sum(out.size * a.shape[1] for a, _, out in parts)
    return Parts(_gemm(kind).address, words, work).run


def _layout(x: Array) -> tuple[int, int, int] | None:
    """How a matrix lies: transposed or not, its address, and the elements from one row, or column, to the next."""
    item, (rows, columns), (down, across) = x.itemsize, x.shape, x.strides
    if across == item and down % item == 0 and down >= columns * item:
        return _PLAIN, x.ctypes.data, down // item
    if down == item and across % item == 0 and across >= rows * item:
        return _TRANSPOSED, x.ctypes.data, across // item
    return None


@cache
def _function(kind: str) -> int | None:
    """The address of the function of cblas for a type."""
    if kind not in _NUMBERS or platform.system() == "Darwin":  # where arguments of other sizes lie elsewhere
        return None
    found = openblas_function(f"cblas_{_NUMBERS[kind][1]}gemm")
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


@cache
def _gemm(kind: str) -> MachineCode:
    """The function that calls that of cblas.

    Its words: the address of that; whether the first and the second matrix are transposed; rows and columns of the
    result, and the length of a sum; of each matrix its address and the elements from one row, or column, to the next.
    """
    module, number = ir.Module(), _NUMBERS[kind][0]
    module.triple = target().triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64.as_pointer()]), ENTRY)
    code: Any = ir.IRBuilder(function.append_basic_block())
    call, *given = [code.load(code.gep(function.args[0], [_I64(k)])) for k in range(12)]
    before, matrices = [_I64(_ROW_MAJOR), *given[:5]], given[5:]
    # Whole numbers of 32 bits are in the lower halves of these.
    types = [_I64] * 6 + [number] + [_I64] * 4 + [number] + [_I64] * 2
    callee = code.inttoptr(call, ir.FunctionType(ir.VoidType(), types).as_pointer())
    code.call(callee, [*before, number(1.0), *matrices[:4], number(0.0), *matrices[4:]])
    code.ret_void()
    made = MachineCode(str(module))
    made.load(compiling=True)
    return made
