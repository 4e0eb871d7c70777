"""Every kernel against the definition of its operation, over all types and layouts that the device accepts."""

import pytest

from opweave.graph.opdef import OPS
from opweave_conformance import CASES, Case
from opweave_cpu import CpuDevice
from opweave_cpu.decoded import DecodedType
from opweave_cpu.kernels import KERNELS
from opweave_cpu.kernels.half_products import linear_of_pairs
from opweave_cpu.kernels.integer_products import exact_linear_of_integers, linear_in_int8
from opweave_cpu.kernels.row_products import linear_of_some_rows
from tests.support.kernels import assert_right_where_accepted, by_operation


@pytest.mark.parametrize("cases", by_operation(CASES))
def test_kernels_of(device: CpuDevice, cases: list[Case]) -> None:
    assert_right_where_accepted(device, cases)


def test_every_operation_has_a_kernel() -> None:
    assert {name for name, op in OPS.items() if not op.is_view and op.family != "third-party"} <= KERNELS.ops()


def test_kernels_lie_where_their_operations_are_defined() -> None:
    for name in KERNELS.ops():
        for kernel in KERNELS.candidates(name):
            family = "decoded" if DecodedType in kernel.accepts else OPS[name].family
            if kernel.factory in (linear_in_int8, exact_linear_of_integers):
                family = "integer_products"
            elif kernel.factory is linear_of_some_rows:
                family = "row_products"
            elif kernel.factory is linear_of_pairs:
                family = "half_products"
            assert kernel.factory.__module__ == f"opweave_cpu.kernels.{family}"
