"""Runs of pointwise operations as one kernel each, by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documentation calls it
from torch import Tensor

from opweave.contract import Arg, Call, Group, Step, pointwise_groups
from opweave.graph.dtypes import as_dtype
from opweave.graph.opdef import OPS
from opweave.ops.activation import QUICK
from opweave_torch.groups import TorchCpuStream
from opweave_torch.kernels.elementwise import FUNCTIONS as OWN
from opweave_torch.kernels.table import FLOATS
from opweave_torch.memory import tensor, torch_dtype
from opweave_torch.native import gelu_tanh_gradient, silu_gradient
from opweave_torch.stream import TorchStream

__all__ = ["FusingCpuStream", "FusingStream"]


def _sign(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), x, torch.sign(x))  # torch's own gives 0 for NaN


FUNCTIONS: Final[dict[str, Callable[..., Tensor]]] = {
    **{op: f for op, f in OWN.items() if OPS[op].family in ("elementwise", "rounding", "selection")},
    "sign": _sign,
    "square": torch.square,
    "scale": lambda x, *, scale, bias: x * scale + bias,
    "cast": lambda x, *, dtype: x,
    "copy": lambda x: x,
    "contiguous": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": lambda x, *, negative_slope: F.leaky_relu(x, negative_slope),
    "elu": lambda x, *, alpha: F.elu(x, alpha),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(QUICK * x),
    "relu_backward": lambda grad, y: torch.where(y <= 0, 0, grad),
    "silu_backward": silu_gradient,
    "gelu_tanh_backward": gelu_tanh_gradient,
}
"""Pointwise operations as functions of tensors."""

_TYPES: Final = frozenset(FLOATS.split())


def _takes(step: Step) -> bool:
    args = (step.out, *step.srcs)
    return step.op in FUNCTIONS and all(arg.dtype.name in _TYPES for arg in args)


class FusingStream(TorchStream):
    """A stream whose runs of pointwise steps become one kernel each. They are compiled when they first run, which takes
    seconds, once for each form in a process."""

    def _fuse(self, steps: Sequence[Step]) -> Sequence[Group]:
        groups = []
        for run in pointwise_groups(steps, _takes):
            if len(run) > 1:
                groups.append(Group(tuple(run)))
            else:
                groups += super()._fuse(run)
        return groups

    def _bind(self, group: Group) -> Call:
        return super()._bind(group) if len(group.steps) == 1 else _bind_fused(group)


class FusingCpuStream(TorchCpuStream, FusingStream):
    """A `FusingStream` in the memory of the process, which first groups products with the steps that go along."""


# --- one group ------------------------------------------------------------------------------------------------------

_TORCH: Final = {name: torch_dtype(as_dtype(name)) for name in _TYPES}

Operation = tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...], str]
"""An operation: its name, the numbers of its sources, its attributes, the type to which its result is rounded."""
FusedProgram = tuple[int, tuple[Operation, ...], tuple[tuple[int, int], ...]]
"""How many tensors come in, the operations (whose results are numbered on from there), and which tensor gets which
value. Everything that the compiled kernel depends on, beside the tensors' layouts."""


def _bind_fused(group: Group) -> Call:
    tensors: list[Tensor] = []
    # Operands that show the same memory in the same way are one tensor: torch's compiler takes different ones for
    # independent, and would reorder reads and writes.
    numbers: dict[Any, int] = {}

    def number(arg: Arg) -> int:
        view = (id(arg.buffer), arg.offset, arg.dtype, arg.shape, arg.strides)
        if view not in numbers:
            numbers[view] = len(tensors)
            tensors.append(tensor(arg))
        return numbers[view]

    # Sources first: the numbers of results begin after all tensors.
    outside = [arg for step in group.steps for arg in step.srcs if arg.buffer is not None]
    targets = [step.out for step in group.steps if step.out.buffer is not None]
    for arg in (*outside, *targets):
        number(arg)
    values: dict[int, int] = {}  # value -> its number, once it is made here
    operations: list[Operation] = []
    stores: list[tuple[int, int]] = []
    for step in group.steps:
        sources = tuple(values[arg.value] if arg.value in values else number(arg) for arg in step.srcs)
        result = len(tensors) + len(operations)
        operations.append((step.op, sources, tuple(sorted(step.attrs.items())), step.out.dtype.name))
        if step.out.buffer is not None:
            stores.append((number(step.out), result))
        if step.out.value >= 0:
            values[step.out.value] = result
    return partial(_compiled((len(tensors), tuple(operations), tuple(stores))), *tensors)


_COMPILED: Final[dict[FusedProgram, Callable[..., None]]] = {}


def _compiled(program: FusedProgram) -> Callable[..., None]:
    found = _COMPILED.get(program)
    if found is None:
        found = _COMPILED[program] = torch.compile(_function(program), fullgraph=True, dynamic=False)
    return found


def _function(program: FusedProgram) -> Callable[..., None]:
    """The program as a function with a code of its own: torch keeps what it compiles by code object,
    and only a few kernels for each."""
    _, operations, stores = program

    def fused(*tensors: Tensor) -> None:
        values = list(tensors)
        for op, sources, attrs, dtype in operations:
            # Half types compute in f32, and each result is rounded.
            wide = [values[i].float() if values[i].itemsize == 2 else values[i] for i in sources]
            values.append(FUNCTIONS[op](*wide, **dict(attrs)).to(_TORCH[dtype]))
        for target, value in stores:
            values[target].copy_(values[value])

    code: CodeType = fused.__code__.replace(co_name=f"fused_{len(_COMPILED)}")
    return FunctionType(code, fused.__globals__, code.co_name, None, fused.__closure__)
