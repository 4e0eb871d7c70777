"""The execution providers of the installed ONNX Runtime as devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import packages_distributions
from typing import Any, Final, NamedTuple

import onnxruntime
from packaging.version import Version

from opweave.contract import Device, Kind
from opweave.errors import Unavailable
from opweave.runtime.host.processor import cpu_name
from opweave_ort.runtime import PACK_VARIABLE, POOL_VARIABLE, RUNTIME, flag

__all__ = ["PROVIDERS", "Provider", "features", "find_devices", "installed_packages"]

OLDEST: Final = Version("1.31")
"""The oldest ONNX Runtime that the plugin works with."""


class Provider(NamedTuple):
    """An execution provider.

    Attributes:
        name: ONNX Runtime's.
        id: of its device; providers of numbered hardware get one device for each number.
        kind: the sort of hardware.
        numbered: whether the option ``device_id`` chooses the hardware.
    """

    name: str
    id: str
    kind: Kind
    numbered: bool = False


PROVIDERS: Final = (
    Provider("TensorrtExecutionProvider", "tensorrt", Kind.GPU, True),
    Provider("NvTensorRTRTXExecutionProvider", "tensorrt-rtx", Kind.GPU, True),
    Provider("CUDAExecutionProvider", "cuda", Kind.GPU, True),
    Provider("MIGraphXExecutionProvider", "migraphx", Kind.GPU, True),
    Provider("ROCMExecutionProvider", "rocm", Kind.GPU, True),
    Provider("DmlExecutionProvider", "dml", Kind.GPU, True),
    Provider("WebGpuExecutionProvider", "webgpu", Kind.GPU),
    Provider("OpenVINOExecutionProvider", "openvino", Kind.ACCEL),
    Provider("QNNExecutionProvider", "qnn", Kind.ACCEL),
    Provider("CoreMLExecutionProvider", "coreml", Kind.ACCEL),
    Provider("VitisAIExecutionProvider", "vitisai", Kind.ACCEL),
    Provider("CANNExecutionProvider", "cann", Kind.ACCEL, True),
    Provider("DnnlExecutionProvider", "dnnl", Kind.ACCEL),
    Provider("ACLExecutionProvider", "acl", Kind.ACCEL),
    Provider("XnnpackExecutionProvider", "xnnpack", Kind.ACCEL),
    Provider("CPUExecutionProvider", "cpu", Kind.ACCEL),
)
"""The providers that compute. ``ort:cpu`` is an accelerator beside the CPU as ``torch:cpu`` is: it works in host
memory, and ``cpu`` stays where single nodes run."""


def find_devices() -> Sequence[Device]:
    """The devices of all providers that are there, in the order of `PROVIDERS`.

    Raises:
        Unavailable: ONNX Runtime is too old, or ``OPWEAVE_ORT_PACK`` or ``OPWEAVE_ORT_SHARED_POOL`` is neither 0 nor 1.
    """
    from opweave_ort.device import OrtDevice

    version = onnxruntime.__version__
    if Version(version) < OLDEST:
        package = " and ".join(installed_packages())
        remedy = f"pip install '{package}>={OLDEST}'"
        if package != "onnxruntime":
            remedy += "; before it has such a release, pip uninstall it and install onnxruntime, for ort:cpu only"
        raise Unavailable(f"{package} {version} is older than {OLDEST}, which opweave-ort needs", remedy=remedy)
    for variable in (PACK_VARIABLE, POOL_VARIABLE):
        flag(variable, False)
    here = onnxruntime.get_available_providers()
    devices: list[Device] = []
    for provider in PROVIDERS:
        if provider.name in here:
            devices += [OrtDevice(provider, number) for number in range(_count(provider))]
    return devices


def _count(provider: Provider) -> int:
    """The number of devices that ONNX Runtime lists for the provider; 1 if none: probing finds whether it works."""
    if not provider.numbered:
        return 1
    listed = [d for d in getattr(onnxruntime, "get_ep_devices", list)() if d.ep_name == provider.name]
    return max(1, len(listed))


def installed_packages() -> list[str]:
    """The installed packages that contain ONNX Runtime: ``onnxruntime``, ``onnxruntime-gpu``, ..."""
    return sorted(set(packages_distributions().get("onnxruntime", ()))) or ["onnxruntime"]


def features() -> Mapping[str, Any]:
    """ONNX Runtime's version and providers, the processor, and the bytes by which the arena has grown."""
    return {
        "onnxruntime": onnxruntime.__version__,
        "providers": " ".join(onnxruntime.get_available_providers()),
        "processor": cpu_name(),
        "arena bytes": RUNTIME.arena,
    }
