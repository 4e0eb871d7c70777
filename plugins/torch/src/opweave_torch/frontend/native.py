"""Functions that read graphs of torch and have no public name there. All of them are here, so that another version of
torch changes one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch._decomp import core_aten_decompositions
from torch._guards import TracingContext
from torch._ops import OperatorBase, OpOverload

__all__ = [
    "by_autograd", "called_with_a_list", "core_decompositions", "is_function", "is_operator", "name_of", "overload",
    "parameter_places", "schema_of", "version_of", "without_values",
]  # fmt: skip

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The types of the arguments and results of an overload, and whether it changes arguments."""

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""A number that grows with each operation that writes a tensor."""


def name_of(target: Any) -> str:
    """The name of an overload without ``aten::``: ``"add"``."""
    name: str = schema_of(target).name
    return name.removeprefix("aten::")


def is_operator(target: Any) -> TypeGuard[Any]:
    """Whether the target of a node is an overload of an operator."""
    return isinstance(target, OpOverload)


def is_function(target: Any) -> bool:
    """Whether the target of a node is a function of Python, and no operator of any kind."""
    return not isinstance(target, OperatorBase)


def overload(name: str) -> Any:
    """The overload of ATen by its name, ``"add.Tensor"``; ``"relu"`` is ``"relu.default"``. ``None``: this version of
    torch does not have it."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), which or "default", None)


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """Overload -> what decomposes it into those of Core ATen."""
    return dict(core_aten_decompositions())


def without_values() -> AbstractContextManager[Any]:
    """Within it tensors have shapes and types, and operators compute nothing else."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: AbstractContextManager[Any] = FakeTensorMode()
    return mode


def by_autograd(**compilers: Any) -> Callable[..., Any]:
    """A backend of ``torch.compile`` that splits what it gets into forward and backward graphs for these compilers."""
    from torch._dynamo.backends.common import aot_autograd

    made: Callable[..., Any] = aot_autograd(**compilers)
    return made


def called_with_a_list(function: Callable[..., Any]) -> Callable[..., Any]:
    """The form in which compilers of `by_autograd` return functions: called with one list of all arguments."""
    from torch._functorch.aot_autograd import make_boxed_func

    made: Callable[..., Any] = make_boxed_func(function)
    return made


def parameter_places() -> Sequence[int]:
    """The places of the arguments that are parameters and buffers of the module that is compiled now."""
    context = TracingContext.try_get()
    found = context.fw_metadata.static_input_indices if context is not None and context.fw_metadata is not None else ()
    return tuple(found or ())
