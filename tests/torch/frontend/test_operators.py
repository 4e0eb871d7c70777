"""Every operator with a builder gives what torch gives, in float and integer types, on several devices.

All cases are results of one module, so that torch exports it once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import opweave as ow
from opweave_torch import import_program
from opweave_torch.frontend.operators import OPERATORS
from opweave_torch.frontend.source import decomposed
from tests.support.torch_operators import ELEMENTWISE, LAYERS, OVERLOADS, SHAPES, Case

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Using padding='same'")


class Cases(nn.Module):
    def __init__(self, cases: dict[str, Case]) -> None:
        super().__init__()
        self.cases = cases

    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: case(tensors) for name, case in self.cases.items()}


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(1, 5, shape, generator=generator)

    return {
        "x": floats(2, 3, 4), "y": floats(2, 3, 4), "p": floats(2, 3, 4).abs() + 0.5, "i": integers(2, 3, 4) - 2,
        "j": integers(2, 3, 4), "b": floats(2, 3, 4) > 0, "c": floats(2, 3, 4) > 0, "m": floats(3, 4),
        "w": floats(4, 5),
        "v": floats(4), "k": torch.tensor([0, 2, 1]), "image": floats(2, 4, 6, 8), "kernel": floats(4, 4, 3, 3),
        "q": floats(2, 4, 5, 8), "mask": torch.tensor([[1, 0, 1, 1, 0], [0] * 5, *[[1] * 5] * 3]).bool(),
    }  # fmt: skip


def assert_same(name: str, got: Any, want: Any, limit: float) -> None:
    if isinstance(want, (tuple, list)):
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(f"{name}[{i}]", g, w, limit)
        return
    if not want.is_floating_point():
        limit = 0
    torch.testing.assert_close(got, want, rtol=limit, atol=limit, equal_nan=True, msg=lambda m: f"{name}: {m}")


FAMILIES = {"elementwise": ELEMENTWISE, "shapes": SHAPES, "layers": LAYERS, "overloads": OVERLOADS}
LIMITS = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 5e-2}


@cache
def exported(family: str, dtype: torch.dtype) -> tuple[torch.export.ExportedProgram, Any, Any]:
    """The program of a family, its arguments, and what torch gives."""
    module, given = Cases(FAMILIES[family]), (tensors(dtype),)
    return torch.export.export(module, given), given, module(*given)


@pytest.mark.parametrize(
    ("family", "devices", "dtype"),
    [
        *[(family, devices, torch.float32) for family in FAMILIES for devices in ("cpu,host", "torch:cpu")],
        ("layers", "opencl:0,host", torch.float32),  # compiling for the small families takes a minute
        ("elementwise", "cpu,host", torch.bfloat16),
        ("shapes", "cpu,host", torch.bfloat16),
    ],
    ids=str,
)
def test_operators(family: str, devices: str, dtype: torch.dtype) -> None:
    try:
        ow.device(devices.split(",")[0])
    except ow.OpweaveError as error:
        pytest.skip(str(error))
    program, given, want = exported(family, dtype)
    with import_program(program, devices.split(",")) as model:
        for name, got in model(*given).items():
            assert_same(name, got, want[name], LIMITS[dtype])


ELSEWHERE = {
    "_scaled_dot_product_efficient_attention.default", "_scaled_dot_product_flash_attention.default",  # CUDA's
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    "avg_pool2d_backward.default", "convolution_backward.default", "embedding_dense_backward.default",
    "gelu_backward.default", "max_pool2d_with_indices_backward.default", "native_dropout.default",
    "native_layer_norm_backward.default", "gru.input", "lstm.input", "rnn_relu.input", "rnn_tanh.input",
}  # fmt: skip
"""Operators that training, networks and recurrent layers are tested with."""


def test_every_operator_has_a_case() -> None:
    seen = {node.target for family in FAMILIES for node in decomposed(exported(family, torch.float32)[0]).graph.nodes}
    assert {str(op).removeprefix("aten.") for op in OPERATORS if op not in seen} == ELSEWHERE
