"""`Subgroups`: whether the work-items of a group combine their results in the device's sub-groups.

Work-items of a sub-group run together and exchange numbers in registers. Where they share a row, that replaces most
steps of a combination in local memory, each of which ends with a barrier. Drivers have it as ``cl_khr_subgroups``, as
``cl_intel_subgroups`` or as a feature of OpenCL C 3.0; some list it for a device whose compiler does not build it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave.contract import Tunable
from opweave.graph.opdef import build
from opweave.graph.tensor import Tensor
from opweave.ops.attention import attention
from opweave.ops.samples import operand, weight
from opweave_opencl.health import why_failing
from opweave_opencl.probe import Case, Tell, Trial, Verdict, tried
from opweave_opencl.program import source
from opweave_opencl.tuning import shared_group

if TYPE_CHECKING:
    import pyopencl as cl

    from opweave_opencl.caching import BinaryCache

__all__ = ["HALVES", "IN_SUBGROUPS", "SOURCE", "VARIABLE", "Subgroups", "in_process", "listed"]

VARIABLE: Final = "OPWEAVE_OPENCL_SUBGROUPS"
"""Environment variable: ``1``: sub-groups are used on each device on which they work, ``0``: on none; else as
`opweave profile` has found, and before it on each device on which they work."""

SOURCE: Final = "subgroups.cl"

HALVES: Final = 1
"""The value of the tunable for results that are combined by halves in local memory."""

IN_SUBGROUPS: Final = 2
"""The value of the tunable for results that are combined in sub-groups first."""

_FEATURE: Final = "__opencl_c_subgroups"
_EXTENSIONS: Final = "cl_khr_subgroups", "cl_intel_subgroups"


class Subgroups:
    """Whether sub-groups of one device are used, and by which option its compiler has their functions.

    They are tried when the first kernel asks, in a process of its own where one can be started, as the device itself
    is (`opweave_opencl.probe`); the outcome is remembered likewise.

    Args:
        device: pyopencl's.
        answers: where that is remembered; ``None``: in the user's cache folder.

    Attributes:
        tunable: whether they are faster, which `opweave profile` measures.
    """

    def __init__(self, device: cl.Device, answers: BinaryCache | None = None) -> None:
        self._device: Final = device
        self._answers: Final = answers
        self.tunable: Final = Tunable("reduction_variant", IN_SUBGROUPS, (HALVES, IN_SUBGROUPS), _samples)

    @cached_property
    def listed(self) -> str:
        """The extension or feature by which the device has them; ``""``: it has none."""
        return listed(self._device)

    @cached_property
    def _tried(self) -> tuple[str | None, str]:
        """The compiler's option with which they work, or ``None`` and why they do not with the first one."""
        why = ""
        for option in _options(self._device):
            trial = Trial("opweave_opencl.subgroups:in_process", (option,))
            failure = why_failing(self._device, trial, (source(SOURCE), source("combining.cl")), self._answers)
            if failure is None:
                return option, ""
            why = why or failure
        return None, why

    def macros(self) -> Mapping[str, str]:
        """The macro ``SUBGROUPS`` of ``combining.cl`` where they are used, or nothing."""
        return {} if self.why_not() else {"SUBGROUPS": self._tried[0] or ""}

    def why_not(self) -> str:
        """Why they are not used, ``""``: they are."""
        wish = os.environ.get(VARIABLE, "")
        if not self.listed:
            return "the driver lists none"
        if wish == "0":
            return f"{VARIABLE}=0"
        if wish != "1" and self.tunable.value == HALVES:
            return "local memory was measured to be faster"
        why = self.why_failing()
        return why and f"{self.listed} is listed, but {why}"

    def why_failing(self) -> str:
        """Why they do not work although the driver lists them, ``""``: they work, or are not listed."""
        return self._tried[1] if self.listed else ""


def listed(device: cl.Device) -> str:
    """The extension or feature by which a device has sub-groups; ``""``: it has none."""
    extensions = device.extensions.split()
    found = next((name for name in _EXTENSIONS if name in extensions), "")
    return found or (_FEATURE if _FEATURE in _features(device) else "")


def _features(device: cl.Device) -> list[str]:
    """The optional features of OpenCL C 3.0 that a device has."""
    import pyopencl as cl

    try:
        return [str(feature.name) for feature in device.opencl_c_features]
    except (cl.Error, AttributeError):  # of OpenCL before 3.0
        return []


def _options(device: cl.Device) -> list[str]:
    """The compiler's options with which sub-groups are tried, in order. By default a compiler takes OpenCL C 1.2, in
    which ``cl_khr_subgroups`` need not have functions."""
    version = re.search(r"(\d+)\.\d+", device.opencl_c_version)
    major = int(version[1]) if version else 1
    return ["", *(["-cl-std=CL3.0"] if major >= 3 else []), *(["-cl-std=CL2.0"] if major >= 2 else [])]


def _samples() -> list[Tensor]:
    rows = operand(512, 1024)
    heads = operand(1, 16, 1, 64), operand(1, 16, 1024, 64)
    products = [build("linear", operand(1, 2048), weight(2048, 2048, dtype=dtype)) for dtype in ("f32", "q8_0")]
    return [
        build("softmax", rows), build("layer_norm", rows, operand(1024), operand(1024)), build("argmax", rows, 1),
        *products, attention(heads[0], heads[1], heads[1]),
    ]  # fmt: skip


# --- trying them ----------------------------------------------------------------------------------------------------


def in_process(device: cl.Device, option: str, tell: Tell = lambda doing: None) -> Verdict:
    """Try sub-groups in this process, with an option of the compiler: sums, largest and smallest numbers of groups,
    some of which have infinities and NaN."""
    group = shared_group(device)
    macros = f"#define GROUP {group}\n#define SUBGROUPS {option}\n"
    types = {"f32": np.float32, "i32": np.int32, "i64": np.int64}
    if "cl_khr_fp64" in device.extensions.split():
        types["f64"] = np.float64
    cases = {f"combine_{name}": _case(group, np.dtype(dtype)) for name, dtype in types.items()}
    return tried(device, macros + source(SOURCE), cases, tell, option)


def _case(group: int, dtype: np.dtype[Any]) -> Case:
    x = (np.arange(4 * group) * 37 % 199 - 99).reshape(4, group).astype(dtype)
    if dtype.kind == "f":
        x[1, group // 3], x[2, group // 2], x[3, -1] = np.inf, np.nan, -np.inf
    elif dtype.itemsize == 8:
        x[1:] <<= 40
    right = np.stack([x.sum(1, dtype), x.max(1), x.min(1)], 1)
    return Case((x,), np.repeat(right, group, 0).ravel(), group, 4)
