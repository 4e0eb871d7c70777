"""Small ONNX models for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Array = np.ndarray[Any, Any]


def value(name: str, dtype: Any, shape: Sequence[Any] | None) -> onnx.ValueInfoProto:
    """An input or output."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[str],
    initializers: Mapping[str, Array] | None = None,
    version: int = 21,
    **more: Any,
) -> onnx.ModelProto:
    """A model of the standard domain, and of com.microsoft."""
    graph = helper.make_graph(
        list(nodes), "graph", list(inputs), [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(a, name) for name, a in (initializers or {}).items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", version), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node; names are separated by spaces, and ``-`` stands for one that is left out."""
    names = [[n if n != "-" else "" for n in text.split()] for text in (inputs, outputs)]
    return helper.make_node(op, *names, name=f"{op.lower()}_{outputs.split()[0]}", **attributes)


def mlp(rng: np.random.Generator) -> onnx.ModelProto:
    """Two layers, with a dynamic batch."""
    weights = {"w1": rng.standard_normal((16, 32)), "b1": rng.standard_normal(32), "w2": rng.standard_normal((16, 32))}
    return model(
        [
            node("Gemm", "x w1 b1", "h"),
            node("Relu", "h", "r"),
            node("Gemm", "r w2", "z", transB=1),
            node("Softmax", "z", "y"),
        ],
        [value("x", np.float32, ["batch", 16])],
        ["y"],
        {name: a.astype(np.float32) for name, a in weights.items()},
    )


@cache
def saturates() -> bool:
    """Whether ONNX Runtime's kernels for this processor add products of u8 and i8 in pairs of 16 bits, as on x86
    without VNNI: its documentation then asks for weights of 7 bits, and it is a truth for those only."""
    import onnxruntime

    weight = {"b": np.full((2, 16), 127, np.int8)}
    proto = model([node("MatMulInteger", "a b", "y")], [value("a", np.uint8, (4, 2))], ["y"], weight)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"a": np.full((4, 2), 255, np.uint8)})
    return bool((found != 2 * 255 * 127).any())


def weights_of_8_bits(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Integers of the whole range of a type, as far as ONNX Runtime computes rightly with them (`saturates`)."""
    limits = np.iinfo(dtype)
    low, high = (-64, 63) if dtype is np.int8 and saturates() else (limits.min, limits.max)
    return rng.integers(low, high, shape, dtype, endpoint=True)
