"""A device over devices: `combine`.

The memory of a combination holds values (`values`) that its members keep: weights in shards, states, or arrays on their
way. Its streams compile groups of steps to functions of these (`function`), each a program of a scheduler over the
members; `opweave.sharding.axes` chooses along which axis each weight is cut. So everything that schedulers do with
weights in shards serves here too, and whoever uses the combination sees one device of the contract.
"""

from typing import TYPE_CHECKING

from opweave.lazy import later

if TYPE_CHECKING:
    from opweave_combined.device import CombinedDevice as CombinedDevice
    from opweave_combined.device import combine as combine

__all__ = ["CombinedDevice", "combine"]

# The hooks of this package are imported by commands that combine nothing.
__getattr__ = later(__name__, dict.fromkeys(__all__, "opweave_combined.device"))
