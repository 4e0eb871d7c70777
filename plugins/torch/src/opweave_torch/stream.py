"""`TorchStream`: runs torch's kernels in the calling thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any, cast

import torch

from opweave.contract import Call, Device, Group, Stream, first_equals
from opweave_torch.memory import one_tensor_a_window
from opweave_torch.native import inference_mode
from opweave_torch.options import THREADS, Options, modes

__all__ = ["TorchStream"]


class TorchStream(Stream):
    """Runs calls in the calling thread, in torch's inference mode.

    Args:
        options: its parameters.
    """

    def __init__(self, device: Device, options: Options) -> None:
        super().__init__(device)
        self.options = options

    @property
    def threads(self) -> int:
        """How many threads torch's kernels for the CPU use in its runs."""
        return self.options.threads or THREADS.default or int(torch.get_num_threads())

    def _compile(self, groups: Sequence[Group]) -> Sequence[Call]:
        firsts = first_equals(groups)
        bound = dict.fromkeys(firsts)
        # Constants of the kernels become inference tensors, with which calls in inference mode are fastest.
        with inference_mode(), one_tensor_a_window():
            calls = dict(zip(bound, super()._compile([groups[i] for i in bound]), strict=True))
        return [calls[first] for first in firsts]

    @property
    def lists_operands(self) -> bool:
        return False  # groups are bound by their steps alone

    @property
    def shares_calls(self) -> bool:
        return True

    def _inlines(self, other: Stream) -> bool:
        return isinstance(other, TorchStream) and other.run_with == self.run_with

    @property
    def run_with(self) -> tuple[Any, ...]:
        """What runs the calls of a plan: streams with the same run each other's."""
        return cast(MethodType, self._run).__func__, self.options

    def _run(self, calls: Iterator[Call]) -> None:
        threads, deterministic = self.options.threads or THREADS.default, self.options.deterministic
        if threads is None and not deterministic:
            self._make(calls)
            return
        with self.options.pool or nullcontext(), modes(threads, deterministic):
            self._make(calls)

    def _make(self, calls: Iterator[Call]) -> None:
        with inference_mode():
            for call in calls:
                call()
