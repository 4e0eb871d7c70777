"""The process of a part: ``python -m benchmarks.card.child SPECIFICATION`` calls its function with a `Context`."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.card.part import Absent, Context

__all__ = ["main"]

WARNING = 1.5
"""Seconds before the limit at which every thread's stack goes to standard error, to show where the part hangs."""


def main(specification: str) -> int:
    """Returns the exit status: 1 where something failed."""
    given = json.loads(specification)
    module, _, name = given.pop("function").partition(":")
    context = Context(**{**given, "file": Path(given["file"]), "skip": frozenset(given["skip"])})
    if context.seconds > WARNING:
        faulthandler.dump_traceback_later(context.seconds - WARNING, exit=False)
    try:
        getattr(import_module(module), name)(context)
    except Absent as error:
        context._write(kind="absent", why=str(error))
    except Exception as error:
        traceback.print_exc()
        context.failure(name, f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is written; at an ordinary end torch's compiler waits for processes that were interrupted
