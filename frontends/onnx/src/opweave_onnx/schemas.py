"""`check_operators`: whether nodes have the attributes, inputs and outputs that their operators have in the version of
the operator set that the model imports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto
from onnx.defs import OpSchema, SchemaError, get_all_schemas_with_history, get_schema

from opweave.errors import FormatError, UnsupportedOpError
from opweave_onnx.graphs import domain_of, label_of

__all__ = ["Signature", "check_operators", "signature_of"]

ENDLESS: Final = 2147483647
"""How `onnx` says that the number of inputs or outputs has no limit."""


class Signature(NamedTuple):
    """What nodes of an operator consist of, in a range of versions.

    Attributes:
        since: the first version with this signature.
        attributes: name -> number of the type (``AttributeProto.AttributeType``).
        required: names of the attributes without which a node is not valid.
        inputs, outputs: the least and the largest number.
        needed: the indices of inputs that cannot be left out.
        retired: whether the operator is not used from this version on.
        fixed: attributes that opweave runs at one value only -> this value.
    """

    since: int
    attributes: Mapping[str, int]
    required: frozenset[str]
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    needed: frozenset[int] = frozenset()
    retired: bool = False
    fixed: Mapping[str, Any] = {}


# --- com.microsoft --------------------------------------------------------------------------------------------------

_MICROSOFT: Final = """
Attention 2-7 1-2 do_rotary:INT=0 mask_filter_value:FLOAT num_heads:INT! past_present_share_buffer:INT=0
  qkv_hidden_sizes:INTS rotary_embedding_dim:INT scale:FLOAT unidirectional:INT
BiasGelu 2-2 1-1
DequantizeLinear 2-3 1-1 axis:INT
DynamicQuantizeLSTM 12-12 0-3 activation_alpha:FLOATS activation_beta:FLOATS activations:STRINGS clip:FLOAT
  direction:STRING hidden_size:INT input_forget:INT
DynamicQuantizeMatMul 3-5 1-1
EmbedLayerNormalization 7-9 1-3 epsilon:FLOAT mask_index_type:INT
FastGelu 1-2 1-1
FusedConv 2-4 1-1 activation:STRING activation_params:FLOATS auto_pad:STRING dilations:INTS group:INT kernel_shape:INTS
  pads:INTS strides:INTS
FusedGemm 2-3 1-1 activation:STRING activation_alpha:FLOAT activation_beta:FLOAT activation_gamma:FLOAT alpha:FLOAT
  beta:FLOAT transA:INT transB:INT
FusedMatMul 2-2 1-1 alpha:FLOAT transA:INT transB:INT transBatchA:INT transBatchB:INT
GatherBlockQuantized 3-4 1-1 bits:INT block_size:INT gather_axis:INT quantize_axis:INT
Gelu 1-1 1-1
GroupQueryAttention 7-16 1-4 causal:INT=1 do_rotary:INT k_quant_type:STRING=NONE kv_cache_bit_width:INT
  kv_num_heads:INT! local_window_size:INT num_heads:INT! qk_norm_epsilon:FLOAT qk_output:INT=0 rotary_interleaved:INT
  scale:FLOAT sliding_window_cache:INT=0 smooth_softmax:INT=0 softcap:FLOAT v_quant_type:STRING=NONE
MatMulIntegerToFloat 4-7 1-1
MatMulNBits 3-6 1-1 K:INT! N:INT! accuracy_level:INT bits:INT block_size:INT! weight_prepacked:INT=0
MultiHeadAttention 1-10 1-4 mask_filter_value:FLOAT num_heads:INT! scale:FLOAT unidirectional:INT
QAttention 5-9 1-2 do_rotary:INT=0 mask_filter_value:FLOAT num_heads:INT! past_present_share_buffer:INT=0 scale:FLOAT
  unidirectional:INT
