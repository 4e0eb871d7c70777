"""Functions of torch without a public name: where a version of torch lacks one, the public way gives the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import opweave as ow
from opweave_torch import native


def test_no_other_module_uses_functions_without_a_public_name() -> None:
    root = Path(native.__file__).parent
    private = re.compile(r"torch\._[a-zA-Z]|torch\.ops\b")
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if private.search(path.read_text())}
    assert found == {"native.py", "frontend/native.py"}


@pytest.mark.parametrize("name", ["silu", "gelu", "softplus", "hardswish", "leaky_relu", "elu"])
def test_out_function_falls_back_on_the_public_operator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    x, want, got = torch.linspace(-3, 3, 16), torch.empty(16), torch.empty(16)
    private = native.out_function(name)
    private(x, out=want)
    monkeypatch.delattr(torch._C._nn, name)
    public = native.out_function(name)
    assert public is not private
    public(x, out=got)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["softmax_gradient", "log_softmax_gradient"])
def test_gradients_of_softmax_fall_back_on_public_operators(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    grad, result = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64).softmax(-1)
    want, got = torch.empty_like(grad), torch.empty_like(grad)
    getattr(native, name)(grad, result, want)
    monkeypatch.setattr(native, f"_{name.upper()}", None)
    getattr(native, name)(grad, result, got)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_max_pool_falls_back_on_the_public_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 2, 4, 4)
    sizes = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    want, got = [(torch.empty(1, 2, 2, 2), torch.empty(1, 2, 2, 2, dtype=torch.int64)) for _ in range(2)]
    native.max_pool_with_indices()(x, *sizes, out=want)
    monkeypatch.delattr(torch._C._nn, "max_pool2d_with_indices")
    native.max_pool_with_indices()(x, *sizes, out=got)
    assert all(map(torch.equal, got, want))


def test_fused_attention_is_assumed_where_torch_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 3, 4)

    def fails(*args: Any, **options: Any) -> int:
        raise NotImplementedError

    monkeypatch.setattr(torch, "_fused_sdp_choice", fails)
    assert not native.has_fused_attention(q, q, q, None)
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert native.has_fused_attention(q, q, q, None)


def test_attention_computes_in_tiles_where_the_kernel_for_the_cpu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 8), np.float32)

    def run() -> np.ndarray[Any, Any]:
        with ow.Scheduler("torch:cpu") as scheduler:
            q = ow.input("q", x.shape)
            return np.asarray(scheduler.build(ow.attention(q, q, q, causal=True)).run(q=x))

    want = run()
    monkeypatch.setattr("opweave_torch.kernels.attention.flash_attention_on_cpu", lambda: None)
    np.testing.assert_allclose(run(), want, rtol=1e-5, atol=1e-6)
