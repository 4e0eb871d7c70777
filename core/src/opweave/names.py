"""The public names of `opweave` besides the operations, which `opweave.ops` exports."""

from collections.abc import Mapping
from typing import Final

from opweave.contract import Arg, Backend, Group, Kind, MemorySpace, Step, Usage
from opweave.contract.kernels import KernelTable
from opweave.errors import (
    AllocationError,
    BoundsError,
    Broken,
    Cancelled,
    CheckpointError,
    DeviceLostError,
    DTypeError,
    ExecutionError,
    FormatError,
    GradientError,
    HazardError,
    Incompatible,
    LayoutError,
    LifetimeError,
    NameConflict,
    OpweaveError,
    PathError,
    PluginError,
    SchedulerError,
    ShapeError,
    Unavailable,
    UnknownNameError,
    UnsupportedOpError,
)
from opweave.graph.dtypes import DTYPES, DType, as_dtype
from opweave.graph.graph import Graph
from opweave.graph.leaf import Placement, Spec
from opweave.graph.opdef import OpDef, define_op
from opweave.graph.scope import scope
from opweave.graph.tensor import Tensor, constant, input
from opweave.leaf_memory import place
from opweave.leaf_memory import read_leaf as read
from opweave.leaf_memory import write_state as write
from opweave.leaves import Blocks, Weights, optional, state, weights
from opweave.registry import (
    PluginRecord,
    Registry,
    backend,
    backends,
    best_device,
    default_devices,
    device,
    devices,
    hookimpl,
    load,
    load_all,
    load_all_from_path,
    open_device,
    plugins,
    register,
    register_device,
    rescan,
    unload,
)
from opweave.runtime.buffer import Buffer
from opweave.runtime.device import Device
from opweave.runtime.memory import BufferType
from opweave.runtime.stream import Stream
from opweave.scheduler import Program, Scheduler

__all__ = [
    "DTYPES", "AllocationError", "Arg", "Backend", "Blocks", "BoundsError", "Broken", "Buffer", "BufferType",
    "Cancelled", "CheckpointError", "DType", "DTypeError", "Device", "DeviceLostError", "ExecutionError",
    "FormatError", "GradientError", "Graph", "Group", "HazardError", "Incompatible", "KernelTable", "Kind",
    "LayoutError", "LifetimeError", "MemorySpace", "NameConflict", "OpDef", "OpweaveError", "PathError",
    "Placement", "PluginError", "PluginRecord", "Program", "Registry", "Scheduler", "SchedulerError",
    "ShapeError", "Spec", "Step", "Stream", "Tensor", "Unavailable", "UnknownNameError", "UnsupportedOpError",
    "Usage", "Weights", "as_dtype", "backend", "backends", "best_device", "constant", "default_devices",
    "define_op", "device", "devices", "hookimpl", "input", "load", "load_all", "load_all_from_path",
    "open_device", "optional", "place", "plugins", "read", "register", "register_device", "rescan", "scope", "state",
    "unload", "weights", "write",
]  # fmt: skip

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Tensors and graphs": (
        "DTYPES", "DType", "Graph", "OpDef", "Tensor", "as_dtype", "constant", "define_op", "from_dlpack",
        "gradients", "input", "scope",
    ),
    "Weights, states and memory": (
        "Blocks", "KVCache", "Placement", "Sharded", "Spec", "Weights", "load_weights", "optional", "place",
        "read", "state", "weights", "write",
    ),
    "Running": (
        "Function", "Program", "Scheduler", "ThreadPool", "compile",
    ),
    "Plugins and devices": (
        "PluginRecord", "Registry", "backend", "backends", "best_device", "default_devices", "device",
        "devices", "hookimpl", "load", "load_all", "load_all_from_path", "open_device", "plugins", "register",
        "register_device", "rescan", "unload",
    ),
    "For authors of backends": (
        "Arg", "Backend", "Buffer", "BufferType", "Device", "Group", "KernelTable", "Kind", "MemorySpace",
        "Step", "Stream", "Usage",
    ),
    "Errors": (
        "AllocationError", "BoundsError", "Broken", "Cancelled", "CheckpointError", "DTypeError",
        "DeviceLostError", "ExecutionError", "FormatError", "GradientError", "HazardError", "Incompatible",
        "LayoutError", "LifetimeError", "NameConflict", "OpweaveError", "OpweaveWarning", "PathError",
        "PluginError", "SchedulerError", "ShapeError", "Unavailable", "UnknownNameError", "UnsupportedOpError",
    ),
}  # fmt: skip
"""The public names besides the operations, those that are imported when they are asked for too, by what they are for.
Each name is in one group; ``docs/names.md`` shows them with what they do."""
