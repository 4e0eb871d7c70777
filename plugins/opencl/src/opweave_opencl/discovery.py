"""Which OpenCL devices are here, and which of them were selected."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from opweave.contract import Kind
from opweave.errors import Unavailable

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["SELECTION", "describe", "find_devices", "hardware_id", "kind_of", "select"]

SELECTION: Final = "OPWEAVE_OPENCL_DEVICES"
"""Environment variable: numbers of devices or globs over their descriptions, separated by commas."""

_REMEDY: Final = (
    "install the OpenCL driver of your hardware's maker, or PoCL, a driver that runs on the CPU: "
    "pip install 'opweave-opencl[pocl]'"
)


def find_devices() -> list[cl.Device]:
    """Every device of every platform, in the driver's order.

    Raises:
        Unavailable: pyopencl cannot be loaded, or there is no platform or no device.
    """
    try:
        import pyopencl as cl
    except ImportError as error:
        raise Unavailable(f"pyopencl cannot be imported: {error}", remedy="pip install pyopencl") from error
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise Unavailable(f"there is no OpenCL platform: {error}", remedy=_REMEDY) from error
    found: list[cl.Device] = []
    for platform in platforms:
        try:
            found += platform.get_devices()
        except cl.Error:  # a platform whose hardware is not in this machine
            continue
    if not found:
        names = ", ".join(p.name for p in platforms) or "no OpenCL platform"
        raise Unavailable(f"there is no OpenCL device (found: {names})", remedy=_REMEDY)
    return found


def select(devices: list[cl.Device], wanted: str | None = None) -> list[tuple[int, cl.Device]]:
    """The selected devices with their numbers; a number stays the same whatever else is selected.

    Args:
        devices: all of them.
        wanted: the selection; ``None`` reads the environment, an empty one selects all.

    Raises:
        Unavailable: a part of the selection matches no device.
    """
    if wanted is None:
        wanted = os.environ.get(SELECTION, "")
    patterns = [p.strip().lower() for p in wanted.split(",") if p.strip()]
    numbered = list(enumerate(devices))
    if not patterns:
        return numbered
    chosen: set[int] = set()
    for pattern in patterns:
        hits = {n for n, d in numbered if pattern == str(n) or fnmatchcase(describe(d).lower(), pattern)}
        if not hits:
            there = "; ".join(f"{n}: {describe(d)}" for n, d in numbered)
            raise Unavailable(
                f"{SELECTION}={wanted!r}: {pattern!r} matches no device of {there}",
                remedy=f"set {SELECTION} to numbers or globs of these descriptions, or unset it",
            )
        chosen |= hits
    return [(n, d) for n, d in numbered if n in chosen]


def describe(device: cl.Device) -> str:
    """Name and platform of a device."""
    return f"{device.name.strip()} ({device.platform.name.strip()})"


def kind_of(device: cl.Device) -> Kind:
    """The sort of hardware, by the device's type and whether it shares the host's memory."""
    import pyopencl as cl

    if device.type & cl.device_type.GPU:
        return Kind.IGPU if device.host_unified_memory else Kind.GPU
    return Kind.CPU if device.type & cl.device_type.CPU else Kind.ACCEL


def hardware_id(device: cl.Device) -> str | None:
    """The PCI address, as ``0000:01:00.0``, where the driver tells it."""
    import pyopencl as cl

    extensions = device.extensions.split()
    try:
        if "cl_nv_device_attribute_query" in extensions:
            slot = device.pci_slot_id_nv
            return f"0000:{device.pci_bus_id_nv:02x}:{slot >> 3:02x}.{slot & 7}"
        if "cl_amd_device_attribute_query" in extensions:
            place = device.topology_amd
            return f"0000:{place.bus & 0xFF:02x}:{place.device:02x}.{place.function}"
    except (cl.Error, AttributeError):
        pass
    return None
