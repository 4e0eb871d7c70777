"""Functions: those that a model defines, and the bodies that the ONNX standard defines for operators. Their nodes are
built in place of the node that calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import FunctionProto, NodeProto
from onnx.defs import OpSchema, SchemaError, get_schema

from opweave.errors import FormatError
from opweave.graph.dtypes import HALVES, as_dtype
from opweave.graph.tensor import Tensor
from opweave.ops.operands import composite
from opweave_onnx.graphs import Graph, Node, Value, domain_of, parse_nodes
from opweave_onnx.operators import Operator
from opweave_onnx.tensors import Arrays, elem_of

if TYPE_CHECKING:
    from opweave_onnx.trace import Call

__all__ = ["Function", "has_function", "standard_function"]


class Function:
    """A function of a model.

    Attributes:
        proto: the message.
        versions: domain -> version, of the operator sets that it uses.
    """

    def __init__(self, proto: FunctionProto, versions: Mapping[str, int]) -> None:
        self.proto, self.versions = proto, versions

    def operator(self, node: Node, arrays: Arrays) -> Operator:
        """The builder of a node that calls the function."""
        body = self.body(node.proto, arrays)
        return Operator(lambda call, *inputs: tuple(call.trace.inline(body, inputs, None)), raw=True)

    def body(self, call: NodeProto, arrays: Arrays) -> Graph:
        """The body, with references to attributes of the function replaced by those of the call.

        Raises:
            FormatError: nodes that are not valid.
        """
        given = {a.name: a for a in self.proto.attribute_proto}
        given.update({a.name: a for a in call.attribute})
        nodes = [_filled(node, given) for node in self.proto.node]
        parsed = parse_nodes(nodes, self.versions, arrays, set(self.proto.input))
        inputs, outputs = (tuple([Value(n, 0, None) for n in ns]) for ns in (self.proto.input, self.proto.output))
        return Graph(self.proto.name, parsed, inputs, outputs, {})


def _filled(node: NodeProto, given: Mapping[str, onnx.AttributeProto]) -> NodeProto:
    if not any(a.ref_attr_name or a.HasField("g") for a in node.attribute):
        return node
    filled = NodeProto()
    filled.CopyFrom(node)
    del filled.attribute[:]
    for attribute in node.attribute:
        value = attribute
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in given:
                continue  # the operator's default
            value = onnx.AttributeProto()
            value.CopyFrom(given[attribute.ref_attr_name])
            value.name = attribute.name
        elif attribute.HasField("g"):
            value = onnx.AttributeProto()
            value.CopyFrom(attribute)
            inner = [_filled(n, given) for n in attribute.g.node]
            del value.g.node[:]
            value.g.node.extend(inner)
        filled.attribute.append(value)
    return filled


def _schema(node: Node) -> OpSchema | None:
    try:
        return get_schema(node.op, node.version, node.domain)
    except SchemaError:
        return None


def has_function(node: Node) -> bool:
    """Whether the standard defines a body for the operator."""
    schema = _schema(node)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def standard_function(call: Call, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Build a node by the body that the standard defines for its operator. Half types are computed in f32: the operator
    is one operation, of however many its body consists.

    Raises:
        UnsupportedOpError: the standard has no such operator, or defines no body for it.
        FormatError: inputs or attributes that the operator requires are missing.
    """
    # Known values of half types become tensors, as `composite` converts tensors.
    halves = [as_dtype(name).numpy for name in HALVES.split()]
    given = [call.tensor(v) if isinstance(v, np.ndarray) and v.dtype in halves else v for v in inputs]
    return composite(_by_body)(call, given)


def _by_body(call: Call, inputs: Sequence[Any]) -> tuple[Any, ...]:
    node = call.node
    schema = _schema(node)
    if schema is None:
        raise call.refuse(f"there is no operator {node.op!r} in version {node.version} of domain {node.domain!r}")
    proto = FunctionProto()
    if schema.has_function:
        proto.ParseFromString(_body(node.op, node.version, node.domain))
    elif schema.has_context_dependent_function:
        _check_signature(schema, node, inputs)
        types = [_type(call, value) for value in (*inputs, *[None] * (len(node.inputs) - len(inputs)))]
        best = max([v for v in schema.context_dependent_function_opset_versions if v <= node.version],
                   default=schema.since_version)  # fmt: skip
        text = schema.get_context_dependent_function_with_opset_version(best, node.proto.SerializeToString(), types)
        proto.ParseFromString(text)
    else:
        raise call.refuse(f"the operator {node.op} is not supported")
    if not proto.node:
        raise FormatError(f"the standard gives no body for {node.op} with these inputs")
    for attribute in schema.attributes.values():
        default = attribute.default_value
        if default.name and not any(a.name == attribute.name for a in proto.attribute_proto):
            proto.attribute_proto.append(default)
    versions = {"": onnx.defs.onnx_opset_version()}  # of bodies in other domains that do not say it
    versions |= {domain_of(entry.domain): entry.version for entry in proto.opset_import}
    body = Function(proto, versions).body(node.proto, call.trace.session.tensors)
    return tuple(call.trace.inline(body, inputs, None))


def _check_signature(schema: OpSchema, node: Node, inputs: Sequence[Any]) -> None:
    """Raise `FormatError` where inputs or attributes are missing: `onnx` reads them without a check when it makes the
    body."""
    there = list(inputs) + [None] * (schema.min_input - len(inputs))
    needed = [p.option == OpSchema.FormalParameterOption.Single for p in schema.inputs]
    for number, (value, is_needed) in enumerate(zip(there, needed, strict=False)):
        if isinstance(value, list) or (value is None and is_needed):
            raise FormatError(f"input {number} ({schema.inputs[number].name}) has to be a tensor")
    for attribute in schema.attributes.values():
        if attribute.required and attribute.name not in node.attributes:
            raise FormatError(f"attribute {attribute.name!r} is missing")


@lru_cache(256)
def _body(op: str, version: int, domain: str) -> bytes:
    schema = get_schema(op, version, domain)
    best = max([v for v in schema.function_opset_versions if v <= version], default=schema.since_version)
    text: bytes = schema.get_function_with_opset_version(best)
    return text


def _type(call: Call, value: Any) -> bytes:
    """The type of an input as a message; the bodies of some operators depend on it."""
    proto = onnx.TypeProto()
    if isinstance(value, Tensor):
        proto.tensor_type.elem_type = elem_of(value.dtype.numpy)
    elif isinstance(value, np.ndarray):
        proto.tensor_type.elem_type = elem_of(value.dtype)
    if isinstance(value, (Tensor, np.ndarray)):
        for n in value.shape:
            proto.tensor_type.shape.dim.add().dim_value = n
    return bytes(proto.SerializeToString())
