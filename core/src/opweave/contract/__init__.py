"""What the author of a backend implements: `memory`, `execution`, `device`. Each file reads in one sitting."""

from opweave.contract.buffer import Buffer, MultiBuffer, mapped
from opweave.contract.device import (
    AbortCallback,
    Backend,
    Caps,
    Device,
    DeviceProps,
    Features,
    Kind,
    SetThreads,
    SplitBuffers,
)
from opweave.contract.execution import Event, Plan, StepError, Stream
from opweave.contract.fusing import pointwise_groups
from opweave.contract.memory import BufferType
from opweave.contract.offloading import Offloading
from opweave.contract.space import HOST_SPACE, MemorySpace, Usage
from opweave.contract.step import Arg, Call, Group, Step
from opweave.contract.worker import WorkerStream

__all__ = [
    "HOST_SPACE",
    "AbortCallback",
    "Arg",
    "Backend",
    "Buffer",
    "BufferType",
    "Call",
    "Caps",
    "Device",
    "DeviceProps",
    "Event",
    "Features",
    "Group",
    "Kind",
    "MemorySpace",
    "MultiBuffer",
    "Offloading",
    "Plan",
    "SetThreads",
    "SplitBuffers",
    "Step",
    "StepError",
    "Stream",
    "Usage",
    "WorkerStream",
    "mapped",
    "pointwise_groups",
]
