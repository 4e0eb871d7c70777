"""`Source`: a graph of ATen with what its placeholders stand for, read from an exported program.

An operator that opweave has a builder for stays whole; torch decomposes all others, as far as it can.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from warnings import catch_warnings, simplefilter
from weakref import WeakKeyDictionary

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from opweave.errors import UnsupportedOpError
from opweave_torch.frontend.native import is_function, is_operator, name_of
from opweave_torch.frontend.operators import OPERATORS, runs_by_torch

__all__ = ["Source", "check_operators", "module_path", "place_of", "read_program"]

SHAPES: Final = "sym_size.int", "sym_numel.default", "sym_stride.int", "sym_storage_offset.default"
CHECKS: Final = (
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size",
)  # fmt: skip


@dataclass(eq=False)
class Source:
    """A graph and its surroundings.

    Attributes:
        where: what it is called in messages.
        module: holds the graph, and the tensors that it has as attributes.
        leaves: placeholder -> the name and the values of a parameter, buffer or constant.
        states: placeholder -> the node that holds its next values, for buffers that the graph changes.
        fed: the placeholders of arguments, in order.
        outputs: what is returned, in order: nodes or plain values.
        written: the position of an argument -> the node that holds the values that are written to it.
    """

    where: str
    module: torch.fx.GraphModule
    leaves: dict[str, tuple[str, torch.Tensor]]
    fed: Sequence[torch.fx.Node]
    outputs: Sequence[Any]
    states: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[int, Any] = field(default_factory=dict)

    @property
    def graph(self) -> torch.fx.Graph:
        return self.module.graph

    def attribute(self, node: torch.fx.Node) -> Any:
        """What a ``get_attr`` node gives."""
        return operator.attrgetter(str(node.target))(self.module)


def read_program(program: ExportedProgram) -> Source:
    """The graph of an exported program, decomposed.

    Raises:
        UnsupportedOpError: operators that are not known, all of them with their places; objects that are no tensors.
    """
    program = decomposed(program)
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    source = Source("the exported program", program.graph_module, {}, [], [], {}, {})
    fed, states, written, outputs = [], {}, {}, []
    by_target = {}
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            fed.append(nodes[spec.arg.name])
            continue
        target = str(spec.target)
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise UnsupportedOpError(f"the exported program takes {target!r}, which is no tensor ({spec.kind.name})")
        value = program.state_dict.get(target, program.constants.get(target))
        source.leaves[spec.arg.name] = target, value
        by_target[target] = spec.arg.name
    positions = {node.name: i for i, node in enumerate(fed)}
    for spec in signature.output_specs:
        value = spec.arg.value if isinstance(spec.arg, ConstantArgument) else nodes[spec.arg.name]
        match spec.kind:
            case OutputKind.USER_OUTPUT | OutputKind.LOSS_OUTPUT:
                outputs.append(value)
            case OutputKind.BUFFER_MUTATION:
                states[by_target[str(spec.target)]] = value
            case OutputKind.USER_INPUT_MUTATION:
                written[positions[str(spec.target)]] = value
            case _:
                raise UnsupportedOpError(
                    f"the exported program changes {spec.target!r} ({spec.kind.name}); export a module in eval mode, "
                    "or one that changes buffers only"
                )
    source.fed, source.outputs, source.states, source.written = fed, outputs, states, written
    check_operators(source)
    return source


_DECOMPOSED: Final[WeakKeyDictionary[ExportedProgram, ExportedProgram]] = WeakKeyDictionary()


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """The program with operators decomposed that nothing is known of; the same for the same program, as that takes
    long."""
    found = _DECOMPOSED.get(program)
    if found is None:
        table = default_decompositions()
        for known in OPERATORS:
            table.pop(known, None)
        with catch_warnings():
            simplefilter("ignore")  # about deprecations within torch, and what export warned of before
            found = _DECOMPOSED[program] = program.run_decompositions(table)
    return found


def check_operators(source: Source) -> None:
    """Raise `UnsupportedOpError` that lists all operators that nothing is known of, with their places."""
    missing: dict[str, list[str]] = {}
    for node in source.graph.nodes:
        if node.op == "call_module" or (node.op == "call_function" and not _is_known(node)):
            missing.setdefault(str(node.target), []).append(place_of(node))
    if missing:
        listed = [f"{name} ({'; '.join(places[:3])}{f'; and {len(places) - 3} more' if len(places) > 3 else ''})"
                  for name, places in missing.items()]  # fmt: skip
        raise UnsupportedOpError(
            f"{source.where} uses operators that cannot be expressed: {', '.join(listed)}; shapes of results must "
            "follow from shapes of arguments, and control flow must not depend on values"
        )


def _is_known(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if not is_operator(target):
        return is_function(target)  # Python's, for lengths
    name = name_of(target)
    if name in CHECKS or str(target).removeprefix("aten.") in SHAPES:
        return True
    return (target in OPERATORS or runs_by_torch(target)) and not _has_unknown_lengths(node.meta.get("val"))


def _has_unknown_lengths(value: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(value))


def module_path(node: torch.fx.Node) -> str:
    """The path of the submodule that a node belongs to, with ``/``; empty for the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    last = list(stack.values())[-1] if stack else ("", None)
    path = str(last[0]).removeprefix("L['self'].").removeprefix("L['self']").replace("@", ".")
    return "/".join([part for part in path.replace("[", ".").replace("]", "").replace("'", "").split(".") if part])


def place_of(node: torch.fx.Node) -> str:
    """Where the module has a node: submodule, file and line."""
    path = module_path(node)
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if "File " in line]
    at = lines[-1].removeprefix("File ") if lines else f"node {node.name}"
    return f"{path or 'the module'}, {at}"
