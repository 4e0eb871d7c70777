"""Name, identity, kind and address of an OpenCL device, and what to do where it does not work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.contract import Kind
from opweave.packages import pip_install
from opweave_opencl.drivers import packaged
from opweave_opencl.pocl import matched, too_late

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["describe", "hardware_id", "identity", "is_pocl", "kind_of", "remedy_for"]


def describe(device: cl.Device) -> str:
    """Name and platform of a device."""
    name = device.name.strip()
    if "cl_amd_device_attribute_query" in device.extensions.split():
        # What AMD calls the name is the architecture, "gfx1100".
        board = str(device.board_name_amd).strip()
        name = f"{board} {name}" if board else name
    return f"{name} ({device.platform.name.strip()})"


def identity(device: cl.Device) -> tuple[str, ...]:
    """What distinguishes a device, its driver and their versions from others: keys of caches are made of it."""
    platform = device.platform
    return (
        *(platform.vendor, platform.name, platform.version),
        *(device.vendor, device.name, device.version, device.driver_version),
        *(["matching library"] if is_pocl(device) and matched() else []),
    )


def is_pocl(device: cl.Device) -> bool:
    """Whether its driver is PoCL."""
    return device.platform.name.strip() == "Portable Computing Language"


def remedy_for(device: cl.Device) -> str:
    """What to do where a device does not work."""
    if kind_of(device) is not Kind.CPU:
        return f"update the driver of {device.platform.vendor.strip()}"
    other = "pocl" if "intel" in device.platform.name.lower() else "intel"
    if is_pocl(device) and too_late():
        update = "ask opweave for devices before pyopencl is asked for platforms, which sets PoCL up for this processor"
    else:
        update = "update the driver"
    if other == "intel" and packaged():
        return f"{update}; Intel's, which is installed too, takes its place"
    return f"{update}, or install another one that runs on the CPU: {pip_install(f'opweave-opencl[{other}]')}"


def kind_of(device: cl.Device) -> Kind:
    """The sort of hardware, by the device's type and whether it shares the host's memory."""
    import pyopencl as cl

    if device.type & cl.device_type.GPU:
        return Kind.IGPU if device.host_unified_memory else Kind.GPU
    return Kind.CPU if device.type & cl.device_type.CPU else Kind.ACCEL


def hardware_id(device: cl.Device) -> str | None:
    """The PCI address, as ``0000:01:00.0``, where the driver gives it."""
    import pyopencl as cl

    extensions = device.extensions.split()
    try:
        if "cl_nv_device_attribute_query" in extensions:
            slot = device.pci_slot_id_nv
            return f"{_domain(device):04x}:{device.pci_bus_id_nv:02x}:{slot >> 3:02x}.{slot & 7}"
        if "cl_amd_device_attribute_query" in extensions:
            address = device.topology_amd
            return f"0000:{address.bus & 0xFF:02x}:{address.device:02x}.{address.function}"
    except (cl.Error, AttributeError):
        pass
    return None


def _domain(device: cl.Device) -> int:
    """The PCI domain on NVIDIA's driver; older ones do not give it."""
    import pyopencl as cl

    try:
        return int(device.pci_domain_id_nv)
    except (cl.Error, AttributeError):
        return 0
