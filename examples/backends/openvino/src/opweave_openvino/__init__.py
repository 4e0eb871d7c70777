"""A backend for OpenVINO: every split becomes one model that it compiles. An example of the functional contract.

While a split is compiled, nodes of OpenVINO's graph stand for arrays; when it runs, arrays are NumPy's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset15 as ops

from opweave.contract import Arg, Backend, Device, Kind, Step, Stream
from opweave.functional import ArrayDevice, ArrayLibrary, evaluate

__all__ = ["OpenVINOBackend", "OpenVINODevice"]

Node = Any
Array = np.ndarray[Any, Any]

FLOATS: Final = {"f32": np.float32}
TYPES: Final = FLOATS | {"i32": np.int32}
"""The processors' plugin computes f64 in f32, and i64 in i32."""


class Memory(ArrayLibrary):
    """Arrays between the models: NumPy's."""

    def from_host(self, array: Array, borrowed: bool) -> Array:
        return array if borrowed else array.copy()

    def broadcast_to(self, array: Array, shape: Sequence[int]) -> Array:
        return np.broadcast_to(array, shape)

    def updated(self, array: Array, index: Any, values: Array) -> Array:
        result = array.copy()
        result[index] = values
        return result


class Graph(ArrayLibrary):
    """Nodes of a model that is being built."""

    def copy(self, array: Node) -> Node:
        return ops.convert_like(array, array)

    def reshape(self, array: Node, shape: Sequence[int]) -> Node:
        return ops.reshape(array, np.array(shape, np.int64), False)

    def transpose(self, array: Node, axes: Sequence[int]) -> Node:
        return ops.transpose(array, np.array(axes, np.int64))

    def broadcast_to(self, array: Node, shape: Sequence[int]) -> Node:
        return ops.broadcast(array, np.array(shape, np.int64))

    def take(self, array: Node, index: Any) -> Node:
        if isinstance(index, np.ndarray):
            return ops.gather(array, index, np.int64(0))
        return ops.slice(array, *ranges(array, index))

    def updated(self, array: Node, index: Any, values: Node) -> Node:
        if isinstance(index, np.ndarray):
            places, flat = index.reshape(-1, 1), self.reshape(values, (-1,))
            return ops.scatter_nd_update(array, places, flat)
        return ops.slice_scatter(array, values, *ranges(array, index))


def ranges(array: Node, index: Sequence[slice]) -> tuple[Array, Array, Array]:
    """Starts, stops and steps of the slices of all axes."""
    starts, stops, steps = np.array([piece.indices(n) for piece, n in zip(index, array.shape, strict=True)]).T.copy()
    return starts, stops, steps


# --- operations -----------------------------------------------------------------------------------------------------


def one(x: float) -> Node:
    return ops.constant(np.float32(x))


def linear(x: Node, w: Node, b: Node | None = None, *, blocks: None = None) -> Node:
    flat = x if len(x.shape) > 1 else ops.unsqueeze(x, np.int64(0))
    product = ops.matmul(flat, w, False, True)
    product = product if len(x.shape) > 1 else ops.squeeze(product, np.int64(0))
    return product if b is None else ops.add(product, b)


def softmax(x: Node, mask: Node | None = None, *, scale: float) -> Node:
    scaled = ops.multiply(x, one(scale))
    return ops.softmax(scaled if mask is None else ops.add(scaled, mask), -1)


def layer_norm(x: Node, w: Node | None = None, b: Node | None = None, *, eps: float) -> Node:
    y = ops.mvn(x, np.array([-1]), True, eps, "INSIDE_SQRT")
    y = y if w is None else ops.multiply(y, w)
    return y if b is None else ops.add(y, b)


def reduced(function: Callable[..., Node]) -> Callable[..., Node]:
    return lambda x, *, axes: function(x, np.array(axes, np.int64)) if axes else x


MOVING: Final[dict[str, Callable[..., Node]]] = {
    "copy": lambda x: x, "contiguous": lambda x: x, "assign": lambda region, x: x,
    "concat": lambda *parts, axis: ops.concat(list(parts), axis),
}  # fmt: skip
"""Operations on elements of any type that the device has."""

FUNCTIONS: Final[dict[str, Callable[..., Node]]] = {
    "add": ops.add, "sub": ops.subtract, "mul": ops.multiply, "neg": ops.negative, "abs": ops.abs,
    "relu": ops.relu, "sigmoid": ops.sigmoid, "tanh": ops.tanh, "silu": ops.swish,
    "gelu": lambda x: ops.gelu(x, "ERF"), "scale": lambda x, *, scale, bias: x * one(scale) + one(bias),
    "linear": linear, "softmax": softmax, "layer_norm": layer_norm, "sum": reduced(ops.reduce_sum),
    "mean": reduced(ops.reduce_mean), **MOVING,
}  # fmt: skip
"""The operations that the device runs: functions of the sources, and the attributes by keyword."""


def apply(step: Step, *sources: Node) -> Node:
    result = FUNCTIONS[step.op](*sources, **step.attrs)
    shape = tuple(step.out.shape)
    return result if tuple(result.shape) == shape else Graph().reshape(result, shape)


# --- the device -----------------------------------------------------------------------------------------------------


class OpenVINOStream(Stream):
    """Compiles all steps of a split into one model."""

    def _compile_functional(
        self, steps: Sequence[Step], inputs: Sequence[Arg], outputs: Sequence[Arg], donated: Sequence[int]
    ) -> Callable[..., Sequence[Array]]:
        assert isinstance(self.device, OpenVINODevice)
        leaves = [ops.parameter(list(arg.shape), TYPES[arg.dtype.name]) for arg in inputs]
        results = evaluate(Graph(), apply, steps, inputs, outputs, leaves)
        model = ov.Model([ops.result(result) for result in results], leaves)
        compiled = self.device.core.compile_model(model, self.device.id, CONFIG)
        requests = threading.local()  # streams of several threads may share what was compiled

        def function(*arrays: Array) -> Sequence[Array]:
            if not hasattr(requests, "own"):
                requests.own = compiled.create_infer_request()
            found = requests.own.infer(dict(enumerate(arrays)), share_inputs=True)
            return [np.array(found[i]) for i in range(len(outputs))]

        return function


CONFIG: Final = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
"""Products accumulate in f32 over the operands as they are; without it processors with AMX round them to bf16."""


class OpenVINODevice(ArrayDevice):
    """A device of OpenVINO: CPU, GPU, NPU."""

    stream_class = OpenVINOStream

    def __init__(self, core: ov.Core, name: str) -> None:
        self.core, self.library, self.id = core, Memory(), name
        hardware, version = core.get_property(name, "FULL_DEVICE_NAME"), ov.__version__.partition("-")[0]
        self.description = f"OpenVINO {version} on {hardware}"
        self.kind = Kind.GPU if name.startswith("GPU") else Kind.ACCEL

    def _why_not(self, step: Step) -> str | None:
        if step.op not in FUNCTIONS:
            return f"no function for {step.op}"
        types = TYPES if step.op in MOVING else FLOATS
        wrong = [a.dtype.name for a in (step.out, *step.srcs) if a.dtype.name not in types]
        return f"no {wrong[0]} in {step.op}" if wrong else None


class OpenVINOBackend(Backend):
    name = "openvino"

    def devices(self) -> list[Device]:
        core = ov.Core()
        return [OpenVINODevice(core, name) for name in core.available_devices]
