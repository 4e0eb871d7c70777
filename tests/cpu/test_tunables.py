"""Kernels are right with whatever value of a tunable a machine measures."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opweave.contract import Tunable
from opweave.graph.tensor import Tensor
from opweave_cpu import CpuDevice
from opweave_cpu.tunables import TUNABLES, TUNABLES_OF_COMPILED

ALL = (*TUNABLES, *TUNABLES_OF_COMPILED)
CASES = [(tunable, value) for tunable in ALL for value in (tunable.choices[0], tunable.choices[-1])]


def operand(leaf: Tensor, seed: int) -> np.ndarray[Any, Any]:
    """Random values. Blocks are replaced by f16, which is converted in the same tiles."""
    dtype = np.float16 if leaf.dtype.is_quantized else leaf.dtype.numpy
    return np.random.default_rng(seed).standard_normal(leaf.shape).astype(dtype)


@pytest.mark.parametrize("jit", ["0", "1"], ids=["plain", "compiled"])
@pytest.mark.parametrize(("tunable", "value"), CASES, ids=[f"{tunable.name}-{value}" for tunable, value in CASES])
def test_results(
    apply: Callable[..., Any], tunable: Tunable, value: int, jit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those with the default, which the other tests compare with independent ones."""
    monkeypatch.setenv("OPWEAVE_CPU_JIT", jit)
    for node in tunable.samples()[:2]:
        assert node.op is not None
        srcs = [operand(leaf, seed) for seed, leaf in enumerate(node.srcs)]
        attrs = {name: given for name, given in node.attrs.items() if name != "blocks"}
        want = apply(node.op.name, np.empty(node.shape, np.float32), *srcs, **attrs)
        with monkeypatch.context() as patch:
            patch.setattr(tunable, "value", value)
            got = apply(node.op.name, np.empty(node.shape, np.float32), *srcs, **attrs)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_each_name_is_there_once() -> None:
    assert len({tunable.name for tunable in ALL}) == len(ALL)
    assert set(CpuDevice().tunables) <= set(ALL)
