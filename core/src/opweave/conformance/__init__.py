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

from typing import TYPE_CHECKING, Any

from opweave.conformance.case import Case, Operand
from opweave.conformance.check import run_case
from opweave.conformance.limits import Limits, limits
from opweave.conformance.result import Result

if TYPE_CHECKING:
    from opweave.conformance.cases import CASES, cases_for

__all__ = ["CASES", "Case", "Limits", "Operand", "Result", "cases_for", "limits", "run_case"]


def __getattr__(name: str) -> Any:
    if name not in ("CASES", "cases_for"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from opweave.conformance import cases  # making them takes a second, which what runs one script can spare

    return getattr(cases, name)
