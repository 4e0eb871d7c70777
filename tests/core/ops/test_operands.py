"""Helpers of the builders that kernels use too."""

from __future__ import annotations

import pytest

from opweave.graph.dtypes import i32
from opweave.graph.layout import broadcast_strides, dense_strides
from opweave.ops.operands import optional_operands
from opweave.ops.rope import distinct_positions


@pytest.mark.parametrize(
    ("rest", "has_first", "want"),
    [
        ([], False, (None, None)),
        (["mask"], True, ("mask", None)),
        (["sinks"], False, (None, "sinks")),
        (["mask", "sinks"], True, ("mask", "sinks")),
    ],
)
def test_the_flag_says_which_optional_operand_is_given(
    rest: list[str], has_first: bool, want: tuple[str | None, str | None]
) -> None:
    assert optional_operands(rest, has_first) == want


def test_positions_that_are_repeated_count_once() -> None:
    strides = broadcast_strides((5,), dense_strides((5,), i32), (2, 3, 5))
    assert distinct_positions((2, 3, 5), strides, ()) == (1, 1, 5)


def test_sections_are_rows_of_their_own_even_where_they_are_repeated() -> None:
    strides = broadcast_strides((5,), dense_strides((5,), i32), (2, 3, 5))
    assert distinct_positions((2, 3, 5), strides, (1, 1)) == (2, 1, 5)
