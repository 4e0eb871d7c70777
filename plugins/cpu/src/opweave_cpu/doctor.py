"""Checks for ``opweave doctor``: the BLAS that multiplies, and the kernel that it chose."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from opweave.registry import Diagnosis
from opweave.runtime.host.processor import cpu_name
from opweave.runtime.stream import ARTEFACTS_KEPT
from opweave_cpu.hardware import instruction_sets
from opweave_cpu.jit.compiler import target, why_not

__all__ = ["diagnose", "kernel_diagnosis"]

CORETYPE: Final = "OPENBLAS_CORETYPE"
"""Environment variable that makes OpenBLAS use the kernels for the processor it names, whichever is there."""

_SETS: Final = ("sse", "avx", "avx2", "avx512")

_OLDER: Final = "prescott core2 penryn dunnington atom nehalem athlon opteron opteron_sse3 barcelona bobcat generic"
_KERNELS: Final[Mapping[str, int]] = {
    **dict.fromkeys(_OLDER.split(), 0),
    **dict.fromkeys("sandybridge bulldozer piledriver steamroller excavator".split(), 1),  # noqa: SIM905
    **dict.fromkeys("haswell zen".split(), 2),  # noqa: SIM905
    **dict.fromkeys("skylakex cooperlake sapphirerapids".split(), 3),  # noqa: SIM905
}
"""OpenBLAS's names of its kernels for x86, in lower case -> the index in `_SETS` of the instructions that they use."""


def diagnose() -> Iterator[Diagnosis]:
    """Diagnoses of the kernel of each BLAS in the process, and of compiled kernels."""
    from threadpoolctl import threadpool_info

    libraries = [info for info in threadpool_info() if info["user_api"] == "blas"]
    if not libraries:
        yield Diagnosis("BLAS", "ok", "NumPy's BLAS is unknown to threadpoolctl")
    for info in libraries:
        yield kernel_diagnosis(info, instruction_sets())
    if why_not() is None:
        message = f"{target().loaded} in memory; beside those of open programs a device keeps the latest"
        yield Diagnosis("compiled kernels", "ok", f"{message} {ARTEFACTS_KEPT}")


def kernel_diagnosis(info: Mapping[str, Any], instructions: Sequence[str]) -> Diagnosis:
    """Whether a BLAS multiplies with the widest instructions that the processor has.

    Args:
        info: what threadpoolctl reports of the library.
        instructions: sets that the processor has.
    """
    kernel = str(info.get("architecture") or "")
    library = f"{info['internal_api']} {info.get('version') or ''}".strip()
    uses, has = _KERNELS.get(kernel.lower()), _best(instructions)
    forced = os.environ.get(CORETYPE)
    variable = f", {CORETYPE}={forced} is in force" if forced else ""
    if uses is None or uses >= has:
        return Diagnosis("BLAS", "ok", f"{library}, {f'kernel {kernel}' if kernel else 'kernel unknown'}{variable}")
    message = (
        f"{library} multiplies with its kernel {kernel} ({_SETS[uses]}), but {cpu_name()} has {_SETS[has]}{variable}: "
        "products take up to twice as long"
    )
    remedy = f"unset {CORETYPE}" if forced else "pip install --upgrade numpy, whose BLAS knows newer processors"
    return Diagnosis("BLAS", "slow", message, remedy)


def _best(instructions: Sequence[str]) -> int:
    """The index in `_SETS` of the widest set that the processor has."""
    if "avx512f" in instructions and "avx512bw" in instructions:
        return 3
    return 2 if "avx2" in instructions and "fma" in instructions else 1 if "avx" in instructions else 0
