"""`CapturedPlan`: a plan's calls as a CUDA graph, which the device launches as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch

from opweave.collector import collector_paused
from opweave.contract import Call, Step
from opweave_torch.kernels.table import SYNCHRONIZES
from opweave_torch.native import inference_mode

if TYPE_CHECKING:
    from opweave_torch.queues import QueueStream

__all__ = ["CapturedPlan"]


class CapturedPlan:
    """One call for all calls of a plan.

    The first run makes them one by one: libraries load kernels and make their handles, one for each thread, when they
    are first used, which is not possible while capturing. The next run in the same thread captures them, which executes
    nothing, and launches the graph; so do all later ones. Where a call cannot be captured (it waits for the device,
    say) they stay single calls.

    They are captured on a queue of their own, so that the workspace of cuBLAS, which belongs to a queue, is memory of
    the graph. That of the stream's queue may be freed: ``torch.compile(mode="reduce-overhead")`` frees all workspaces.

    Args:
        stream: whose queue is current when the plan runs.
        calls: of the plan, in order.
        steps: what each call computes, for messages.

    Attributes:
        remark: whether it runs as a graph, or why not, as `explain` shows it.
    """

    def __init__(self, stream: QueueStream, calls: Sequence[Call], steps: Sequence[Step]) -> None:
        self._stream: Final = stream
        self._calls: Final = calls
        self._steps: Final = steps
        self._graph: Any = None
        self._ran_in = 0  # the thread of the latest run
        self.remark = "will be captured as a CUDA graph by its second run"
        # An attempt to capture these would leave torch's random generator of the device unusable.
        waiting = next((step for step in steps if step.op in SYNCHRONIZES), None)
        self._captures = waiting is None
        if waiting is not None:
            self.remark = f"not a CUDA graph: {waiting.op} {waiting.label!r} waits for the device"

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        if self._captures and self._ran_in == get_ident():
            self._captures = False
            self._graph = self._capture()
            if self._graph is not None:
                self._graph.replay()
                return
        self._ran_in = get_ident()
        for call, step in zip(self._calls, self._steps, strict=True):
            try:
                call()
            except RuntimeError as error:
                error.add_note(f"in {step.op} {step.label!r}")
                raise

    def _capture(self) -> Any:
        """The calls as a graph, ``None`` where that is not possible. Nothing is computed in either case."""
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        torch.cuda.synchronize(stream.target)
        if stream.pool is None:
            stream.pool = torch.cuda.graph_pool_handle()
        index, failure, begun = 0, None, False
        # A tensor collected meanwhile would be freed as a part of the graph.
        with collector_paused(), torch.cuda.stream(stream.capturing):
            try:
                # Tensors that torch makes with a graph must be no inference tensors: others' graphs use them too.
                with inference_mode(False):
                    # thread_local: allocations of other threads do not invalidate the capture.
                    graph.capture_begin(pool=stream.pool, capture_error_mode="thread_local")
                begun = True
                for index, call in enumerate(self._calls):  # noqa: B007 - which call failed
                    call()
            except Exception as error:
                failure = error
            finally:
                try:
                    if begun:
                        graph.capture_end()
                except Exception as error:
                    failure = failure or error
        if failure is None:
            self.remark = "runs as a CUDA graph"
            return graph
        torch.cuda.synchronize(stream.target)
        stream.pool = None  # the failed capture may have left it in an undefined state
        step, why = self._steps[index], str(failure).partition("\n")[0]
        self.remark = f"not a CUDA graph: {step.op} {step.label!r} cannot be captured ({why})"
        return None
