"""No bare number decides which path of a kernel runs: such numbers are limits, which the conformance suite sets."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

import pytest

from tests.support.bare_numbers import bare, bare_numbers

NUMBERS: Final[Mapping[str, Mapping[tuple[str, str], str]]] = {
    "opweave_cpu": {
        ("jit/integer_products.py", "8"): "bytes of a type",
        ("jit/activations.py", "1 << 31"): "the range of i32",
        ("jit/activations.py", "15"): "the largest value of 4 bits",
        ("jit/argmax.py", "1 << 31"): "the range of i32",
        ("jit/argmax.py", "LANES"): "lanes of a register",
        ("jit/batched_products.py", "LANES"): "lanes of a register",
        ("jit/blocks.py", "4"): "scales that have their bits in one byte",
        ("jit/compiler.py", "TOGETHER"): "how many functions are compiled at a time",
        ("jit/grouped_products.py", "LANES"): "lanes of a register",
        ("jit/integer_products.py", "LANES"): "lanes of a register",
        ("jit/integers.py", "15"): "the largest value of 4 bits",
        ("jit/integers.py", "BYTES"): "bytes of a register",
        ("jit/transpose.py", "LANES"): "lanes of a register",
        ("jit/writer.py", "LANES"): "lanes of a register",
        ("kernels/half_products.py", "16"): "rows of weights in a register",
        ("kernels/integer_products.py", "16"): "rows of weights in a register",
        ("kernels/sorting.py", "PART"): "read while it runs: how many values are candidates decides, not a size",
    },
    "opweave_opencl": {
        ("clock.py", "_SLACK"): "how far clocks differ",
        ("health.py", "RETRY"): "a time",
        ("health.py", "SLOW"): "a time",
        ("kernel_objects.py", "KNOWN"): "a version",
        ("kernels/argmax.py", "1 << 31"): "the range of i32",
        ("kernels/arrangement.py", "1 << 63"): "the range of i64",
        ("kernels/attention.py", "LARGEST"): "larger ones are refused",
        ("kernels/linalg.py", "MOST_ROWS"): "larger ones are refused",
        ("kernels/linear_attention.py", "MOST_ROWS"): "larger ones are refused",
        ("kernels/movement.py", "BLOCK"): "elements of a register",
        ("kernels/normalization.py", "3"): "how many operands there are",
        ("kernels/pointwise.py", "4"): "bytes of a type",
        ("kernels/pointwise.py", "8"): "lengths of groups are powers of eight",
        ("kernels/products.py", "24 << 10"): "local memory that tiles fill",
        ("kernels/products.py", "4"): "bytes of a type, and columns of a register",
        ("kernels/products.py", "COLUMNS"): "columns of a panel",
        ("kernels/rope.py", "MOST_PARTS"): "more are refused",
        ("kernels/sorting.py", "MOST"): "the range of i32",
        ("kernels/state_space.py", "4"): "lanes of a register",
        ("kernels/state_space.py", "MOST_STATES"): "larger ones are refused",
        ("probe.py", "100"): "the numbers of the trial",
        ("probe.py", "_N"): "the numbers of the trial",
        ("probe.py", "_X"): "the numbers of the trial",
        ("stream.py", "MANY"): "when memory of the driver becomes free",
        ("subgroups.py", "3"): "a version",
        ("tuning.py", "256"): "work-items that tiles need",
    },
    "opweave_ort": {
        ("device.py", "SWITCH_FLOPS"): "where a step is placed",
        ("doctor.py", "NEWEST_MAJOR"): "a version",
        ("kernels/experts.py", "4"): "bytes of a type",
        ("model.py", "4"): "bytes of a type",
        ("providers.py", "OLDEST"): "a version",
    },
    "opweave_torch": {
        ("accelerator.py", "8"): "a version of hardware",
        ("collectives.py", "BF16"): "a version",
        ("device.py", "SWITCH_FLOPS"): "where a step is placed",
        ("frontend/runner.py", "SMALL"): "which constants are weights",
        ("frontend/source.py", "3"): "words of a message",
        ("frontend/updates.py", "3"): "how many arguments there are",
        ("health.py", "3"): "a part of a name",
        ("kernels/activation.py", "3"): "single elements, which torch leaves to its own loop",
        ("kernels/encoding.py", "120"): "the largest scale of a type",
        ("kernels/encoding.py", "6"): "the smallest scale of a type",
        ("kernels/encoding.py", "EQUAL"): "which values are equal",
        ("kernels/interpolation.py", "1 << 24"): "the whole numbers of f32",
        ("kernels/rope.py", "4"): "bytes of a type",
        ("packed.py", "1 << 14"): "whether a copy of weights pays",
        ("packed.py", "1 << 18"): "whether a copy of weights pays",
        ("packed.py", "1 << 19"): "whether a copy of weights pays",
        ("packed.py", "1 << 21"): "whether a copy of weights pays",
        ("packed.py", "MOST_INT4_ROWS"): "whether a copy of weights pays",
    },
}
"""By package: file and number of what is compared with and is no choice by size, and what it is instead."""


def test_the_scan_sees_numbers_and_lets_limits_pass():
    assert bare("if n > LONGEST and k <= 8 and m < 1 << 20: pass") == {"LONGEST", "8", "1 << 20"}
    assert bare("if n > LONGEST.value or x.nbytes >= 4 * SPREAD.value or n > 1: pass") == set()


@pytest.mark.parametrize("package", NUMBERS)
def test_numbers_that_decide_between_paths_are_declared(package):
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    found = bare_numbers(spec.submodule_search_locations[0])
    assert found - NUMBERS[package].keys() == set(), "make it a limit()"
    assert NUMBERS[package].keys() - found == set(), "no reason outlives its number"
