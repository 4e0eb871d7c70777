"""A backend for JAX: every split becomes one function that XLA compiles. An example of the functional contract.

Results are handed from call to call as JAX arrays; fed NumPy arrays are given to XLA where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opweave.contract import Arg, Backend, Device, Kind, Step, Stream
from opweave.functional import ArrayDevice, ArrayLibrary, evaluate

__all__ = ["JaxBackend", "JaxDevice"]

Array = Any


class JaxLibrary(ArrayLibrary):
    """JAX's arrays, and the tracers that stand for them while ``jax.jit`` traces."""

    def __init__(self, device: jax.Device) -> None:
        self.device: Final = device

    def from_host(self, array: np.ndarray[Any, Any], borrowed: bool) -> Array:
        # Compiled functions take NumPy arrays too, and XLA reads them where they lie.
        return array if borrowed else jax.device_put(np.array(array), self.device)

    def adopt(self, array: Any) -> Array:
        return array if isinstance(array, jax.Array) else jax.dlpack.from_dlpack(array)

    def copy(self, array: Array) -> Array:
        return jnp.array(array, copy=True)

    def broadcast_to(self, array: Array, shape: Sequence[int]) -> Array:
        return jnp.broadcast_to(array, shape)

    def updated(self, array: Array, index: Any, values: Array) -> Array:
        return array.at[index].set(values)


# --- operations -----------------------------------------------------------------------------------------------------

EXACT: Final = lax.Precision.HIGHEST


def linear(x: Array, w: Array, b: Array | None = None, *, blocks: None = None) -> Array:
    product = lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=EXACT)
    return product if b is None else product + b


def softmax(x: Array, mask: Array | None = None, *, scale: float) -> Array:
    return jax.nn.softmax(x * scale if mask is None else x * scale + mask, -1)


def layer_norm(x: Array, w: Array | None = None, b: Array | None = None, *, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    y = centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps)
    y = y if w is None else y * w
    return y if b is None else y + b


def rms_norm(x: Array, w: Array | None = None, *, eps: float) -> Array:
    y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)
    return y if w is None else y * w


def reduced(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, *, axes: function(x, axis=axes)


MOVING: Final[dict[str, Callable[..., Array]]] = {
    "copy": lambda x: x,
    "contiguous": lambda x: x,
    "concat": lambda *parts, axis: jnp.concatenate(parts, axis),
    "assign": lambda region, x: x,
}
"""Operations on elements of any type that the device has."""

FUNCTIONS: Final[dict[str, Callable[..., Array]]] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide, "neg": jnp.negative, "abs": jnp.abs,
    "exp": jnp.exp, "log": jnp.log, "sqrt": jnp.sqrt, "square": jnp.square, "tanh": jnp.tanh, "sin": jnp.sin,
    "cos": jnp.cos, "floor": jnp.floor, "ceil": jnp.ceil, "round": jnp.round, "trunc": jnp.trunc,
    "minimum": jnp.minimum, "maximum": jnp.maximum, "relu": lambda x: jnp.maximum(x, 0), "sigmoid": jax.nn.sigmoid,
    "silu": lambda x: x * jax.nn.sigmoid(x), "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True), "scale": lambda x, *, scale, bias: x * scale + bias,
    "linear": linear, "matmul": partial(jnp.matmul, precision=EXACT), "softmax": softmax, "layer_norm": layer_norm,
    "rms_norm": rms_norm, "sum": reduced(jnp.sum), "mean": reduced(jnp.mean), "max": reduced(jnp.max),
    "min": reduced(jnp.min), **MOVING,
}  # fmt: skip
"""The operations that the device runs: functions of the sources, and the attributes by keyword. Of those that write a
state the first source is what is there."""

FLOATS: Final = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}
TYPES: Final = FLOATS | {"i32": jnp.int32, "u8": jnp.uint8, "bool": jnp.bool_}
"""Our names of the types, and JAX's, which has none of 64 bits unless a process asks for them."""


def apply(step: Step, *sources: Array) -> Array:
    """The result of a step. Half types compute in f32, and each result is rounded."""
    wide = [x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x for x in sources]
    result = FUNCTIONS[step.op](*wide, **step.attrs)
    return result.reshape(step.out.shape).astype(TYPES[step.out.dtype.name])


# --- the device -----------------------------------------------------------------------------------------------------


def wait(arrays: Sequence[Array]) -> None:
    """Wait for results, which calls return while XLA computes them."""
    for array in arrays:
        array.block_until_ready()  # jax.block_until_ready takes 2 µs more, for trees of arrays


class JaxStream(Stream):
    """Compiles all steps of a split into one function."""

    def _compile_functional(
        self, steps: Sequence[Step], inputs: Sequence[Arg], outputs: Sequence[Arg], donated: Sequence[int]
    ) -> Callable[..., Sequence[Array]]:
        assert isinstance(self.device, JaxDevice)
        library = self.device.library

        def function(*arrays: Array) -> Sequence[Array]:
            return evaluate(library, apply, steps, inputs, outputs, arrays)

        # XLA makes use of what looks like a result, and warns of the rest.
        results = [(out.dtype, out.shape) for out in outputs]
        taken = []
        for i in donated:
            if (form := (inputs[i].dtype, inputs[i].shape)) in results:
                results.remove(form)
                taken.append(i)
        compiled: Callable[..., Sequence[Array]] = jax.jit(function, donate_argnums=taken)
        compiled.wait = wait  # type: ignore[attr-defined]
        return compiled


class JaxDevice(ArrayDevice):
    """A device of JAX."""

    stream_class = JaxStream

    def __init__(self, device: jax.Device) -> None:
        self.library = JaxLibrary(device)
        self.id = f"{device.platform}:{device.id}"
        self.description = f"JAX {jax.__version__} on {device.device_kind}"
        self.kind = Kind.ACCEL if device.platform == "cpu" else Kind.GPU
        kind, number = jax.device_put(np.zeros(1), device).__dlpack_device__()
        self.dlpack_device = int(kind), int(number)

    def _why_not(self, step: Step) -> str | None:
        if step.op not in FUNCTIONS:
            return f"no function for {step.op}"
        types = TYPES if step.op in MOVING else FLOATS
        wrong = [a.dtype.name for a in (step.out, *step.srcs) if a.dtype.name not in types]
        return f"no {wrong[0]} in {step.op}" if wrong else None


class JaxBackend(Backend):
    name = "jax"

    def devices(self) -> list[Device]:
        return [JaxDevice(device) for device in jax.devices()]
