"""What `explain` remarks on a program as a whole: work that a faster device of this machine would run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from opweave import registry
from opweave.contract.device import Kind
from opweave.contract.memory import HOST_SPACE
from opweave.scheduler.place.support import unbound_step
from opweave_cost import store

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.runtime.device import Device
    from opweave.scheduler.plan.splits import Partition

__all__ = ["remarks"]

MIN_SPEEDUP: Final = 1.5
"""How many times faster a device must have been measured to be worth a remark; profiles of one device vary less."""


def remarks(partition: Partition) -> list[str]:
    """A sentence for each CPU device that multiplies by quantized weights where a faster device of this machine is not
    used by the program. Loads the other plugins only where there is such work."""
    capabilities = partition.assignment.capabilities
    work: dict[Device, list[Tensor]] = {}
    for split in partition.splits:
        if split.target.device.kind in (Kind.CPU, Kind.HOST):
            quantized = [node for node in split.nodes if _weight_type(node)]
            work.setdefault(split.target.device, []).extend(quantized)
    used = {target.device for target in partition.assignment.targets}
    found = []
    for device, nodes in work.items():
        if not nodes:
            continue
        dtype = Counter(_weight_type(node) for node in nodes).most_common(1)[0][0]
        for other in registry.devices():
            if other in used or not _is_faster(other, device, dtype):
                continue
            runs = [n for n in nodes if other.why_not(unbound_step(capabilities.signature(n), other)) is None]
            if runs:
                products = "1 product" if len(nodes) == 1 else f"{len(nodes)} products"
                found.append(
                    f"{device.name} computes {products} of quantized weights ({dtype}); {other.name} is here, is "
                    f"faster at that and runs {len(runs)} of {len(nodes)}: name it before {device.name} in devices="
                )
                break
    return found


def _weight_type(node: Tensor) -> str:
    """The block type of the weights that a product reads, ``""`` for all else."""
    if node.op is None or not node.op.product or len(node.srcs) < 2 or node.srcs[1].dtype.block == 1:
        return ""
    return node.srcs[1].dtype.name


def _is_faster(other: Device, device: Device, dtype: str) -> bool:
    """Whether ``other`` is faster: by profiles, if both have one; else an accelerator with memory
    of its own is."""
    if other.kind is Kind.HOST or other.simulated:
        return False
    theirs, ours = store.known_profile(other), store.known_profile(device)
    if theirs is not None and ours is not None:
        return theirs.flops(dtype) > MIN_SPEEDUP * ours.flops(dtype)
    return other.kind is not Kind.CPU and not other.reaches(HOST_SPACE)
