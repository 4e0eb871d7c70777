"""Level 2: every path of every kernel. Each limit of a device (`opweave.contract.Limit`) is set to small and large
values, and cases of the operations that read it are run, so that small operands go every way through a kernel. Results
tell which side of each limit was taken; a side that a whole run never takes is one of the suite's problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import prod
from typing import Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from opweave.contract import Device, Limit, Step, Stream
from opweave.errors import OpweaveError
from opweave.graph.opdef import OPS
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Scheduler
from opweave_conformance.case import Case
from opweave_conformance.cases import CASES, CASES_OF, cases_for
from opweave_conformance.check import run_case
from opweave_conformance.checklist import Check, Mismatch, Subject, expect, inapplicable
from opweave_conformance.decisions import Decisions, decisions, merge
from opweave_conformance.graphs import MODELS, LeafDevices
from opweave_conformance.levels.beside import ask_split
from opweave_conformance.levels.operations import column
from opweave_conformance.result import Result
from opweave_conformance.trial import Trial, step_of, the_node

__all__ = ["path_checks"]

RUNS: Final = 16
"""Cases that are run for one value of a limit; at least one for each operation that reads it."""

SMALL: Final = 1 << 12
"""Elements of operands: with a limit at 1, larger ones may take a call for each element."""

MOST: Final = 48
"""Operations whose cases are run at most for a value of a limit that is not its first one."""

T = TypeVar("T")

VALUES: Final = ("1", "smallest", "few", "largest", "never")
"""Values that all limits are set to at once; see `Limit.values`."""

OTHERS: Final = ("as they are", "1", "largest")
"""Values of the other limits, in this order: some limits are only read on the far side of another one."""

SHARE: Final = 5
"""One case in so many, and the first of each operation in each type, are compiled to see which limits they read: all of
them only where a limit is left that none of those reads. Compiling takes some devices longer than running."""

Cases = Mapping[str, Sequence[Case]]
"""By operation."""


class Readers(NamedTuple):
    """What reads a limit.

    Attributes:
        others: one of `OTHERS`: what the other limits are then.
        cases: those whose kernels read it when they are bound.
        graphs: where no case does, names of `MODELS`: it decides about several steps, or about weights.
    """

    others: str
    cases: Cases
    graphs: Sequence[str] = ()


class Survey:
    """What reads the limits of one device, found out in passes of which each takes longer than the one before it, or
    is less likely to find any: only as many are made as are needed for the limits that are asked for.

    Attributes:
        sides: by the name of a limit: which sides of it cases took that were run so far, and how often.
    """

    def __init__(self) -> None:
        self.sides: Final[dict[str, Counter[str]]] = {}
        self._found: Final[dict[str, Readers]] = {}
        self._passes = 0

    def readers(self, device: Device, limit: str) -> Readers | None:
        """What reads a limit of the device; ``None``: nothing."""
        if limit in self._found:
            return self._found[limit]
        third = [name for name, op in OPS.items() if op.family == "third-party"]
        cases = (*CASES, *cases_for(*third))
        first_ones = {(case.op, column(case)): case for case in reversed(cases)}.values()
        few = {case.id: case for case in (*first_ones, *cases[::SHARE])}.values()
        passes: list[tuple[str, Collection[Case]]] = [
            (OTHERS[0], few),
            (OTHERS[0], cases),
            *((others, few) for others in OTHERS[1:]),
        ]
        while limit not in self._found and self._passes <= len(passes):
            if self._passes < len(passes):
                others, tried = passes[self._passes]
                with set_all(device, others):
                    found = {name: Readers(others, known) for name, known in _reading(device, tried).items()}
            else:
                found = {name: Readers(OTHERS[0], {}, graphs) for name, graphs in _reading_graphs(device).items()}
            self._found.update((name, readers) for name, readers in found.items() if name not in self._found)
            self._passes += 1
        return self._found.get(limit)


_surveys: Final[WeakKeyDictionary[Device, Survey]] = WeakKeyDictionary()


def path_checks(devices: Iterable[Device]) -> Iterator[Check]:
    """A check for each value of each limit of ``devices``, and for all limits at once."""
    limits = [limit for device in devices for limit in device.limits]
    for name, value in dict.fromkeys((limit.name, value) for limit in limits for value in limit.values()):
        about = f"Whatever way through a kernel {name} decides, results are right."
        yield Check(f"path-{name}-{value}", 2, about, partial(_ask_path, name, value))
    for value in VALUES if limits else ():
        about = "Whatever ways through kernels all limits together decide, results are right."
        yield Check(f"path-all-{value}", 2, about, partial(_ask_all, value))


def _ask_path(name: str, value: str, subject: Subject) -> Result:
    device = subject.device
    limit = next((limit for limit in device.limits if limit.name == name), None)
    values = list(limit.values()) if limit is not None else []
    if limit is None or value not in values:
        inapplicable("it has no such limit, or no such value of it")
    survey = _surveys.setdefault(device, Survey())
    readers = survey.readers(device, name)
    if readers is None:
        raise Mismatch(f"no case of the suite reads the limit {name}: none of its paths through a kernel is tried")
    about = f"with {name}={limit.values()[value]}, the other limits {readers.others}"
    with set_all(device, readers.others), limit.at(limit.values()[value]):
        with decisions() as taken:
            for graph in readers.graphs:
                ask_split(MODELS[graph], HostDevice(), subject)
        ran = _run(choose(readers.cases, values.index(value)), name, about, subject)
    ran.setdefault("graph", {})
    merge(ran["graph"], taken)
    paths = {op: found[name] for op, found in ran.items() if name in found}
    sides = survey.sides.setdefault(name, Counter())
    for counts in paths.values():
        sides.update(counts)
    if value == values[-1] and len(sides) == 1:
        (side,) = {"below", "above"} - set(sides)
        _run_side(limit, side, readers, paths, subject)
    return Result("passed", paths=paths)


def _run_side(limit: Limit, side: str, readers: Readers, paths: Decisions, subject: Subject) -> None:
    """Run a case that takes the side of a limit which those that were chosen have not taken, if there is one."""
    cases = [case for op in readers.cases for case in cases_for(op)]
    values = list(limit.values().values())
    for value in (values[0], values[-1]):
        about = f"with {limit.name}={value}, the other limits {readers.others}"
        with set_all(subject.device, readers.others), limit.at(value), subject.device.open() as stream:
            for case in cases:
                if side in _decided(stream, case).get(limit.name, {}):
                    taken = _run([Group((), [case], 1)], limit.name, about, subject)
                    merge(paths, {case.op: taken[case.op][limit.name]})
                    return


def _ask_all(value: str, subject: Subject) -> None:
    if not subject.device.limits:
        inapplicable("it has no limits")
    with set_all(subject.device, value):
        groups = choose(dict.fromkeys(CASES_OF, ()), VALUES.index(value), len(OPS))
        _run(groups, "", f"with all limits at {value!r}", subject)


def _run(groups: Sequence[Group], limit: str, about: str, subject: Subject) -> dict[str, Decisions]:
    """Run cases of each group until as many as are wanted have read the limit (any case, if it is ``""``); by
    operation, what they decided."""
    failed, found, read = [], dict[str, Decisions](), dict[str, bool]()
    for every, cases, wanted in groups:
        wanted -= sum(read.get(case.id, False) for case in every)
        for case in cases:
            if wanted <= 0:
                break
            if case.id in read:  # by a group before this one, and counted above
                continue
            with decisions() as taken:
                result = run_case(subject.device, case, subject.seed)
            merge(found.setdefault(case.op, {}), taken)
            read[case.id] = not limit or limit in taken
            if result.status == "failed":
                failed.append(f"{case.id}: {result.reason}")
            wanted -= read[case.id]
    expect(not failed, f"{about}, {len(failed)} of {len(read)} cases fail; {'; '.join(failed[:3])}")
    return found


class Group(NamedTuple):
    """Cases that have something in common, of which some are run.

    Attributes:
        every: all of them.
        cases: those that are tried, in this order, where those of groups before it are not enough.
        wanted: how many of those that read the limit are run.
    """

    every: Sequence[Case]
    cases: Sequence[Case]
    wanted: int


def choose(readers: Cases, nth: int, most: int = MOST) -> list[Group]:
    """Some cases of each operation, other ones for each value of a limit, of which this is the ``nth``: spread over the
    whole list, in which types, layouts and shapes follow each other. With the first value, which leads small operands
    the ways of large ones, there is one at least for each type and for each number of axes of each operation.

    Args:
        readers: cases that read the limit; others of their operations may do so too, and are tried first.
        most: operations at most, for all values but the first one.
    """
    groups: dict[tuple[str, str | int], tuple[list[Case], list[Case]]] = {}
    for op, known in readers.items():
        ids = {case.id for case in known}
        cases = cases_for(op)
        for case in [case for case in cases if _size(case) <= SMALL] or cases:
            shape = case.operands[0].shape if case.operands else ()
            for part in (column(case), len(shape)) if nth == 0 else ("",):
                every, sure = groups.setdefault((op, part), ([], []))
                every.append(case)
                if case.id in ids:
                    sure.append(case)
    wanted = max(1, RUNS // max(1, len(groups)))
    found = [
        Group(every, (*_spread(every, nth + turn, 3 * wanted), *sure[:1]), wanted)
        for turn, (every, sure) in enumerate(groups.values())
    ]
    # Where most operations read a limit, each value but the first is tried with some of them.
    return found if nth == 0 or len(found) <= most else _spread(found, nth, most)


def _size(case: Case) -> int:
    """Elements of the largest operand, or of the result where there are none."""
    return max([prod(operand.shape) for operand in case.operands] or [case.build().size])


def _spread(values: Sequence[T], turn: int, count: int) -> list[T]:
    """Some values from all over a list: each lies far from those before it, in a list of any length."""
    places = [int((turn * 0.381966 + i * 0.618034) % 1 * len(values)) for i in range(count)]
    return [values[place] for place in dict.fromkeys(places)]


@contextmanager
def set_all(device: Device, value: str) -> Iterator[None]:
    """A ``with`` block in which all limits of a device have one of the values of `OTHERS` or `VALUES`. A choice between
    a few ways, such as the instructions of kernels, is left as it is: it would hide most of what the others decide."""
    with ExitStack() as stack:
        for limit in device.limits if value != OTHERS[0] else ():
            values = limit.values()
            ends = list(values.values())
            if ends[-1] - ends[0] >= len(ends):
                stack.enter_context(limit.at(values.get(value, ends[0] if value in VALUES[:3] else ends[-1])))
        yield


def _reading(device: Device, cases: Iterable[Case]) -> dict[str, dict[str, list[Case]]]:
    """By the name of a limit and of an operation: the cases whose kernels read the limit."""
    found: dict[str, dict[str, list[Case]]] = {}
    with device.open() as stream:
        for case in cases:
            for name in _decided(stream, case):
                found.setdefault(name, {}).setdefault(case.op, []).append(case)
    return found


def _decided(stream: Stream, case: Case) -> Decisions:
    """What is decided where a case is compiled, in each precision."""
    node = the_node(case.build(*case.tensors()))
    rough = () if node.op is None else node.op.rough
    with decisions() as taken:
        for precision in ("exact", *rough):
            step = step_of(node, precision=precision)
            if stream.device.why_not(step) is None:
                _compile(Trial(stream, node, {}, precision), step)
    return taken


def _reading_graphs(device: Device) -> dict[str, list[str]]:
    """By the name of a limit: the graphs that read it where they are built."""
    found: dict[str, list[str]] = {}
    for graph, model in MODELS.items():
        with decisions() as taken, suppress(OpweaveError), Scheduler([device, HostDevice()]) as scheduler:
            scheduler.build(model.build(LeafDevices(None, None)))
        for name in taken:
            found.setdefault(name, []).append(graph)
    return found


def _compile(trial: Trial, step: Step) -> None:
    """Compile the step; what that raises is the matter of the case itself."""
    with suppress(OpweaveError), trial:
        (group,) = trial.stream.fuse([step])
        plan, _, _ = trial.compile(None, group.workspace)
        plan.close()
