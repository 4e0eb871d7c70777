"""`KernelSequence`: calls of compiled functions in a row, made without the interpreter between them.

A step of a small decoder is some two hundred kernels of a few microseconds each. To call one from Python, and to take
the interpreter's lock again, takes one to two microseconds: a tenth to a fifth of the step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from types import MethodType
from typing import Any, Final

from opweave.contract import Call
from opweave_cpu.jit.compiler import FirstRun
from opweave_cpu.jit.team import Parts, Team, index_check, run_in_turn, words_of
from opweave_cpu.kernels.indexing import check_ids
from opweave_cpu.tiles import calls_within
from opweave_cpu.tunables import COMPILED_WORK, limit

__all__ = ["KernelSequence", "merge"]

FEWEST: Final = limit("fewest_merged_calls", 4, 2, 1 << 12)
"""Calls in a row from which on they are merged: to make fewer by one call takes longer than one by one."""

MERGED_CALLS: Final = limit("merged_calls", 64, 1, 1 << 12)
"""Calls that are made as one: between two of these, interrupts arrive and a run can be cancelled."""


def merge(calls: Sequence[Call]) -> list[tuple[Call, int]]:
    """The calls in order, those in a row that are compiled as one, each with how many it makes."""
    found: list[tuple[Call, int]] = []
    for compiled, group in groupby(calls, _is_compiled):
        some = list(group)
        most = MERGED_CALLS.value if compiled and len(some) >= FEWEST.value else 1
        parts = [some[at : at + most] for at in range(0, len(some), most)]
        found += [(part[0] if len(part) == 1 else KernelSequence(part), len(part)) for part in parts]
    return found


def _is_compiled(call: Call) -> bool:
    """Whether a call does nothing but run compiled functions, which raise nothing, and check indices."""
    if isinstance(call, MethodType):
        return isinstance(call.__self__, Parts)
    if isinstance(call, partial) and (hasattr(call.func, "address") or _checks(call)):
        return True
    within = calls_within(call)
    return type(call) is FirstRun or (within[0] is not call and all(map(_is_compiled, within)))


def _checks(call: Call) -> bool:
    """Whether a call checks indices as a compiled function does: in memory without gaps."""
    return isinstance(call, partial) and call.func is check_ids and bool(call.args[0].flags.c_contiguous)


def _single(call: Call) -> Iterator[Call]:
    """The calls of one function each that a call makes."""
    if isinstance(call, FirstRun):
        call.compile()
        call = call.call
    for one in calls_within(call):
        yield from (one,) if one is call else _single(one)


class KernelSequence:
    """The call that makes several calls of compiled functions, which are compiled when it is first made.

    Attributes:
        failed: the number of the call that raised what this one raised.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.failed = 0
        self._calls: Final = calls
        self._singles: list[tuple[int, Call]] = []  # the calls of one function each, by the numbers of those above
        self._team: Team | None = None
        self._words: Any = None
        self._called = 0  # threads

    def warm(self) -> Team:
        """Compile what is called, and write down where it is, for the threads of this run, which are returned."""
        team = Team.current()
        if team is not self._team:
            self._words, self._team = self._write(team), team
        return team

    def __call__(self) -> None:
        team = self.warm()
        words, run = self._words, run_in_turn().releasing
        words[0] = 0
        while words[0] < words[1]:
            team.gather(self._called)
            run(words)
            if words[3]:
                words[3] = 0
                self.failed, check = self._singles[words[0]]
                check()  # raises, as an index was outside
                words[0] += 1

    def _write(self, team: Team) -> Any:
        """The functions and their arguments, for the threads of a team."""
        self._singles = [(number, one) for number, call in enumerate(self._calls) for one in _single(call)]
        made = words_of([0, len(self._singles), team.address, 0, *[0] * (3 * len(self._singles))])
        made.kept = kept = list[Any]()
        owners = [getattr(one, "__self__", None) for _, one in self._singles]
        shared = [owner for owner in owners if isinstance(owner, Parts)]
        if sum(parts.work for parts in shared) >= COMPILED_WORK.value:  # threads are worth calling for all together
            self._called = max(parts.others for parts in shared)
        for at, (_, single) in enumerate(self._singles):
            called, words = 0, None
            if isinstance(single, MethodType):
                parts = single.__self__
                assert isinstance(parts, Parts)
                words, address, called = parts.words(team), parts.address, parts.called
            elif _checks(single):
                assert isinstance(single, partial)
                ids, _, length, _ = single.args
                words = words_of([ctypes.addressof(made) + 3 * 8, length, ids.size, ids.ctypes.data])
                address = index_check(8 * ids.itemsize).address
            else:
                assert isinstance(single, partial)
                words = ctypes.create_string_buffer(single.args[0], len(single.args[0]))
                address = single.func.address  # type: ignore[attr-defined]
            kept.append((words, single))
            made[4 + 3 * at : 7 + 3 * at] = address, ctypes.addressof(words), called
        return made
