"""`read_model`: an ONNX file as checked data. No nodes are built here, and external data is not read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from opweave.errors import FormatError, UnsupportedOpError
from opweave_onnx.functions import Function
from opweave_onnx.graphs import Graph, check_texts, domain_of, parse_graph
from opweave_onnx.schemas import check_operators
from opweave_onnx.tensors import Arrays

__all__ = ["Source", "read_model"]


@dataclass(frozen=True, eq=False)
class Source:
    """A model as its file describes it.

    Attributes:
        where: the file, for messages.
        graph: the main graph.
        functions: those that the model defines, by domain and name.
        versions: domain -> version of the operator set.
        metadata: producer, description and the other metadata of the file.
        arrays: reads tensors of the file.
    """

    where: str
    graph: Graph
    functions: Mapping[tuple[str, str], Function]
    versions: Mapping[str, int]
    metadata: Mapping[str, Any]
    arrays: Arrays


def read_model(source: Any) -> Source:
    """Read and check a model.

    Args:
        source: a path, the bytes of a file, or an ``onnx.ModelProto``.

    Raises:
        FormatError: no ONNX file, cut off, damaged, or not valid: names that are not defined, or twice; cycles; tensors
            whose bytes do not fit their dims; external data outside of the model's folder; nodes that do not have the
            attributes, inputs and outputs of their operator in the imported version.
        DTypeError: tensors of texts or complex numbers.
        UnsupportedOpError: operators that the imported version of their operator set does not have.
    """
    folder: Path | None = None
    if isinstance(source, ModelProto):
        proto, where = source, "the model"
    else:
        if isinstance(source, (bytes, bytearray, memoryview)):
            where = "the model"
            proto = _parsed(bytes(source), where)
        else:
            path = Path(source)
            where, folder = str(path), path.parent
            try:
                proto = _parsed(path.read_bytes(), where)  # the messages copy the bytes
            except OSError as error:
                raise FormatError(f"{path} cannot be read: {error.strerror or error}") from None
    if not proto.HasField("graph") or not (proto.opset_import or 0 < proto.ir_version < 3):
        raise FormatError(f"{where} is no ONNX model: it has no graph, or imports no operators")
    check_texts(
        where, *[entry.domain for entry in proto.opset_import], *[p.key for p in proto.metadata_props],
        *[text for f in proto.functions for text in (f.name, f.domain, *f.input, *f.output, *f.attribute)],
        *[text for f in proto.functions for n in f.node for text in (n.op_type, n.domain)],
    )  # fmt: skip
    if not 1 <= proto.ir_version <= onnx.IR_VERSION:
        raise FormatError(
            f"{where} is of version {proto.ir_version} of the format; this package of onnx knows 1 to "
            f"{onnx.IR_VERSION}: pip install -U onnx, or convert the model"
        )
    versions = _versions(where, proto.opset_import)
    if not proto.opset_import:
        versions[""] = 1  # what the format means before its version 3
    arrays = Arrays(where, folder)
    functions = _functions(where, proto)
    _check_calls(where, functions)
    graph = parse_graph(proto.graph, versions, arrays)
    if proto.ir_version < 4:
        graph = replace(graph, defaults=())  # all initializers have to be inputs there, and are constants
    check_operators(where, proto.graph.node, versions, functions)
    for function in functions.values():
        within = f"{where}: function {function.proto.name!r}"
        check_operators(within, function.proto.node, function.versions, functions)
    return Source(where, graph, functions, versions, _metadata(proto), arrays)


def _versions(where: str, entries: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Domain -> version of the operator set. Raises `FormatError` for two versions of one domain, and for a version of
    ONNX's operators that the package onnx does not know."""
    versions: dict[str, int] = {}
    for entry in entries:
        domain = domain_of(entry.domain)
        if versions.setdefault(domain, entry.version) != entry.version:
            raise FormatError(
                f"{where} imports the versions {versions[domain]} and {entry.version} of {domain or 'ai.onnx'}"
            )
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= versions.get("", 1) <= newest:
        raise FormatError(
            f"{where} imports version {versions['']} of ONNX's operators; this package of onnx knows 1 to {newest}: "
            "pip install -U onnx, or convert the model"
        )
    return versions


def _functions(where: str, proto: ModelProto) -> dict[tuple[str, str], Function]:
    """The functions of a model by domain and name.

    Raises:
        FormatError: two of one name, or versions of operators that contradict.
        UnsupportedOpError: functions of one name that differ in their overloads only.
    """
    functions: dict[tuple[str, str], Function] = {}
    for each in proto.functions:
        key = domain_of(each.domain), each.name
        if key in functions:
            if each.overload != functions[key].proto.overload:
                raise UnsupportedOpError(f"{where} has overloads of the function {each.name!r}; one is supported")
            raise FormatError(f"{where} has two functions {each.name!r}")
        functions[key] = Function(each, _versions(f"{where}: function {each.name!r}", each.opset_import))
    return functions


def _parsed(data: bytes, where: str) -> ModelProto:
    if not data:
        raise FormatError(f"{where} is empty")
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise FormatError(f"{where} is no ONNX model, or cut off: {error}") from None
    return proto


def _check_calls(where: str, functions: Mapping[tuple[str, str], Function]) -> None:
    """Raise `FormatError` if functions call each other in a circle: inlining them would never end."""
    calls = {
        key: {(domain_of(n.domain), n.op_type) for n in f.proto.node} & functions.keys() for key, f in functions.items()
    }
    left = set(calls)
    while left:
        free = {key for key in left if not calls[key] & left}
        if not free:
            names = ", ".join(sorted(name for _, name in left))
            raise FormatError(f"{where}: the functions {names} call each other in a circle")
        left -= free


def _metadata(proto: ModelProto) -> dict[str, Any]:
    found = {
        "ir_version": proto.ir_version,
        "producer": f"{proto.producer_name} {proto.producer_version}".strip(),
        "domain": proto.domain,
        "model_version": proto.model_version,
        "description": proto.doc_string,
    }
    return {**{k: v for k, v in found.items() if v}, **{p.key: p.value for p in proto.metadata_props}}
