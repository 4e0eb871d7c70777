"""The conformance suite: checks that a device computes correctly whatever it accepts, see ``docs/conformance.md``; and
`compare`, which runs a graph on two devices and compares every node.

A single case can be run on any device::

    from opweave_conformance import CASES, run_case

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_kernel(device, case):
        result = run_case(device, case)
        if result.status == "refused":
            pytest.skip(result.reason)
        assert result, result.reason
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opweave_conformance.case import Case, Operand
    from opweave_conformance.cases import CASES, cases_for
    from opweave_conformance.check import run_case
    from opweave_conformance.device_comparison import compare
    from opweave_conformance.result import Result
    from opweave_conformance.tolerances import Limits, limits

__all__ = ["CASES", "Case", "Limits", "Operand", "Result", "cases_for", "compare", "limits", "run_case"]

# pytest imports the package in every run: what it exports is imported when it is first asked for.
_MODULES = {
    "CASES": "cases", "Case": "case", "Limits": "tolerances", "Operand": "case", "Result": "result",
    "cases_for": "cases", "compare": "device_comparison", "limits": "tolerances", "run_case": "check",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
