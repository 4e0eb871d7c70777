"""`warm`: have the calls of a program compile before its first run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opweave.errors import raise_backend_failure
from opweave.progress import shown

if TYPE_CHECKING:
    from opweave.scheduler.run.runs import ProgramState

__all__ = ["warm"]


def warm(state: ProgramState) -> None:
    """Call the streams' ``_warm`` for every call of every slot."""
    state.check_open()
    work = [(plan.stream, call) for run_list in state.lists for plan in run_list.plans for call in plan.calls]
    for stream, call in shown(work, "compiling"):
        try:
            stream._warm(call)
        except Exception as error:
            raise_backend_failure(error, stream.device.name, "compiling before the first run")
