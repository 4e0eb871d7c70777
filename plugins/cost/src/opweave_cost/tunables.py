"""Measuring the tunables of a device: each value on the same nodes, in turn."""

from __future__ import annotations

from math import inf, log
from typing import TYPE_CHECKING, Final

from opweave.scheduler.place.target import Target
from opweave_cost.measure import Bound, seconds_of_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opweave.contract import Device, Stream, Tunable
    from opweave.graph.tensor import Tensor
    from opweave_cost.measure import Progress

__all__ = ["best", "measure_tunables"]

ROUNDS: Final = 3
"""How often each value is measured, in turn with the others: load that comes and goes disturbs all of them."""

FAR: Final = 2.0
"""Ratios of a value's time to the least are cut off here: a thread that waited for other programs may take far more."""

GAIN: Final = 0.03
"""The share of time by which another value has to be faster than the default: measurements vary by less than this."""


def measure_tunables(device: Device, progress: Progress | None = None) -> None:
    """Set each tunable of a device to the value with which its samples take the least time.

    Tunables are measured one after the other: the earlier ones have their new values by then.

    Raises:
        AllocationError: the device has no memory for a sample.
    """
    stream = device.open()
    try:
        for done, tunable in enumerate(device.tunables):
            if progress is not None:
                progress(tunable.name, done, len(device.tunables))
            before = tunable.value
            try:
                chosen = best(tunable.default, _measured(device, stream, tunable))
            except BaseException:
                tunable.value = before
                raise
            tunable.value = chosen
    finally:
        stream.close()


def _measured(device: Device, stream: Stream, tunable: Tunable) -> list[Mapping[int, float]]:
    """For each sample that the device runs, the least seconds by value."""
    found: list[Mapping[int, float]] = []
    for node in tunable.samples():
        seconds = dict.fromkeys(tunable.choices, inf)
        for _ in range(ROUNDS):
            for choice in tunable.choices:
                tunable.value = choice
                seconds[choice] = min(seconds[choice], _seconds(stream, node))
        if inf not in seconds.values():
            found.append(seconds)
    return found


def _seconds(stream: Stream, node: Tensor) -> float:
    """Seconds of a step, bound with the present values; infinite if the device does not run it."""
    target, signature = Target(0, stream, None, owned=False), node.signature
    assert signature is not None
    try:
        if target.support(signature).reason is not None:
            return inf
        with Bound(target, node, "exact") as bound:
            return seconds_of_step(stream, bound)
    finally:
        signature.support.pop(stream.device, None)  # the workspace that it remembers holds for this value only


def best(default: int, samples: list[Mapping[int, float]]) -> int:
    """The value with which samples take the least time, each relative to its own least (the geometric mean of these
    ratios); the default, unless another value gains enough.

    Args:
        samples: for each sample, the seconds by value.
    """
    if not samples:
        return default
    scores = {
        choice: sum(log(min(FAR, seconds[choice] / min(seconds.values()))) for seconds in samples) / len(samples)
        for choice in samples[0]
    }
    chosen = min(scores, key=lambda choice: scores[choice])
    return chosen if scores[chosen] < scores[default] - GAIN else default
