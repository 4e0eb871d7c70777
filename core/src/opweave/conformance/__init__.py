"""The conformance suite: checks that a device computes correctly whatever it accepts, see ``docs/conformance.md``.

A single case can be run on any device::

    from opweave.conformance import CASES, run_case

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_kernel(device, case):
        result = run_case(device, case)
        if result.status == "refused":
            pytest.skip(result.reason)
        assert result, result.reason
"""

from opweave.conformance.case import Case, Operand
from opweave.conformance.cases import CASES, cases_for
from opweave.conformance.check import run_case
from opweave.conformance.limits import Limits, limits
from opweave.conformance.result import Result

__all__ = ["CASES", "Case", "Limits", "Operand", "Result", "cases_for", "limits", "run_case"]
