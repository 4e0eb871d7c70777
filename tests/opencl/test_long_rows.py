"""Long rows: what is added up keeps its small addends, however many there are and in whatever lines they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import opweave as ow
from tests.support.rounding import nmse

EPS: Final = 1e-5


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS)


def group_norm(x: ow.Tensor) -> ow.Tensor:
    """Of one group whose channels have one element each."""
    return ow.reshape(ow.group_norm(ow.reshape(x, (1, x.shape[-1], 1)), groups=1, eps=EPS), x.shape)


OPERATIONS: Final[dict[str, tuple[Callable[[ow.Tensor], ow.Tensor], Callable[[Any], Any]]]] = {
    "softmax": (ow.softmax, softmax),
    "layer_norm": (lambda x: ow.layer_norm(x, eps=EPS), layer_norm),
    "group_norm": (group_norm, layer_norm),
    "rms_norm": (lambda x: ow.rms_norm(x, eps=EPS), lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)),
    "l2_norm": (ow.l2_norm, lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True))),
    "sum": (lambda x: ow.sum(ow.square(x), -1), lambda x: (x * x).sum(-1)),
    "columns": (lambda x: ow.sum(ow.square(ow.reshape(x, (x.shape[-1], 1))), 0), lambda x: (x * x).sum(-1)),
    "cumsum": (lambda x: ow.cumsum(x, -1), lambda x: x.cumsum(-1)),
}


def computed(device: ow.Device, build: Callable[[ow.Tensor], ow.Tensor], x: Any) -> Any:
    return ow.compile(build(ow.input("x", x.shape, "f32")), devices=[device])(x=x)


@pytest.mark.parametrize("length", [1 << 17, (1 << 20) - 1, 1 << 20, (1 << 22) + 1])
@pytest.mark.parametrize("op", OPERATIONS)
def test_of_one_row(device, op, length):
    build, truth = OPERATIONS[op]
    x = np.random.default_rng(length).standard_normal((1, length)).astype(np.float32)
    assert nmse(computed(device, build, x), truth(x.astype(np.float64))) < 2e-13


@pytest.mark.parametrize("at", [0, 40, 3000])
def test_an_infinity_stays_one_in_all_sums_after_it(device, at):
    x = np.ones((2, 4000), np.float32)
    x[0, at], x[1, at] = np.inf, -np.inf
    np.testing.assert_array_equal(computed(device, lambda x: ow.cumsum(x, -1), x), x.cumsum(-1))
