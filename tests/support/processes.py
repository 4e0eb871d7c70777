"""Code that runs in a process of its own: what forks, and what ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

__all__ = ["check_script", "run_script"]

ROOT = Path(__file__).parents[2]

START = """
import gc, os, sys, threading, time, traceback
import numpy as np
import opweave as ow

ONES = np.ones(16, np.float32)
x = ow.input("x", (16,))

def refused(call, error=ow.LifetimeError, words="forked"):
    start = time.monotonic()
    try:
        call()
    except error as told:
        assert words in str(told), told
    else:
        raise AssertionError(f"{call} was not refused")
    assert time.monotonic() - start < 1, call

def in_child(work):
    # Ends as processes do, by way of atexit and finalisers.
    child = os.fork()
    if child == 0:
        try:
            work()
        except Exception:
            traceback.print_exc()
            os._exit(1)
        sys.exit(7)
    deadline = time.monotonic() + 30
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(found[1]) == 7, found
"""


def run_script(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python process of its own, behind `START`."""
    script = START + dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **environ},
    )


def check_script(code: str, **environ: str) -> None:
    """Run code in a process of its own, which must end well and in silence."""
    ended = run_script(code, **environ)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr, ended.stderr
