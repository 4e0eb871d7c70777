"""Arrays of other libraries where an array is expected: as constants, and as operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.errors import DTypeError
from opweave.graph.tensor import Tensor

F = np.float32


class Shared:
    """An array of a library that NumPy knows only by DLPack, as those of JAX."""

    def __init__(self, array: np.ndarray[Any, Any], device: tuple[int, int] | None = None) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **params: Any) -> Any:
        return self.array.__dlpack__(**params)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device or self.array.__dlpack_device__()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("only by DLPack")


def values(tensor: Tensor, **feeds: Any) -> np.ndarray[Any, Any]:
    if tensor.leaf is not None:
        return ow.read(tensor)
    with ow.Scheduler("host") as scheduler:
        result = scheduler.build(tensor).run(**feeds)
    assert isinstance(result, np.ndarray)
    return result


OF_TORCH = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "u8": "uint8", "bool": "bool",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gradient"), [*((name, False) for name in OF_TORCH), *((name, True) for name in OF_TORCH if "f" in name)]
)
def test_a_constant_has_dtype_and_values_of_a_torch_tensor_but_memory_of_its_own(name: str, gradient: bool):
    torch = pytest.importorskip("torch")
    dtype = ow.as_dtype(name)
    theirs = torch.arange(6).reshape(2, 3).to(getattr(torch, OF_TORCH[name])).T.requires_grad_(gradient)  # not dense
    made = ow.constant(theirs)
    assert (made.dtype, made.shape) == (dtype, (3, 2))
    with torch.no_grad():
        expected = theirs.to(torch.float64).numpy().copy()
        theirs.fill_(1)
    np.testing.assert_array_equal(values(made).astype(np.float64), expected)


def test_operators_on_both_sides_take_parameters():
    torch = pytest.importorskip("torch")
    x = ow.input("x", (2, 2))
    p = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    fed = np.array([[1, 2], [3, 4]], F)
    theirs = p.detach().numpy()
    for made, expected in (
        (x + p, fed + theirs), (p + x, fed + theirs), (x - p, fed - theirs), (p - x, theirs - fed),
        (x * p, fed * theirs), (p / x, theirs / fed), (x @ p, fed @ theirs), (p @ x, theirs @ fed),
        (ow.maximum(p, x), np.maximum(theirs, fed)),
    ):  # fmt: skip
        np.testing.assert_allclose(values(made, x=fed), expected, rtol=1e-6)
    assert (x * torch.tensor(2, dtype=torch.bfloat16)).dtype == (x * ow.constant(2, "bf16")).dtype


def test_the_values_are_converted_as_those_of_numpy():
    torch = pytest.importorskip("torch")
    assert ow.constant(torch.tensor([1.5]), "f16").dtype.name == "f16"
    with pytest.raises(DTypeError, match="does not become i32 silently"):
        ow.constant(torch.tensor([1.0]), "i32")
    state = ow.state("s", 2)
    ow.write(state, torch.tensor([1.0, 2.0], requires_grad=True))
    assert ow.read(state).tolist() == [1, 2]


def test_arrays_that_numpy_knows_only_by_dlpack():
    array = np.arange(4, dtype=F)
    array.flags.writeable = False
    np.testing.assert_array_equal(values(ow.constant(Shared(array))), array)
    np.testing.assert_array_equal(values(ow.input("x", 4) + Shared(array), x=array), 2 * array)


def test_jax():
    jax = pytest.importorskip("jax")
    for dtype in (jax.numpy.float32, jax.numpy.bfloat16, jax.numpy.int32):
        np.testing.assert_array_equal(values(ow.constant(jax.numpy.arange(4, dtype=dtype))).astype(F), np.arange(4))


@pytest.mark.parametrize(
    "take", [ow.constant, lambda far: ow.input("x", 2) + far, lambda far: ow.write(ow.state("s", 2), far)]
)
def test_an_array_in_the_memory_of_another_device_is_refused_with_a_remedy(take):
    with pytest.raises(DTypeError, match=r"memory of another device \(DLPack device 2, 0\); copy it to the host first"):
        take(Shared(np.zeros(2, F), (2, 0)))


def test_a_torch_tensor_without_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(DTypeError, match="cannot take Tensor by DLPack"):
        ow.constant(torch.zeros(2, device="meta"))


def test_a_symbolic_tensor_is_no_array_even_where_it_has_memory():
    state = ow.state("s", 2, device="host")
    assert ow.constant(state) is state
    with pytest.raises(DTypeError, match="symbolic"):
        ow.write(ow.state("t", 2), state)
