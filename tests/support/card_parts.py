"""Doubles of the parts of ``benchmarks/gpu.py``: one that is right, and each way in which a part can go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.card.part import Context


def right(context: Context) -> None:
    context.row("figures", device=context.device, worker=context.worker, seed=context.seed)


def wrong(context: Context) -> None:
    context.row("figures", got=1)
    context.failure("the sum", "is 1, not 2")


def raises(context: Context) -> None:
    context.row("figures", got=1)
    raise ArithmeticError("the driver said no")


def silent(context: Context) -> None:
    pass


def missing(context: Context) -> None:
    context.absent("no such card")


def hangs(context: Context) -> None:
    """With a child, which would otherwise hang on."""
    context.row("figures", got=1)
    context.begin("the third product")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    context.row("child", pid=child.pid)
    time.sleep(600)


def crashes(context: Context) -> None:
    context.row("figures", got=1)
    context.begin("a kernel")
    os.kill(os.getpid(), signal.SIGSEGV)


def crashes_once(context: Context) -> None:
    """At the second of three things; the process that goes on does not try it again."""
    for what in ("first", "second", "third"):
        if what in context.skip:
            continue
        context.begin(what)
        if what == "second":
            os._exit(9)
        context.row("figures", what=what)
        context.done(what)
