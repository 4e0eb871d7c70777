"""`scope`: names for parts of a graph, such as the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opweave.errors import ShapeError

__all__ = ["SCOPE", "scope"]

SCOPE: Final[ContextVar[str]] = ContextVar("opweave.scope", default="")
"""The scopes that the current thread or task is in, joined by ``/``."""


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Nodes that are built within the ``with`` block belong to the scope ``name``, within the scopes around it.

    The name of such a node begins with them, ``"encoder/layer3/linear"``, wherever opweave shows it: in ``explain``,
    ``compare``, traces, profiles and errors. Leaves are not renamed: they are fed, and looked up, by their names. An
    equal node that was built before is the same node and keeps the scope in which it was built first.

    Each thread and each task of ``asyncio`` has its own scopes: a new thread begins outside of all, a new task in those
    of the task that created it. Also a decorator, for functions that build graphs.

    Args:
        name: a text, in which ``/`` separates nested scopes.

    Raises:
        ShapeError: ``name`` is no text, or has an empty part.
    """
    if not isinstance(name, str) or not all(name.split("/")):
        raise ShapeError(f"a scope needs a name: ow.scope('layer3'), not {name!r:.60}")
    outer = SCOPE.get()
    token = SCOPE.set(f"{outer}/{name}" if outer else name)
    try:
        yield
    finally:
        SCOPE.reset(token)
