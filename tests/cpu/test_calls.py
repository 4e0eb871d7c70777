"""Compiled steps: they do as little as possible besides the array operation itself."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from opweave_cpu.tiles import for_rows

X = np.ones(16, np.float32)


@pytest.mark.parametrize(
    ("op", "ufunc"), [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide)]
)
def test_arithmetic_is_a_bare_ufunc_with_everything_in_place(
    bind: Callable[..., Any], op: str, ufunc: np.ufunc
) -> None:
    call = bind(op, X, X, X)
    assert type(call) is partial
    assert call.func is ufunc
    assert [type(a) for a in call.args] == [np.ndarray] * 3
    assert not call.keywords


@pytest.mark.parametrize(
    ("op", "ufunc"),
    [
        ("neg", np.negative),
        ("exp", np.exp),
        ("log", np.log),
        ("sqrt", np.sqrt),
        ("tanh", np.tanh),
        ("relu", np.maximum),
    ],
)
def test_functions_of_one_pass_are_a_bare_ufunc(bind: Callable[..., Any], op: str, ufunc: np.ufunc) -> None:
    call = bind(op, X, X)
    assert type(call) is partial
    assert call.func is ufunc


@pytest.mark.parametrize(("scale", "bias", "ufunc"), [(2.0, 0.0, np.multiply), (1.0, 3.0, np.add)])
def test_scale_is_one_pass_where_one_is_enough(
    bind: Callable[..., Any], scale: float, bias: float, ufunc: np.ufunc
) -> None:
    assert bind("scale", X, X, scale=scale, bias=bias).func is ufunc


def test_products_go_straight_to_blas(bind: Callable[..., Any]) -> None:
    a = np.ones((8, 8), np.float32)
    call = bind("matmul", a, a, a)
    assert call.func.__name__ == "dot"


def test_leading_axes_of_a_product_become_rows_of_one(bind: Callable[..., Any]) -> None:
    x, w, out = np.ones((4, 3, 8), np.float32), np.ones((5, 8), np.float32), np.ones((4, 3, 5), np.float32)
    call = bind("linear", out, x, w)
    assert call.func.__self__.shape == (12, 8)


@pytest.mark.parametrize(("row", "size"), [(100, None), (512, 512), (5000, None)])
def test_passes_over_rows_have_buffers_of_their_own(row: int, size: int | None) -> None:
    sizes, before = [], np.getbufsize()
    for_rows(lambda: sizes.append(np.getbufsize()), row)()
    assert sizes == [size or before]
    assert np.getbufsize() == before


@pytest.mark.parametrize("rows", [64, 256])  # one tile, and several
def test_norms_go_without_buffers(monkeypatch: pytest.MonkeyPatch, apply: Callable[..., Any], rows: int) -> None:
    x, sizes, vecdot = np.ones((rows, 512), np.float32), [], np.vecdot

    def noted(*args: Any) -> Any:
        sizes.append(np.getbufsize())
        return vecdot(*args)

    monkeypatch.setattr(np, "vecdot", noted)
    np.testing.assert_allclose(apply("rms_norm", x, x, eps=0.0), 1, rtol=1e-6)
    assert set(sizes) == {512}
