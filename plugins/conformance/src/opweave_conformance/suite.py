"""`Suite`: the checks of one backend, performed one by one by the command or by pytest, and their results."""

from __future__ import annotations

import shlex
import warnings
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from opweave import registry
from opweave.errors import UnknownNameError
from opweave.registry.naming import key
from opweave_conformance.checklist import Check, subject_for
from opweave_conformance.expectations import Expectations
from opweave_conformance.levels import CHECKS, LEVELS
from opweave_conformance.levels.beside import checks_with
from opweave_conformance.levels.operations import third_party_checks
from opweave_conformance.levels.paths import path_checks
from opweave_conformance.report import one_sided, paths
from opweave_conformance.result import Result
from opweave_conformance.watch import HANGS, SECONDS, within
from opweave_conformance.wording import number_of

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.registry.registry import Registry

__all__ = ["Item", "Suite"]

FIRST_LIMITED: Final = 3
"""From this level on checks wait for a device, which may hang: they have a timeout."""


class Item(NamedTuple):
    """A check and the device that it is performed on. ``name`` is the check's id, preceded by the device's name if
    there are several."""

    check: Check
    device: Device
    name: str


class Suite:
    """The checks of a backend or of one of its devices.

    Args:
        name: a backend's name, for all its devices, or a device's.
        levels: the levels to perform; default: all.
        only: patterns of ids; checks that match none are left out.
        seed: for all random values. Each check has a random generator of its own, so it is repeatable alone.
        expectations: checks that are known to be refused or to fail.
        config: the file that the expectations were read from, for the command that repeats a check.
        beside: name of a further second device for level 4.
        seconds: timeout of a check of level 3 and above.
        sample: order the checks at random, by the seed, so that the first ones are a sample of all: each operation in
            each type comes once before any comes twice. The caller may stop performing at any check.
        using: the registry that has the backend; default: that of the process.

    Attributes:
        items: the checks to perform.
        results: the results so far.

    Raises:
        UnknownNameError: no such backend, device or level, or a pattern that no check matches.
        PluginError: the backend's plugin cannot be used.
    """

    def __init__(
        self,
        name: str,
        *,
        levels: Sequence[int] = (),
        only: Sequence[str] = (),
        seed: int = 0,
        expectations: Expectations | None = None,
        config: str = "",
        beside: str = "",
        seconds: float = SECONDS,
        sample: bool = False,
        using: Registry | None = None,
    ) -> None:
        found = using or registry.REGISTRY
        for level in levels:
            if level not in LEVELS:
                raise UnknownNameError("level", str(level), [str(n) for n in LEVELS])
        self.name: Final = name
        self.seed: Final = seed
        self.expectations: Final = expectations or Expectations()
        self.backend: Final = found.backend(name.partition(":")[0])
        record = next(
            r for r in found.plugins() if any(key(d.partition(":")[0]) == key(self.backend.name) for d in r.devices)
        )
        mine = [found.device(d) for d in record.devices if key(d.partition(":")[0]) == key(self.backend.name)]
        self.record: Final = record._replace(devices=tuple(d.name for d in mine))
        self.devices: Final = tuple([found.device(name)] if ":" in name else mine)
        self.levels: Final = tuple(sorted(set(levels))) or tuple(LEVELS)
        self.only: Final = tuple(only)
        self.beside: Final = beside
        self.seconds: Final = seconds
        self._config = config
        self._checks = (*CHECKS, *third_party_checks(self.devices), *path_checks(self.devices))
        if beside:
            self._checks += checks_with(f"beside-{beside}", partial(found.device, beside))
            found.device(beside)
        self.sample: Final = sample
        self.items: Final = self._sampled(self._select()) if sample else self._select()
        self.results: Final[list[Result]] = []

    @property
    def filtered(self) -> bool:
        """Whether the arguments leave checks out."""
        return self.sample or bool(self.only) or self.levels != tuple(LEVELS) or ":" in self.name

    @property
    def hung(self) -> bool:
        """Whether a check did not end: its thread may keep the process from ending."""
        return any(o.status in ("failed", "xfailed") and HANGS in o.reason for o in self.results)

    def _select(self) -> list[Item]:
        ids = [check.id for check in self._checks]
        for pattern in self.only:
            if not any(fnmatchcase(id, pattern) for id in ids):
                raise UnknownNameError(
                    "check", pattern, ids, "--only takes ids of checks, and patterns as 'add-f32-*'."
                )
        several = len(self.devices) > 1
        items: list[Item] = []
        for check in self._checks:
            if check.level not in self.levels:
                continue
            if self.only and not any(fnmatchcase(check.id, pattern) for pattern in self.only):
                continue
            for device in self.devices if check.per_device else self.devices[:1]:
                name = f"{device.name}/{check.id}" if several and check.per_device else check.id
                items.append(Item(check, device, name))
        return items

    def _sampled(self, items: list[Item]) -> list[Item]:
        shuffled = [items[k] for k in np.random.default_rng(self.seed).permutation(len(items))]
        seen: Counter[tuple[str, str, str]] = Counter()
        rounds: list[int] = []
        for check, device, _ in shuffled:
            group = (device.name, check.op or check.id, check.dtype)
            rounds.append(seen[group])
            seen[group] += 1
        return [shuffled[k] for k in sorted(range(len(items)), key=rounds.__getitem__)]

    def perform(self, item: Item) -> Result:
        """Perform one check and note its result."""
        check, device = item.check, item.device
        failing = self.expectations.failing_call
        subject = subject_for(check.id, self.record, self.backend, self.devices, device, self.seed, failing)
        with warnings.catch_warnings():
            # A test runner that turns warnings into errors must not change the result.
            warnings.simplefilter("ignore")
            if check.level < FIRST_LIMITED:
                result = check.perform(subject)
            else:
                result = within(self.seconds, device, partial(check.perform, subject))
        result = self.expectations.judge((check.id, f"{device.name}/{check.id}"), result)
        result = result._replace(
            id=check.id, level=check.level, op=check.op, dtype=check.dtype, name=item.name, device=device.name,
            repeat=self._command(check, device),
        )  # fmt: skip
        self.results.append(result)
        return result

    def note(self, result: Result) -> None:
        """Add a result of `perform` of an equal suite in another process."""
        self.expectations.note((result.id, f"{result.device}/{result.id}"))
        self.results.append(result)

    def _command(self, check: Check, device: Device) -> str:
        """The command that performs a check alone."""
        target = device.name if check.per_device else self.name
        words = ["opweave", "conformance", target, "--only", check.id, "--seed", str(self.seed)]
        if self.beside:
            words += ["--beside", self.beside]
        if self._config:
            words += ["--config", self._config]
        return shlex.join(words)

    def problems(self, filtered: bool | None = None) -> list[str]:
        """What is wrong with the run as a whole, once everything was performed.

        Args:
            filtered: whether checks were left out by the caller too.
        """
        found: list[str] = []
        if not any(o.status in ("passed", "failed", "xfailed") for o in self.results):
            count = len(self.results)
            why = (
                f"{number_of(count, 'check')} selected, all refused or skipped"
                if count
                else "no check of these levels is selected"
            )
            found.append(f"nothing was run: {why}")
        elif 2 in self.levels and not (self.filtered if filtered is None else filtered or self.filtered):
            for device in self.devices:
                cases = [o for o in self.results if o.op and o.device == device.name]
                if not any(o.status in ("passed", "failed", "xfailed") for o in cases):
                    found.append(f"{device.name} ran none of {number_of(len(cases), 'case')}")
        if not (self.filtered if filtered is None else filtered or self.filtered):
            for name, limits in paths(self.results).items():
                found += [
                    f"{name}: no case of the suite reaches the way of its kernels {side} the limit {limit}"
                    for limit, side in one_sided(limits).items()
                ]
            found += [f"the pattern {p!r} matches nothing; remove it" for p in self.expectations.unmatched()]
        return found
