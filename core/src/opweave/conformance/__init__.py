"""Checking that a device keeps its word: what it accepts it gets right.

::

    from opweave.conformance import CASES, run_case

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_kernel(device, case):
        verdict = run_case(device, case)
        if verdict.status == "refused":
            pytest.skip(verdict.reason)
        assert verdict, verdict.reason
"""

from opweave.conformance.case import Case, Operand
from opweave.conformance.cases import CASES, cases_for
from opweave.conformance.check import Verdict, run_case
from opweave.conformance.limits import Limits, limits

__all__ = ["CASES", "Case", "Limits", "Operand", "Verdict", "cases_for", "limits", "run_case"]
