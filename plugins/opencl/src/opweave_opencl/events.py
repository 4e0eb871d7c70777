"""The state of OpenCL's events."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyopencl as cl

__all__ = ["complete"]


def complete(event: cl.Event) -> bool:
    """Whether the command of an event is complete; asking does not wait."""
    import pyopencl as cl

    return bool(event.command_execution_status == cl.command_execution_status.COMPLETE)
