"""Every operation in a sample of its cases: right where accepted, and accepted on f32.

Building programs takes most of the time, so other types are tested with some operations only, and where several drivers
work each case is run on one of them. ``opweave conformance opencl`` tests all cases.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

from opweave.graph.opdef import OPS
from opweave.ops.encoding import OF_ENTRIES
from opweave_conformance import CASES, Case
from opweave_opencl import OpenCLDevice
from opweave_opencl.kernels import KERNELS
from opweave_opencl.tuning import Tuning
from tests.support.kernels import assert_right, by_operation
from tests.support.opencl import DEVICES, as_gpu

RUNS = {name for name, op in OPS.items() if not op.is_view and op.family != "third-party"} - {"custom"}
SHARING = {
    *("add", "arange", "argmax", "argsort", "cumsum", "embedding", "head_softmax", "im2col", "index_add", "layer_norm"),
    *("linear", "matmul", "max", "mean", "pad", "rms_norm", "softmax", "sum", "take_along_axis", "tril", "var"),
}
"""Operations whose work-items share rows or tiles, or load fewer elements, where there are many of them."""
GROUPED = Tuning(vector=4, group=64, row_vector=1, row_group=64, tiled=True)
"""How kernels are built for GPUs; every driver runs them so, only not as fast."""


def is_f32(case: Case) -> bool:
    return all(x.dtype == "f32" or x.values == "ids" for x in case.operands)


def sample() -> list[Case]:
    """Some cases of each operation on f32, and one of every so many combinations of an operation with other types."""
    kinds: dict[Any, list[Case]] = {}
    for case in CASES:
        if case.op in RUNS:
            types = () if is_f32(case) else tuple(x.dtype for x in case.operands)
            kinds.setdefault((case.op, types), []).append(case)
    # Random numbers have keys for operands, and none in f32.
    chief = {op: types for (op, types) in reversed(kinds) if not types or (op, ()) not in kinds}
    chosen = [case for (op, types), cases in kinds.items() if types == chief[op] for case in cases[::9]]
    others = [cases[n % len(cases)] for n, ((op, types), cases) in enumerate(kinds.items()) if types != chief[op]]
    return chosen + others[::7]


SAMPLE = sample()


def shared_out(cases: list[Case], device: OpenCLDevice) -> list[Case]:
    """The cases of an operation that this driver runs: one at least."""
    place = [one.id for one in DEVICES].index(device.id)  # `grouped` is another object
    return cases[place :: len(DEVICES)] or cases[:1]


@pytest.fixture(scope="session")
def grouped(device) -> OpenCLDevice:
    return as_gpu(device, GROUPED)


def test_the_table_has_every_operation_but_functions_in_python():
    assert KERNELS.ops() == RUNS


def test_the_sample_has_every_operation_and_every_type():
    assert {case.op for case in SAMPLE} == RUNS
    assert {x.dtype for case in SAMPLE for x in case.operands} == {x.dtype for case in CASES for x in case.operands}


def test_kernels_name_the_arrays_of_their_scratch_memory():
    factories = [kernel.factory for op in KERNELS.ops() for kernel in KERNELS.candidates(op)]
    assert [f.__name__ for f in factories if "workspace" in signature(f).parameters] == []


@pytest.mark.parametrize("cases", by_operation(SAMPLE))
def test_accepted_is_right_and_f32_is_accepted(device, cases):
    cases = shared_out(cases, device)
    results = assert_right(device, cases)
    for case, result in zip(cases, results, strict=True):
        if result.status == "refused":
            assert result.reason
            # Experts and rows to quantize are read whole; the scheduler packs others, by the device's own copy.
            packed = case.op in ("expert_linear", "quantize") and "have gaps" in result.reason
            # To entries of codebooks the CPU encodes.
            entries = case.op == "quantize" and result.reason.startswith(
                tuple(f"the output is {t}," for t in OF_ENTRIES)
            )
            assert not is_f32(case) or case.op == "cast" or packed or entries, f"{result.id}: {result.reason}"


@pytest.mark.parametrize("cases", by_operation([c for c in CASES if c.op in SHARING and is_f32(c)][::11]))
def test_work_groups_that_share_rows_and_tiles(grouped, cases):
    assert_right(grouped, shared_out(cases, grouped))
