"""Operators of torch that are built of several operations, in half types: within the rounding of one operation of the
definition in f64, also where powers and sums within are beyond f16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import opweave as ow
import opweave_torch

DIGITS = {torch.float16: 11, torch.bfloat16: 8}
Values = dict[str, torch.Tensor]

CASES: dict[str, Callable[[Values], torch.Tensor]] = {
    "normalize": lambda t: functional.normalize(t["x"], dim=-1),
    "norm": lambda t: torch.linalg.vector_norm(t["x"], dim=-1),
    "normalize long": lambda t: functional.normalize(t["long"], dim=0),
    "std": lambda t: t["x"].std(-1),
    "logsumexp": lambda t: torch.logsumexp(t["x"], -1),
    "cosine": lambda t: functional.cosine_similarity(t["x"], t["y"], dim=-1),
    "batch norm": lambda t: functional.batch_norm(t["x"], None, None, training=True),
    "group norm": lambda t: functional.group_norm(t["x"].reshape(1, 4, -1), 2),
    "rms norm": lambda t: functional.rms_norm(t["x"], t["x"].shape[-1:]),
    "alpha": lambda t: torch.add(t["far"], t["y"], alpha=100),
    "sub alpha": lambda t: torch.rsub(t["y"], t["far"], alpha=-100),
    "addmm": lambda t: torch.addmm(t["x"][:, :4], t["x"], t["y"].T, alpha=1e-5),
    "elu": lambda t: functional.selu(t["s"]),
    "softplus": lambda t: functional.softplus(t["s"], beta=3.0),
    "trunc": lambda t: torch.div(t["x"], t["y"], rounding_mode="trunc"),
    "mish": lambda t: functional.mish(t["s"]),
    "attention": lambda t: functional.scaled_dot_product_attention(
        t["x"].reshape(1, 4, 20, 50), t["y"].reshape(1, 4, 20, 50), t["s"].reshape(1, 4, 20, 50)
    ),
}


class Cases(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, s: torch.Tensor, long: torch.Tensor, far: torch.Tensor) -> Any:
        return tuple([case({"x": x, "y": y, "s": s, "long": long, "far": far}) for case in CASES.values()])


@pytest.mark.parametrize("dtype", DIGITS)
def test_results_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, y = ((torch.rand(2, 4, 1000) * 900 + 100).to(dtype)).unbind()
    signed, long = (torch.rand(4, 1000) * 8 - 4).to(dtype), (torch.rand(10_000) * 900 + 100).to(dtype)
    given = x, y, signed, long, torch.full((4, 1000), -40000.0, dtype=dtype)
    module = Cases()
    truth = module(*[t.double() for t in given])
    exported = torch.export.export(module, given)
    wrong = {}
    for device in ("cpu", "opencl:0", "torch:cpu", "ort:cpu", "host"):
        try:
            ow.device(device)
        except ow.OpweaveError:
            continue
        with opweave_torch.import_program(exported, list(dict.fromkeys([device, "host"]))) as model:
            found = model(*given)
        for name, got, want in zip(CASES, found, truth, strict=True):
            assert got.dtype is dtype, name
            # torch itself writes these as several operations.
            steps = 4 if name in ("cosine", "normalize", "normalize long", "attention") else 1
            limit = (0.52 * steps) * 2.0 ** (1 - DIGITS[dtype]) * want.abs() + 4e-6 * want.abs().max() + 6e-8
            if not ((got.double() - want).abs() <= limit).all():
                wrong[device, name] = float(((got.double() - want).abs() / limit).max())
    assert not wrong


def test_normalize_of_hundreds() -> None:
    x = torch.full((8,), 300.0, dtype=torch.float16)

    class Normalized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.normalize(x, dim=0)

    for device in ("cpu", "torch:cpu"):
        with opweave_torch.import_program(torch.export.export(Normalized(), (x,)), [device]) as model:
            torch.testing.assert_close(model(x), torch.full((8,), 8**-0.5, dtype=torch.float16))
