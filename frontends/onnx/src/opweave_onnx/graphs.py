"""`Graph` and `Node`: a checked ONNX graph as plain data, and the functions that make it from the protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnx
from onnx import AttributeProto, GraphProto, NodeProto

from opweave.errors import FormatError
from opweave_onnx.tensors import Array, Arrays

__all__ = ["Graph", "Node", "Value", "check_texts", "domain_of", "label_of", "parse_graph", "parse_nodes"]


class Value(NamedTuple):
    """An input or output as the file declares it.

    Attributes:
        name: in the file.
        elem: the number of its element type (``TensorProto.DataType``); 0: no tensor, or not declared.
        shape: for each axis its length, the name of a dynamic axis, or ``None``; ``None``: not declared.
    """

    name: str
    elem: int
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True, eq=False)
class Node:
    """One node.

    Attributes:
        op, domain: the operator; the standard domain is ``""``.
        version: of the operator set that the model imports for the domain.
        name: the node's own, or one made of the operator and its place.
        inputs, outputs: names of values, ``""`` for what is left out.
        attributes: numbers, texts, arrays, lists of these, and graphs.
        proto: the message.
        captured: names that the graphs in its attributes read from graphs around them.
    """

    op: str
    domain: str
    version: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    proto: NodeProto
    captured: frozenset[str] = frozenset()

    def describe(self) -> str:
        """For messages."""
        return f"node {self.name!r} ({self.domain + '.' if self.domain else ''}{self.op})"


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in an order in which each comes after those whose results it reads.

    Attributes:
        name: of the graph in the file.
        nodes: in that order.
        inputs, outputs: as declared. Of the main graph initializers are no inputs; the inputs of a body are given by
            their place, and may be initializers too.
        initializers: name -> array.
        defaults: the inputs of the main graph that are initializers too.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    initializers: Mapping[str, Array]
    defaults: tuple[Value, ...] = ()
    _needed: dict[int, frozenset[str]] = field(default_factory=dict)

    def needed_after(self, position: int) -> frozenset[str]:
        """Names of the outputs, and those that nodes behind the one at ``position`` read."""
        if position not in self._needed:
            names = {value.name for value in self.outputs}
            for node in self.nodes[position + 1 :]:
                names.update(node.inputs)
                names.update(node.captured)
            self._needed[position] = frozenset(names)
        return self._needed[position]

    @property
    def captured(self) -> frozenset[str]:
        """Names that it reads from the graphs around it."""
        own = {value.name for value in self.inputs} | set(self.initializers)
        read: set[str] = {value.name for value in self.outputs}
        for node in self.nodes:
            own.update(node.outputs)
            read.update(node.inputs)
            read.update(node.captured)
        return frozenset(read - own - {""})


def check_texts(where: str, *values: Any) -> None:
    """Raise `FormatError` for names that are no texts in UTF-8, which protobuf gives as bytes."""
    for value in values:
        if not isinstance(value, str):
            raise FormatError(f"{where}: the name {value!r:.40} is no text in UTF-8")


def domain_of(name: str) -> str:
    """The domain under one name: the standard domain, which has two, as ``""``."""
    return "" if name == "ai.onnx" else name


def label_of(where: str, proto: NodeProto, place: int) -> str:
    """A node for messages, the one at ``place`` in its graph."""
    return f"{where}: node {_name_of(proto, place)!r} ({proto.op_type})"


def _name_of(proto: NodeProto, place: int) -> str:
    return proto.name or f"{proto.op_type}_{place}"


def parse_graph(
    proto: GraphProto, versions: Mapping[str, int], arrays: Arrays, *, known: frozenset[str] | None = None
) -> Graph:
    """A graph, checked: every name is defined once, and before it is read.

    Args:
        versions: domain -> version of the operator set.
        arrays: reads tensors, and checks their sizes.
        known: names that the graphs around it define; ``None`` for the main graph.

    Raises:
        FormatError: a graph that is not valid; the message names the node.
        DTypeError: tensors of texts or complex numbers.
    """
    check_texts(
        arrays.where, proto.name, *[t.name for t in proto.initializer],
        *[s.values.name for s in proto.sparse_initializer], *[v.name for v in (*proto.input, *proto.output)],
    )  # fmt: skip
    initializers = {t.name: arrays.read(t, f"initializer {t.name!r}") for t in proto.initializer}
    for sparse in proto.sparse_initializer:
        initializers[sparse.values.name] = arrays.read_sparse(sparse)
    declared = [_value(v, arrays.where) for v in proto.input]
    defaults = tuple([v for v in declared if known is None and v.name in initializers])
    inputs = tuple([v for v in declared if v not in defaults])
    defined = {*(known or ()), *initializers, *[value.name for value in inputs]}
    if len({value.name for value in declared}) < len(declared):
        raise FormatError(f"{arrays.where}: two inputs of graph {proto.name!r} have one name")
    nodes = parse_nodes(proto.node, versions, arrays, defined)
    outputs = tuple([_value(v, arrays.where) for v in proto.output])
    for value in outputs:
        if value.name not in defined:
            raise FormatError(f"{arrays.where}: nothing computes the output {value.name!r} of graph {proto.name!r}")
    return Graph(proto.name, nodes, inputs, outputs, initializers, defaults)


def parse_nodes(protos: Any, versions: Mapping[str, int], arrays: Arrays, defined: set[str]) -> tuple[Node, ...]:
    """Nodes, checked; adds the names of their results to ``defined``. Raises `FormatError`."""
    nodes = []
    for proto in protos:
        names = [attribute.name for attribute in proto.attribute]
        check_texts(arrays.where, proto.op_type, proto.domain, proto.name, *proto.input, *proto.output, *names)
    computed = {name for proto in protos for name in proto.output}
    for place, proto in enumerate(protos):
        domain = domain_of(proto.domain)
        label = label_of(arrays.where, proto, place)
        for name in proto.input:
            if name and name not in defined:
                why = (
                    "is computed by it or behind it: the graph has a cycle, or its nodes are not sorted"
                    if name in computed else "is nowhere defined"
                )  # fmt: skip
                raise FormatError(f"{label} reads {name!r}, which {why}")
        attributes = {a.name: _attribute(a, versions, arrays, defined, label) for a in proto.attribute}
        captured: set[str] = set()
        for value in attributes.values():
            for graph in value if isinstance(value, tuple) else (value,):
                if isinstance(graph, Graph):
                    captured |= graph.captured
        for name in proto.output:
            if name and name in defined:
                raise FormatError(f"{label} computes {name!r}, which is defined before")
        defined.update(name for name in proto.output if name)
        version = versions.get(domain)
        if version is None:
            raise FormatError(f"{label} is of domain {proto.domain or 'ai.onnx'!r}, of which the model imports nothing")
        nodes.append(
            Node(
                proto.op_type,
                domain,
                version,
                _name_of(proto, place),
                tuple(proto.input),
                tuple(proto.output),
                attributes,
                proto,
                frozenset(captured),
            )
        )
    return tuple(nodes)


def _attribute(
    proto: AttributeProto, versions: Mapping[str, int], arrays: Arrays, defined: set[str], label: str
) -> Any:
    kinds = AttributeProto
    match proto.type:
        case kinds.FLOAT:
            return proto.f
        case kinds.INT:
            return proto.i
        case kinds.STRING:
            return _text(proto.s, label)
        case kinds.FLOATS:
            return tuple(proto.floats)
        case kinds.INTS:
            return tuple(proto.ints)
        case kinds.STRINGS:
            return tuple([_text(s, label) for s in proto.strings])
        case kinds.TENSOR:
            return arrays.read(proto.t, f"{label}: attribute {proto.name!r}")
        case kinds.SPARSE_TENSOR:
            return arrays.read_sparse(proto.sparse_tensor)
        case kinds.GRAPH:
            return parse_graph(proto.g, versions, arrays, known=frozenset(defined))
        case kinds.GRAPHS:
            return tuple([parse_graph(g, versions, arrays, known=frozenset(defined)) for g in proto.graphs])
        case kinds.TYPE_PROTO:
            return proto.tp
        case kind:
            raise FormatError(f"{label}: attribute {proto.name!r} is of type {kind}, which is none")


def _text(raw: bytes, label: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{label}: an attribute is no text in UTF-8: {raw[:40]!r}") from None


def _value(proto: onnx.ValueInfoProto, where: str) -> Value:
    if not proto.name:
        raise FormatError(f"{where}: an input or output has no name")
    if not proto.type.HasField("tensor_type"):
        return Value(proto.name, 0, None)
    tensor = proto.type.tensor_type
    if not tensor.HasField("shape"):
        return Value(proto.name, tensor.elem_type, None)
    shape: list[int | str | None] = []
    for axis in tensor.shape.dim:
        if axis.HasField("dim_value") and axis.dim_value >= 0:
            shape.append(axis.dim_value)
        else:
            check_texts(where, axis.dim_param)
            shape.append(None if axis.dim_param in ("", "?") else axis.dim_param)
    return Value(proto.name, tensor.elem_type, tuple(shape))