QEmbedLayerNormalization 18-18 2-2 epsilon:FLOAT
QGemm 6-9 1-1 alpha:FLOAT transA:INT transB:INT
QLinearAdd 7-8 1-1
QLinearAveragePool 4-5 1-1 auto_pad:STRING ceil_mode:INT channels_last:INT count_include_pad:INT kernel_shape:INTS!
  pads:INTS strides:INTS
QLinearConcat 3-* 1-1 axis:INT!
QLinearConv 8-9 1-1 auto_pad:STRING channels_last:INT dilations:INTS group:INT kernel_shape:INTS pads:INTS strides:INTS
QLinearGlobalAveragePool 5-5 1-1 channels_last:INT
QLinearLeakyRelu 4-5 1-1 alpha:FLOAT
QLinearMul 7-8 1-1
QLinearReduceMean 4-5 1-1 axes:INTS! keepdims:INT!
QLinearSigmoid 4-5 1-1
QLinearSoftmax 5-5 1-1 axis:INT opset:INT!
QLinearWhere 9-9 1-1
QuantizeLinear 2-3 1-1 axis:INT
QuickGelu 1-1 1-1 alpha:FLOAT
RotaryEmbedding 4-4 1-1 interleaved:INT is_packed_batching:INT=0 num_heads:INT rotary_embedding_dim:INT scale:FLOAT=1.0
SkipLayerNormalization 3-5 1-4 epsilon:FLOAT
SkipSimplifiedLayerNormalization 3-4 1-4 epsilon:FLOAT
"""
"""Operators of ONNX Runtime, as its version 1.31 has them: numbers of inputs and outputs, and attributes with their
types; ``!``: required, ``=``: opweave runs this value only."""


def _parsed(line: str) -> tuple[str, Signature]:
    op, inputs, outputs, *rest = line.split()
    attributes, required, fixed = {}, set(), {}
    for entry in rest:
        name, _, kind = entry.partition(":")
        kind, _, value = kind.partition("=")
        attributes[name] = int(AttributeProto.AttributeType.Value(kind.rstrip("!")))
        if kind.endswith("!"):
            required.add(name)
        if value:
            fixed[name] = {"INT": int, "FLOAT": float, "STRING": str}[kind](value)
    least, most = [
        (int(low), ENDLESS if high == "*" else int(high))
        for low, _, high in (text.partition("-") for text in (inputs, outputs))
    ]
    return op, Signature(1, attributes, frozenset(required), least, most, fixed=fixed)


@lru_cache(1)
def _microsoft() -> Mapping[str, Signature]:
    return dict(_parsed(line) for line in _MICROSOFT.replace("\n  ", " ").strip().split("\n"))


# --- the schemas of onnx --------------------------------------------------------------------------------------------

_RETIRED: Final = {"Scatter": "ScatterElements", "Upsample": "Resize"}
"""Operators that a version of the operator set retired, and what it has in their place."""


@lru_cache(1024)
def signature_of(op: str, version: int, domain: str) -> Signature | None:
    """The signature of an operator in a version of the operator set of its domain; ``None`` if there is none."""
    if domain == "com.microsoft":
        return _microsoft().get(op)
    try:
        schema = get_schema(op, version, domain)
    except SchemaError:
        return None
    return Signature(
        schema.since_version,
        {a.name: _kind(a) for a in schema.attributes.values()},
        frozenset(a.name for a in schema.attributes.values() if a.required),
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        frozenset(i for i, p in enumerate(schema.inputs) if p.option == OpSchema.FormalParameterOption.Single),
        schema.deprecated and op in _RETIRED,
        {"stash_type": TensorProto.FLOAT} if "stash_type" in schema.attributes else {},
    )


def _kind(attribute: Any) -> int:
    return int(AttributeProto.AttributeType.Value(str(attribute.type).rpartition(".")[2]))


@lru_cache(1)
def _first_versions() -> Mapping[tuple[str, str], int]:
    """``(domain, operator)`` -> the first version of the operator set that has it."""
    found: dict[tuple[str, str], int] = {}
    for schema in get_all_schemas_with_history():
        key = domain_of(schema.domain), schema.name
        found[key] = min(schema.since_version, found.get(key, schema.since_version))
    return found


# --- checks ---------------------------------------------------------------------------------------------------------


def check_operators(
    where: str, protos: Iterable[NodeProto], versions: Mapping[str, int], functions: Collection[tuple[str, str]]
) -> None:
    """Check the nodes of a graph, and those of the graphs in their attributes, against their operators' schemas.

    Nodes of operators that have no schema, and those that call a function of the model, are not checked.

    Args:
        where: the file, for messages.
        versions: domain -> version of the operator set.
        functions: the domains and names of the functions of the model.

    Raises:
        FormatError: an attribute that the operator does not have, that is of another type, twice there or missing; too
            few or too many inputs or outputs; an input that cannot be left out; a domain of which no version is
            imported. The message names the node.
        UnsupportedOpError: an operator that this version of the operator set does not have, or has no more; a value of
            an attribute that opweave does not run.
    """
    for place, proto in enumerate(protos):
        for graph in _graphs(proto):
            check_operators(where, graph.node, versions, functions)
        domain = domain_of(proto.domain)
        name, label = domain or "ai.onnx", label_of(where, proto, place)
        version = versions.get(domain)
        if version is None:
            raise FormatError(f"{label} is of domain {name!r}, of which nothing is imported")
        if (domain, proto.op_type) in functions:
            continue
        signature = signature_of(proto.op_type, version, domain)
        if signature is None:
            first = _first_versions().get((domain, proto.op_type), 0)
            if first > version:
                raise UnsupportedOpError(
                    f"{label}: {name} has {proto.op_type} from version {first} on; the model imports version {version}"
                )
            continue
        if signature.retired:
            raise UnsupportedOpError(
                f"{label}: version {signature.since} of {name} retired {proto.op_type}, and the model imports version "
                f"{version}; it has {_RETIRED[proto.op_type]}"
            )
        _check_attributes(label, proto, signature, f"{proto.op_type} in version {version} of {name}")
        _check_values(label, proto, signature)


def _graphs(proto: NodeProto) -> Iterable[GraphProto]:
    for attribute in proto.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _check_attributes(label: str, proto: NodeProto, signature: Signature, what: str) -> None:
    names = [a.name for a in proto.attribute]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise FormatError(f"{label}: attribute {twice!r} is there twice")
    for given in proto.attribute:
        kind = signature.attributes.get(given.name)
        if kind is None:
            if given.name.startswith("__"):  # onnx keeps these names for notes of tools
                continue
            known = ", ".join(sorted(signature.attributes)) or "none"
            raise FormatError(f"{label}: {what} has no attribute {given.name!r}; its attributes: {known}")
        if given.type != kind:
            have, want = (AttributeProto.AttributeType.Name(k) for k in (given.type, kind))
            raise FormatError(f"{label}: attribute {given.name!r} of {what} is of type {want}, not {have}")
        only = signature.fixed.get(given.name)
        value = given.s.decode(errors="replace") if isinstance(only, str) else given.f or given.i
        if only is not None and not given.ref_attr_name and value != only:
            raise UnsupportedOpError(f"{label}: {given.name}={value} is not supported; {given.name}={only} is")
    missing = sorted(signature.required - set(names))
    if missing:
        raise FormatError(f"{label}: attribute {missing[0]!r} is missing, which {what} requires")


def _check_values(label: str, proto: NodeProto, signature: Signature) -> None:
    for kind, names, (least, most) in (
        ("inputs", proto.input, signature.inputs), ("outputs", proto.output, signature.outputs),
    ):  # fmt: skip
        if not least <= len(names) <= most:
            count = f"at least {least}" if most == ENDLESS else str(least) if least == most else f"{least} to {most}"
            raise FormatError(f"{label} has {len(names)} {kind}; {proto.op_type} has {count}")
    for i in sorted(signature.needed):
        if i < len(proto.input) and not proto.input[i]:
            raise FormatError(f"{label}: input {i} is left out, which {proto.op_type} needs")
