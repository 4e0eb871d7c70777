"""`Model`: an ONNX model while it is being written, and `Operand`, a value in it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from opweave.graph.dtypes import DTYPES, DType, f32, i32
from opweave.graph.layout import Shape
from opweave_ort.patterns import Pattern

__all__ = ["IR_VERSION", "MICROSOFT", "ONNX_TYPES", "OPSET", "WEIGHTS_FILE", "Model", "ModelNode", "Operand", "Value",
           "computed"]  # fmt: skip

OPSET: Final = 21
"""The version of ONNX's operators that models are written in. Every ONNX Runtime that the plugin accepts knows it."""

IR_VERSION: Final = 10
"""The version of the file format that belongs to `OPSET`."""

IN_PLACE: Final = frozenset({"Conv", "ConvTranspose", "Gather", "Gemm", "MatMul", "MatMulNBits"})
"""Operators whose weights sessions read where they lie. Weights of others are copied: ONNX Runtime's optimizers may
transpose or reshape such initializers under their names, and then the bytes that lie there are not those."""

WEIGHTS_FILE: Final = "weights"
"""Where models say that weights are. There is no such file: the session gets the weights as values."""

MICROSOFT: Final = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

ONNX_TYPES: Final[dict[DType, int]] = {
    DTYPES[ours]: theirs
    for ours, theirs in {
        "f64": TensorProto.DOUBLE,
        "f32": TensorProto.FLOAT,
        "f16": TensorProto.FLOAT16,
        "bf16": TensorProto.BFLOAT16,
        "i64": TensorProto.INT64,
        "i32": TensorProto.INT32,
        "i16": TensorProto.INT16,
        "i8": TensorProto.INT8,
        "u8": TensorProto.UINT8,
        "bool": TensorProto.BOOL,
    }.items()
}
"""ONNX's number for each plain type."""


def computed(dtype: DType) -> DType:
    """The type in which operators compute values of ``dtype``: f32 for half types, i32 for integers below 32 bits.

    ONNX Runtime has few kernels for these on the CPU. Results are rounded, and integers wrap around, when they are cast
    back.
    """
    if dtype.is_half:
        return f32
    return i32 if dtype.is_integer and dtype.itemsize < 4 else dtype


class Operand(NamedTuple):
    """A value of a model.

    Attributes:
        name: in the model.
        dtype: its type there, which is that of the graph's tensor after `computed`.
        shape: of the tensor.
        lead: the shape of the model's value, where axes that are repeated have length 1 instead of their own; equal to
            ``shape`` where nothing is repeated.
        stored: the type of the graph's tensor.
    """

    name: str
    dtype: DType
    shape: Shape
    lead: Shape
    stored: DType


class Value(NamedTuple):
    """An input, output or weight of a model."""

    name: str
    dtype: DType
    shape: Shape


class ModelNode(NamedTuple):
    """An operator in a model: its type, the names of what it takes and gives, and its attributes."""

    kind: str
    sources: tuple[str, ...]
    results: tuple[str, ...]
    domain: str
    attributes: dict[str, Any]

    @property
    def reads(self) -> set[str]:
        """The names of all that it reads, also in a graph that it repeats."""
        bodies = [value for value in self.attributes.values() if isinstance(value, onnx.GraphProto)]
        return {*self.sources, *(name for body in bodies for node in body.node for name in node.input)}

    @property
    def key(self) -> Hashable:
        """Equal for equal nodes."""
        return (*self[:4], tuple(sorted((k, _hashable(v)) for k, v in self.attributes.items())))


