"""`Alone`: whether one of a plan's devices would be faster alone, by the times of a model's first steps."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from opweave.tracing import TRACE, TraceEvent

if TYPE_CHECKING:
    from opweave.graph.tensor import Tensor
    from opweave.runtime.stream import Stream
    from opweave_models.config import Config
    from opweave_models.placement import Plan

__all__ = ["Alone"]

WARM: Final = 2
"""Steps of a shape before the first that is timed: programs are built and prepared in them."""

ROUNDS: Final = 3
"""How many steps are timed as they are, and how many device by device. They take turns, so that other work on the
machine slows down both."""

LESS: Final = 0.9
"""One device is named where it is estimated to take less than this part of the time of all."""


class Alone:
    """Times the first steps of single tokens over several devices, as a whole and by device.

    A device alone would take as long for every byte of weights as it takes for those that it has, and the time in which
    no device computes, but for copies between devices. Only those are asked about whose budget holds the whole model.
    Each part of a step counts as it was at its fastest, since other work on the machine slows down some.

    Args:
        plan: over several devices.
        weights: by GGUF's names.
        streams: of the devices.
    """

    def __init__(self, plan: Plan, config: Config, weights: Mapping[str, Tensor], streams: Iterable[Stream]) -> None:
        self._devices: Final = plan.devices
        self._streams: Final = {stream.device.name: stream for stream in streams}
        read: Counter[str] = Counter()  # bytes of weights that a step of one token reads, by device
        for name, weight in weights.items():
            if name.endswith("_exps.weight"):
                read[plan.placed[name]] += weight.nbytes * config.experts_used // config.experts
            elif name != "token_embd.weight" or "output.weight" not in weights:
                read[plan.placed[name]] += weight.nbytes
        whole = sum(share.weights + share.cache for share in plan.shares)
        self._times_more: Final = {
            share.device: read.total() / read[share.device] for share in plan.shares
            if read[share.device] and (share.budget is None or whole + share.compute <= share.budget)
        }  # fmt: skip
        self._shape: tuple[int, ...] = ()
        self._runs = 0
        self._together = inf  # nanoseconds
        self._parts: dict[str, int] = {}  # nanoseconds of each device, of copies ("copies") and of what is left ("")

    @property
    def done(self) -> bool:
        """Whether nothing is left to time."""
        return not self._times_more or self._runs == WARM + 2 * ROUNDS

    @property
    def advice(self) -> str:
        """Which device would be faster alone; "" where none would."""
        parts = self._parts
        alone = {d: parts[d] * more + parts[""] for d, more in self._times_more.items() if d in parts}
        best = min(alone, key=alone.__getitem__, default="")
        together = min(self._together, sum(parts.values()))
        if not best or alone[best] >= LESS * together:
            return ""
        rows = self._shape[0]
        what = "a token" if rows == 1 else f"a step of {rows} tokens"
        return (f"{best} alone would take about {alone[best] / 1e6:,.1f} ms {what} where "
                f"{', '.join(self._devices)} take {together / 1e6:,.1f}: load(devices={best!r})")  # fmt: skip

    def run(self, shape: tuple[int, ...], step: Callable[[], Any]) -> Any:
        """The result of a step of ``shape`` (sequences, tokens, reach)."""
        if shape[1] > 1:
            return step()
        if shape != self._shape:
            self._shape, self._runs, self._together, self._parts = shape, 0, inf, {}
        self._runs += 1
        spent: Counter[str] = Counter()
        begin = perf_counter_ns()
        if self._runs <= WARM or (self._runs - WARM) % 2:
            result = step()
        else:
            with TRACE.listen(self._counting(spent)):
                result = step()
        total = perf_counter_ns() - begin
        if self._runs > WARM:
            self._together = min(self._together, total)
        if spent:
            spent[""] = total - spent.total()
            self._parts = {part: min(time, self._parts.get(part, time)) for part, time in spent.items()}
        return result

    def _counting(self, spent: Counter[str]) -> Callable[[TraceEvent], None]:
        """A listener that counts what each device takes until it is done, and under "copies" what these take."""
        thread = threading.get_ident()  # other threads run other programs

        def count(event: TraceEvent) -> None:
            if event.kind in ("plan", "copy") and threading.get_ident() == thread:
                device = event.data["device"]
                if device in self._streams:
                    self._streams[device].synchronize()
                spent[device if event.kind == "plan" else "copies"] += perf_counter_ns() - event.start

        return count
