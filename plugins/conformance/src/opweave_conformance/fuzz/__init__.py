"""Random graphs on any devices, compared with the references: ``opweave fuzz``, see ``docs/conformance.md``.

The scripts that it writes use `Leaves`, `apply`, `check`, `functions` and `tune`.
"""

from opweave_conformance.fuzz import functions
from opweave_conformance.fuzz.check import Mismatch, apply, check, tune
from opweave_conformance.fuzz.leaves import Leaves

__all__ = ["Leaves", "Mismatch", "apply", "check", "functions", "tune"]
