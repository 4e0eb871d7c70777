"""Python functions as steps: they see their sources and keep their promise, or the step fails by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opweave.errors import DTypeError, ShapeError
from opweave.graph.dtypes import as_dtype

Array = np.ndarray[Any, Any]
Apply = Callable[..., Array]
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def run(apply: Apply, fn: Callable[..., Any]) -> Array:
    return apply("custom", np.zeros((2, 3), np.float32), X, fn=fn, shape=(2, 3), dtype=as_dtype("f32"))


def test_a_result_is_converted_to_the_promised_type(apply: Apply) -> None:
    np.testing.assert_array_equal(run(apply, lambda x: x.astype(np.int64) * 2), X * 2)


def test_sources_cannot_be_written(apply: Apply) -> None:
    def spoil(x: Array) -> Array:
        x[0] = 7
        return x

    with pytest.raises(Exception, match="read-only"):
        run(apply, spoil)


def test_a_result_of_another_shape_is_refused(apply: Apply) -> None:
    with pytest.raises(Exception, match=r"returned shape \(6,\), not \(2, 3\)") as caught:
        run(apply, lambda x: x.ravel())
    assert isinstance(caught.value.__cause__, ShapeError)


def test_a_result_that_is_no_real_numbers_is_refused(apply: Apply) -> None:
    with pytest.raises(Exception, match="complex128") as caught:
        run(apply, lambda x: x.astype(np.complex128))
    assert isinstance(caught.value.__cause__, DTypeError)
