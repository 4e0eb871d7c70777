"""`Tunable`: a number of a backend, such as the size of a tile, of which each machine has a best value of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from opweave.errors import PluginError
from opweave.graph.tensor import Tensor

__all__ = ["Tunable"]


class Tunable:
    """A number that decides which variant of a kernel runs or how large its tiles are, with the nodes to measure it.

    Kernels read ``value`` when they are asked for a workspace and when they are bound. It is the default until
    `opweave profile` has measured the device; what that found is set when the device is next loaded, in another process
    too. It never changes while programs are made, so that a kernel finds the workspace that it asked for.

    Args:
        name: what it is, with its unit, as a Python identifier: ``"tile_bytes"``. Unique within a device.
        default: its value where nothing was measured: one that is never far from the best.
        choices: the values that are measured, the default among them. For a limit they are sizes between which the
            samples lie.
        samples: makes the nodes that are measured, as those of `opweave.graph.opdef.Sample`. The chosen value is the
            one with which these take the least time, each compared with its own least.

    Raises:
        PluginError: the default is none of the choices, or a choice is no positive whole number.
    """

    __slots__ = ("choices", "default", "name", "samples", "value")

    def __init__(
        self, name: str, default: int, choices: Sequence[int], samples: Callable[[], Sequence[Tensor]]
    ) -> None:
        if not all(type(choice) is int and choice > 0 for choice in choices):
            raise PluginError(f"tunable {name}: {list(choices)!r:.60} are not all positive whole numbers")
        if default not in choices:
            raise PluginError(f"tunable {name}: its default {default!r:.20} is none of its choices")
        self.name: Final = name
        self.default: Final = default
        self.choices: Final = tuple(choices)
        self.samples: Final = samples
        self.value = default

    def __repr__(self) -> str:
        return f"<Tunable {self.name}={self.value}>"