class Model:
    """An ONNX model while it is being written. Equal constants, and equal nodes, are written once.

    Attributes:
        inputs, outputs: in order.
        weights: initializers whose bytes a session gets apart from the model.
        constants: the arrays of the others, by name.
        nodes: in the order in which they can be computed.
    """

    def __init__(self) -> None:
        self.inputs: Final[list[Value]] = []
        self.outputs: Final[list[Value]] = []
        self.weights: Final[list[Value]] = []
        self.constants: Final[dict[str, np.ndarray[Any, Any]]] = {}
        self.nodes: Final[list[ModelNode]] = []
        self._names = 0
        self._out: Final[set[str]] = set()
        self._known: Final[dict[Any, str]] = {}

    def name(self, prefix: str = "v") -> str:
        """A new name."""
        self._names += 1
        return f"{prefix}{self._names}"

    # --- values -----------------------------------------------------------------------------------------------------

    def input(self, name: str, dtype: DType, shape: Shape) -> str:
        """Declare an input."""
        self.inputs.append(Value(name, dtype, shape))
        return name

    def weight(self, name: str, dtype: DType, shape: Shape) -> str:
        """Declare an initializer whose bytes the session gets beside the model."""
        self.weights.append(Value(name, dtype, shape))
        return name

    def output(self, value: str, dtype: DType, shape: Shape) -> str:
        """Declare an output that has this value; returns its name, which no other output has."""
        name = value
        if not value.startswith("v") or value in self._out:
            name = self.name("out")
            self.nodes.append(ModelNode("Identity", (value,), (name,), "", {}))
        self._out.add(name)
        self.outputs.append(Value(name, dtype, shape))
        return name

    def constant(self, array: Any, dtype: DType | None = None) -> str:
        """A constant of a type that NumPy has, by default that of the array."""
        values = np.asarray(array, None if dtype is None else dtype.numpy)
        key = ("constant", values.dtype.str, values.shape, values.tobytes())
        name = self._known.get(key)
        if name is None:
            name = self._known[key] = self.name("c")
            self.constants[name] = values
        return name

    def integers(self, *values: int) -> str:
        """A constant vector of i64, as operators want shapes, axes and positions."""
        return self.constant(np.array(values, np.int64))

    @property
    def read_in_place(self) -> set[str]:
        """The names of weights that only operators of `IN_PLACE` read."""
        elsewhere = {source for node in self.nodes if node.kind not in IN_PLACE for source in node.reads}
        return {weight.name for weight in self.weights} - elsewhere

    # --- nodes ------------------------------------------------------------------------------------------------------

    def __call__(self, kind: str, *sources: str, domain: str = "", **attributes: Any) -> str:
        """The first result of a node. A source ``""`` stands for an optional input that is left out."""
        return self.several(1, kind, *sources, domain=domain, **attributes)[0]

    def several(self, count: int, kind: str, *sources: str, domain: str = "", **attributes: Any) -> tuple[str, ...]:
        """``count`` results of a node."""
        key = ModelNode(kind, sources, (str(count),), domain, attributes).key
        first = self._known.get(key)
        if first is None:
            first = self._known[key] = self.name()
            results = (first, *[f"{first}.{i}" for i in range(1, count)])
            self.nodes.append(ModelNode(kind, sources, results, domain, attributes))
        return (first, *[f"{first}.{i}" for i in range(1, count)])

    def cast(self, value: str, source: DType, target: DType) -> str:
        """The value in another type."""
        return value if source is target else self("Cast", value, to=ONNX_TYPES[target])

    def before_cast(self, value: str) -> str:
        """What a value was cast from, else the value itself, for emitters that cast only what they choose of it."""
        return next((n.sources[0] for n in self.nodes if n.kind == "Cast" and value in n.results), value)

    def prune(self) -> None:
        """Drop the nodes whose results nobody reads."""
        read = {value.name for value in self.outputs}
        for node in reversed(self.nodes.copy()):
            if read.isdisjoint(node.results):
                self.nodes.remove(node)
            else:
                read |= node.reads

    def reshape(self, value: str, shape: Shape) -> str:
        """The elements in another shape."""
        return self("Reshape", value, self.integers(*shape))

    def expanded(self, operand: Operand) -> str:
        """The value in the operand's whole shape, repeated where it is broadcast."""
        if operand.lead == operand.shape:
            return operand.name
        target = computed(operand.dtype)  # Expand has no kernel for bf16
        whole = self("Expand", self.cast(operand.name, operand.dtype, target), self.integers(*operand.shape))
        return self.cast(whole, target, operand.dtype)

    # --- the end ----------------------------------------------------------------------------------------------------

    def serialized(self, pattern: Pattern | None = None) -> bytes:
        """The finished model, for all models that fit a pattern; by default for this one only."""
        pattern = pattern or Pattern.of(self)
        lengths = pattern.lengths
        fixed = [numpy_helper.from_array(array, name) for name, array in pattern.constants.items()]
        varying = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), lengths[name])
            for name, array in self.constants.items()
            if name not in pattern.constants
        ]

        def declared(values: list[Value]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(v.name, ONNX_TYPES[v.dtype], lengths[v.name]) for v in values]

        nodes = [helper.make_node(n.kind, n.sources, n.results, domain=n.domain, **n.attributes) for n in self.nodes]
        weights = [_external(weight) for weight in self.weights]
        graph = helper.make_graph(
            nodes, "group", [*declared(self.inputs), *varying], declared(self.outputs), [*weights, *fixed]
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="opweave")
        return bytes(model.SerializeToString())


def _external(weight: Value) -> TensorProto:
    declared = TensorProto(name=weight.name, data_type=ONNX_TYPES[weight.dtype], dims=weight.shape)
    declared.data_location = TensorProto.EXTERNAL
    declared.external_data.add(key="location", value=WEIGHTS_FILE)
    return declared


def _hashable(value: Any) -> Any:
    if isinstance(value, onnx.GraphProto):
        return value.SerializeToString()
    return tuple(value) if isinstance(value, list) else value
