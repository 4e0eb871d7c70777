"""Which OpenCL devices are there, split into which sub-devices, and which of them were selected."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.contract import Kind
from opweave.errors import Unavailable, UnknownNameError
from opweave.packages import pip_install
from opweave_opencl.caching import keep_pyopencl_off_missing_home
from opweave_opencl.drivers import VENDORS, not_loaded, packaged, visible
from opweave_opencl.pocl import matching_library
from opweave_opencl.properties import describe, kind_of

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["PARTS", "SELECTION", "Found", "find_devices", "partition", "select"]

SELECTION: Final = "OPWEAVE_OPENCL_DEVICES"
"""Environment variable: numbers (``1``, ``0.1``), kinds or parts of names of devices, separated by commas."""

PARTS: Final = "OPWEAVE_OPENCL_SUBDEVICES"
"""Environment variable: into how many sub-devices each device is split, where its driver can."""


def _remedy() -> str:
    return (
        "install the OpenCL driver of your hardware's maker, or one that runs on the CPU: "
        f"{pip_install('opweave-opencl[pocl]')} (PoCL), or [intel] in place of [pocl] for newer processors"
    )


class Found(NamedTuple):
    """A device or a part of one.

    Attributes:
        id: ``"0"``, or ``"0.1"`` for the second part of that device.
        device: pyopencl's.
        whole: the device that it is a part of, or the device itself.
    """

    id: str
    device: cl.Device
    whole: cl.Device


def find_devices() -> list[Found]:
    """Every device of every platform, numbered in the drivers' order; those below OpenCL 1.2 are left out.

    Raises:
        Unavailable: pyopencl cannot be loaded, or there is no platform or no such device.
    """
    try:
        import pyopencl as cl
    except ImportError as error:
        raise Unavailable(f"pyopencl cannot be imported: {error}", remedy="pip install pyopencl") from error
    keep_pyopencl_off_missing_home()
    try:
        with matching_library(), visible(packaged()):
            platforms = cl.get_platforms()
            devices = [device for platform in platforms for device in _devices_of(platform)]
    except cl.Error as error:
        reasons = [f"{library}: {why}" for library, why in not_loaded(packaged()).items()]
        if chosen := os.environ.get(VENDORS):
            reasons.append(f"drivers are looked for only in {VENDORS}={chosen}")
        raise Unavailable("; ".join([f"there is no OpenCL platform: {error}", *reasons]), remedy=_remedy()) from error
    if not devices:
        names = ", ".join(p.name for p in platforms) or "no OpenCL platform"
        raise Unavailable(f"there is no OpenCL device (found: {names})", remedy=_remedy())
    found = [Found(str(number), device, device) for number, device in enumerate(devices) if _recent(device)]
    if not found:
        versions = "; ".join(f"{describe(device)}: {device.version.strip()}" for device in devices)
        raise Unavailable(f"no device has OpenCL 1.2 or newer ({versions})", remedy=_remedy())
    return found


def _devices_of(platform: cl.Platform) -> list[cl.Device]:
    import pyopencl as cl

    try:
        return platform.get_devices()
    except cl.Error:  # a platform whose hardware is not in this machine
        return []


def _recent(device: cl.Device) -> bool:
    """Whether it has OpenCL 1.2, with markers that wait, fills and partitions."""
    version = re.match(r"OpenCL (\d+)\.(\d+)", device.version)
    return version is not None and (int(version[1]), int(version[2])) >= (1, 2)


# --- selection ------------------------------------------------------------------------------------------------------


def select(found: Sequence[Found], wanted: str | None = None) -> list[Found]:
    """The selected devices; a number stays the same whatever else is selected.

    Args:
        found: all of them.
        wanted: the selection; ``None`` reads the environment, an empty one selects all.

    Raises:
        Unavailable: a part of the selection matches no device.
    """
    if wanted is None:
        wanted = os.environ.get(SELECTION, "")
    patterns = [p.strip().lower() for p in wanted.split(",") if p.strip()]
    if not patterns:
        return list(found)
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {f.id for f in found if _matches(pattern, f)}
        if not hits:
            there = "; ".join(f"{f.id}: {describe(f.device)}, {kind_of(f.device).value}" for f in found)
            names = [word for f in found for word in (describe(f.device), f.device.name.strip())]
            unknown = UnknownNameError("OpenCL device", pattern, {*names, *(kind_of(f.device).value for f in found)})
            raise Unavailable(
                f"{SELECTION}={wanted!r}: {unknown}\n  there are: {there}",
                remedy=f"set {SELECTION} to numbers, kinds or parts of these names, or unset it",
            ) from unknown
        chosen |= hits
    return [f for f in found if f.id in chosen]


def _matches(pattern: str, found: Found) -> bool:
    """Whether a part of a selection means a device: its number, its kind, or a part (or glob) of its name."""
    if re.fullmatch(r"\d+(\.\d+)?", pattern):
        return pattern in (found.id, found.id.partition(".")[0])
    if pattern.upper() in Kind.__members__:
        return kind_of(found.device) is Kind[pattern.upper()]
    name = describe(found.device).lower()
    return fnmatchcase(name, pattern) if any(c in pattern for c in "*?[") else pattern in name


# --- parts ----------------------------------------------------------------------------------------------------------


def partition(found: Sequence[Found], parts: str | None = None) -> list[Found]:
    """Each device split into equal sub-devices; a device that cannot be split stays whole.

    Args:
        parts: how many; ``None`` reads the environment, an empty text splits nothing.

    Raises:
        Unavailable: not a number above 0, or no device can be split into so many.
    """
    if parts is None:
        parts = os.environ.get(PARTS, "")
    if not parts.strip():
        return list(found)
    if not parts.strip().isdecimal() or int(parts) < 1:
        raise Unavailable(f"{PARTS}={parts!r} is no number of parts", remedy=f"set {PARTS} to a number, or unset it")
    count = int(parts)
    if count == 1:
        return list(found)
    result: list[Found] = []
    reasons: list[str] = []
    for whole in found:
        split = _split(whole.device, count)
        if isinstance(split, str):
            reasons.append(f"{whole.id}: {describe(whole.device)}: {split}")
            result.append(whole)
        else:
            result += [Found(f"{whole.id}.{i}", device, whole.device) for i, device in enumerate(split)]
    if len(reasons) == len(found):
        raise Unavailable(
            f"{PARTS}={count}: no device can be cut into {count} parts ({'; '.join(reasons)})",
            remedy=f"lower {PARTS}, or unset it",
        )
    return result


def _split(device: cl.Device, count: int) -> list[cl.Device] | str:
    """``count`` sub-devices with about as many compute units each, or why there are none."""
    import pyopencl as cl

    kind = cl.device_partition_property
    units = device.max_compute_units
    if units < count:
        return f"it has {units} compute units"
    if device.partition_max_sub_devices < count:
        return "its driver does not cut it into so many"
    kinds: Any = device.partition_properties
    try:
        if kind.BY_COUNTS in kinds:
            counts = [units // count + (i < units % count) for i in range(count)]
            properties: list[Any] = [kind.BY_COUNTS, *counts, kind.BY_COUNTS_LIST_END]
            return device.create_sub_devices(properties)
        if kind.EQUALLY in kinds:
            properties = [kind.EQUALLY, units // count]
            return device.create_sub_devices(properties)[:count]
    except cl.Error as error:
        return str(error)
    return "its driver does not cut it"
