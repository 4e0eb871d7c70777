"""A device over devices: `combine`.

The memory of a combination holds values (`values`) that its members keep: weights in shards, states, or arrays on their
way. Its streams compile groups of steps to functions of these (`function`), each a program of a scheduler over the
members; `opweave.sharding.axes` chooses along which axis each weight is cut. So everything that schedulers do with
weights in shards serves here too, and whoever uses the combination sees one device of the contract.
"""

from opweave.combined.device import CombinedDevice, combine

__all__ = ["CombinedDevice", "combine"]
