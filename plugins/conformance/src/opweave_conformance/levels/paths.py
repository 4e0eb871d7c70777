"""Level 2: every path of every kernel. Each limit of a device (`opweave.contract.Limit`) is set to small and large
values, and cases of the operations that read it are run, so that small operands go every way through a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from opweave.contract import Device, Step
from opweave.contract.tunable import limits_read
from opweave.errors import OpweaveError
from opweave.graph.opdef import OPS
from opweave.runtime.host.device import HostDevice
from opweave.scheduler import Scheduler
from opweave_conformance.case import Case
from opweave_conformance.cases import CASES, cases_for
from opweave_conformance.check import run_case
from opweave_conformance.checklist import Check, Mismatch, Subject, expect, inapplicable
from opweave_conformance.graphs import MODELS, LeafDevices
from opweave_conformance.levels.beside import ask_split
from opweave_conformance.levels.operations import column
from opweave_conformance.trial import Trial, step_of, the_node

__all__ = ["path_checks"]

RUNS: Final = 16
"""Cases that are run for one value of a limit; at least one for each operation that reads it."""

VALUES: Final = ("1", "smallest", "largest", "never")

OTHERS: Final = ("as they are", "1", "largest")
"""Values of the other limits, in this order: some limits are only read on the far side of another one."""

SHARE: Final = 5
"""One case in so many is compiled with the other limits at extreme values, which takes a compiler long."""

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


_readers: Final[WeakKeyDictionary[Device, Mapping[str, Readers]]] = WeakKeyDictionary()


def path_checks(devices: Iterable[Device]) -> Iterator[Check]:
    """A check for each value of each limit of ``devices``, and for all limits at once."""
    limited = [device for device in devices if device.limits]
    for name in dict.fromkeys(limit.name for device in limited for limit in device.limits):
        for value in VALUES:
            about = f"Whatever way through a kernel {name} decides, results are right."
            yield Check(f"path-{name}-{value}", 2, about, partial(_ask_path, name, value))
    for value in VALUES if limited else ():
        about = "Whatever ways through kernels all limits together decide, results are right."
        yield Check(f"path-all-{value}", 2, about, partial(_ask_all, value))


def _ask_path(name: str, value: str, subject: Subject) -> None:
    device = subject.device
    limit = next((limit for limit in device.limits if limit.name == name), None)
    if limit is None:
        inapplicable("it has no such limit")
    if value not in limit.values():
        inapplicable("its bounds make that one of the other values")
    readers = readers_of(device).get(name)
    if readers is None:
        raise Mismatch(f"no case of the suite reads the limit {name}: none of its ways through a kernel is tried")
    about = f"with {name}={limit.values()[value]}, the other limits {readers.others}"
    with set_all(device, readers.others), limit.at(limit.values()[value]):
        for graph in readers.graphs:
            ask_split(MODELS[graph], HostDevice(), subject)
        _run(choose(readers.cases, value), about, subject)


def _ask_all(value: str, subject: Subject) -> None:
    if not subject.device.limits:
        inapplicable("it has no limits")
    cases: dict[str, list[Case]] = {}
    for case in CASES:
        cases.setdefault(case.op, []).append(case)
    with set_all(subject.device, value):
        _run(choose(cases, value), f"with all limits at {value!r}", subject)


def _run(cases: Sequence[Case], about: str, subject: Subject) -> None:
    failed = []
    for case in cases:
        result = run_case(subject.device, case, subject.seed)
        if result.status == "failed":
            failed.append(f"{case.id}: {result.reason}")
    expect(not failed, f"{about}, {len(failed)} of {len(cases)} cases fail; {'; '.join(failed[:3])}")


def choose(readers: Cases, value: str) -> list[Case]:
    """Some cases of each operation, other ones for each value of a limit: spread over the whole list, in which types,
    layouts and shapes follow each other. With 1, which leads small operands the ways of large ones, there is one at
    least for each type of each operation."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for op, cases in readers.items():
        for case in cases:
            groups.setdefault((op, column(case) if value == VALUES[0] else ""), []).append(case)
    each = max(1, RUNS // max(1, len(groups)))
    chosen = []
    for turn, cases in enumerate(groups.values(), VALUES.index(value)):
        count = min(each, len(cases))
        # Primes far apart: neighbours in the list of groups, and of values, do not choose cases of one layout.
        chosen += [cases[(i * len(cases) // count + 7 * turn) % len(cases)] for i in range(count)]
    return list(dict.fromkeys(chosen))


@contextmanager
def set_all(device: Device, value: str) -> Iterator[None]:
    """A ``with`` block in which all limits of a device have one of the values of `OTHERS` or `VALUES`."""
    with ExitStack() as stack:
        for limit in device.limits if value != OTHERS[0] else ():
            values = limit.values()
            stack.enter_context(limit.at(values.get(value, values["1"])))
        yield


def readers_of(device: Device) -> Mapping[str, Readers]:
    """By the name of a limit: what reads it."""
    if device not in _readers:
        third = [name for name, op in OPS.items() if op.family == "third-party"]
        cases = (*CASES, *cases_for(*third))
        found: dict[str, Readers] = {}
        for others in OTHERS:
            with set_all(device, others):
                for name, reading in _reading(device, cases if others == OTHERS[0] else cases[::SHARE]).items():
                    found.setdefault(name, Readers(others, reading))
            if len(found) == len(device.limits):
                break
        else:
            for name, graphs in _reading_graphs(device).items():
                found.setdefault(name, Readers(OTHERS[0], {}, graphs))
        _readers[device] = found
    return _readers[device]


def _reading(device: Device, cases: Iterable[Case]) -> dict[str, dict[str, list[Case]]]:
    """By the name of a limit and of an operation: the cases whose kernels read the limit."""
    found: dict[str, dict[str, list[Case]]] = {}
    with device.open() as stream:
        for case in cases:
            node = the_node(case.build(*case.tensors()))
            rough = () if node.op is None else node.op.rough
            with limits_read() as limits:
                for precision in ("exact", *rough):
                    step = step_of(node, precision=precision)
                    if device.why_not(step) is None:
                        _compile(Trial(stream, node, {}, precision), step)
            for limit in limits:
                found.setdefault(limit.name, {}).setdefault(case.op, []).append(case)
    return found


def _reading_graphs(device: Device) -> dict[str, list[str]]:
    """By the name of a limit: the graphs that read it where they are built."""
    found: dict[str, list[str]] = {}
    for name, model in MODELS.items():
        with limits_read() as limits, suppress(OpweaveError), Scheduler([device, HostDevice()]) as scheduler:
            scheduler.build(model.build(LeafDevices(None, None)))
        for limit in limits:
            found.setdefault(limit.name, []).append(name)
    return found


def _compile(trial: Trial, step: Step) -> None:
    """Compile the step; what that raises is the matter of the case itself."""
    with suppress(OpweaveError), trial:
        (group,) = trial.stream.fuse([step])
        plan, _, _ = trial.compile(None, group.workspace)
        plan.close()
