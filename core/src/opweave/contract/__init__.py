"""The contract between the core and backends: what an author implements, and what opweave guarantees in return.

Read `backend` (what a plugin registers), `device` (memory, and what runs), `kernels` and `step` (what a kernel is
given) first: they make a working backend. Then, as a device needs them: `tunable` (numbers by which kernels choose
their paths), `workspace`, `stream` (work that is queued, fused or compiled), `memory` (special kinds of it),
`collectives`. `transfers` has what hooks do by default; `version` says which version of the contract this is.

Hooks begin with an underscore. The classes that authors subclass, `Device`, `Stream` and `BufferType`, have the
finished methods too; they lie in `opweave.runtime`, which need not be read, and are imported from here as everything
else but what declares kernels, which is in `kernels`. ``docs/backend`` leads through it by examples.
"""

from typing import TYPE_CHECKING

from opweave.contract.backend import Backend, Features, SetThreads
from opweave.contract.collectives import Collectives, CollectiveSupport
from opweave.contract.device import Caps, DeviceProps, Kind
from opweave.contract.memory import HOST_SPACE, MemorySpace, Usage
from opweave.contract.step import Arg, Call, Group, Single, Step, first_equals
from opweave.contract.stream import Launch, Range
from opweave.contract.transfers import Rows, flat_rows
from opweave.contract.tunable import NEVER, Limit, Limits, Tunable
from opweave.contract.version import VERSION
from opweave.lazy import later

if TYPE_CHECKING:
    from opweave.runtime.buffer import Buffer, MultiBuffer
    from opweave.runtime.checks import check_threads
    from opweave.runtime.device import Device
    from opweave.runtime.fusion import pointwise_groups
    from opweave.runtime.listing import Structure, structure_of
    from opweave.runtime.memory import BufferType
    from opweave.runtime.offload import Offloading, flops
    from opweave.runtime.plan import Plan, StepError
    from opweave.runtime.stream import Stream
    from opweave.runtime.submission import Event
    from opweave.runtime.transfers import mapped
    from opweave.runtime.worker import WorkerStream

__all__ = [
    "HOST_SPACE", "NEVER", "VERSION", "Arg", "Backend", "Buffer", "BufferType", "Call", "Caps", "CollectiveSupport",
    "Collectives", "Device", "DeviceProps", "Event", "Features", "Group", "Kind", "Launch", "Limit", "Limits",
    "MemorySpace", "MultiBuffer", "Offloading", "Plan", "Range", "Rows", "SetThreads", "Single", "Step", "StepError",
    "Stream", "Structure", "Tunable", "Usage", "WorkerStream", "check_threads", "first_equals", "flat_rows", "flops",
    "mapped", "pointwise_groups", "structure_of",
]  # fmt: skip

_RUNTIME = {
    "Buffer": "buffer", "BufferType": "memory", "Device": "device", "Event": "submission", "MultiBuffer": "buffer",
    "Offloading": "offload", "Plan": "plan", "StepError": "plan", "Stream": "stream", "Structure": "listing",
    "WorkerStream": "worker", "check_threads": "checks", "flops": "offload", "mapped": "transfers", "pointwise_groups":
    "fusion", "structure_of": "listing",
}  # fmt: skip

# They build on these modules.
__getattr__ = later(__name__, {name: f"opweave.runtime.{home}" for name, home in _RUNTIME.items()})
