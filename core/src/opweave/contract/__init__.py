"""The contract between the core and backends: what an author implements, and what opweave guarantees in return.

`Backend`, `Device` and `BufferType` are subclassed by authors, `Stream` for asynchronous devices; the other classes are
used as they are.
"""

from opweave.contract.backend import Backend, Features, SetThreads
from opweave.contract.buffer import Buffer
from opweave.contract.capabilities import Caps, DeviceProps, Kind
from opweave.contract.collectives import Collectives, CollectiveSupport
from opweave.contract.device import Device
from opweave.contract.event import Event
from opweave.contract.fusing import pointwise_groups
from opweave.contract.listing import Structure, structure_of
from opweave.contract.memory import BufferType, mapped
from opweave.contract.multibuffer import MultiBuffer
from opweave.contract.offloading import Offloading
from opweave.contract.plan import Plan, StepError
from opweave.contract.rows import Rows, flat_rows
from opweave.contract.space import HOST_SPACE, MemorySpace, Usage
from opweave.contract.step import Arg, Call, Group, Single, Step, first_equals
from opweave.contract.stream import Stream
from opweave.contract.stream_hooks import Launch, Range
from opweave.contract.tunable import NEVER, Limit, Limits, Tunable
from opweave.contract.worker import WorkerStream

__all__ = [
    "HOST_SPACE", "NEVER", "Arg", "Backend", "Buffer", "BufferType", "Call", "Caps", "CollectiveSupport", "Collectives",
    "Device", "DeviceProps", "Event", "Features", "Group", "Kind", "Launch", "Limit", "Limits", "MemorySpace",
    "MultiBuffer", "Offloading", "Plan", "Range", "Rows", "SetThreads", "Single", "Step", "StepError", "Stream",
    "Structure", "Tunable", "Usage", "WorkerStream", "first_equals", "flat_rows", "mapped", "pointwise_groups",
    "structure_of",
]  # fmt: skip
