"""`Expectations`: the refusals and failures that ``conformance.toml`` lists as known."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

from opweave.contract import Call, Stream
from opweave.errors import OpweaveError
from opweave_conformance.result import Result

__all__ = ["FILE", "ConfigError", "Expectations"]

FILE: Final = "conformance.toml"
KEYS: Final = ("strict", "failing_call", "unsupported", "xfail")


class ConfigError(OpweaveError, ValueError):
    """A ``conformance.toml`` that cannot be read or does not make sense."""


class Expectations:
    """Patterns over the ids of checks, each with a reason::

        strict = true                       # every refusal has to be listed
        failing_call = "acme.tests:fail"    # of a stream: a call that queues work which the driver fails to do

        [unsupported]                       # refused on purpose
        "*-f64-*" = "the hardware has no doubles"

        [xfail]                             # accepted and wrong, for now
        "softmax-f16-129x3*" = "driver bug 4711, fixed in 2.4"

    Patterns are shell patterns (``*``, ``?``, ``[...]``), matched with the whole id, or with ``<device>/<id>`` for one
    device only. Every pattern has to match at least one check, and what it matches has to be refused, or to fail.

    Args:
        unsupported, xfail: pattern -> reason.
        strict: a refusal that no pattern lists is a failure.
        failing_call: what checks of the errors of queued work are made with; they are skipped without it.
    """

    def __init__(
        self,
        unsupported: Mapping[str, str] | None = None,
        xfail: Mapping[str, str] | None = None,
        strict: bool = False,
        failing_call: Callable[[Stream], Call] | None = None,
    ) -> None:
        self.unsupported: Final = dict(unsupported or {})
        self.xfail: Final = dict(xfail or {})
        self.strict: Final = strict
        self.failing_call: Final = failing_call
        self._matched: set[str] = set()

    @classmethod
    def read(cls, path: str | os.PathLike[str] | None = None) -> Expectations:
        """The file at ``path``; without one, ``conformance.toml`` in the current directory if it is there.

        Raises:
            ConfigError: it cannot be read, has unknown keys, or values of wrong types.
        """
        file = Path(path or FILE)
        if path is None and not file.is_file():
            return cls()
        try:
            document = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{file}: {error}") from None
        unknown = sorted(set(document) - set(KEYS))
        if unknown:
            raise ConfigError(f"{file}: there is no {', '.join(unknown)}; there are {', '.join(KEYS)}")
        strict = document.get("strict", False)
        if not isinstance(strict, bool):
            raise ConfigError(f"{file}: strict is true or false, not {strict!r}")
        failing = _function(file, document["failing_call"]) if "failing_call" in document else None
        return cls(_table(file, document, "unsupported"), _table(file, document, "xfail"), strict, failing)

    def judge(self, names: Iterable[str], result: Result) -> Result:
        """The result with the expectations applied: a listed refusal or failure is no failure; a listed check that runs
        or passes after all is one.

        Args:
            names: the names under which the check may be listed.
        """
        unsupported = self._find(self.unsupported, names)
        xfail = self._find(self.xfail, names)
        status, reason = result.status, result.reason
        if status in ("refused", "skipped"):
            if unsupported is not None:
                return result._replace(status="unsupported", reason=f"{unsupported} ({reason})")
            if xfail is not None:
                why = f"listed under [xfail] ({xfail}), but it is not run at all: {reason}; list it under [unsupported]"
                return result._replace(status="failed", reason=why)
            if self.strict and status == "refused":
                return result._replace(status="failed", reason=f"refused, and not listed under [unsupported]: {reason}")
            return result
        if unsupported is not None:
            but = "passes" if status == "passed" else f"fails: {reason}"
            why = f"listed under [unsupported] ({unsupported}), but the device runs it and it {but}"
            return result._replace(status="failed", reason=why)
        if xfail is None:
            return result
        if status == "failed":
            return result._replace(status="xfailed", reason=f"{xfail} ({reason})")
        return result._replace(status="failed", reason=f"listed under [xfail] ({xfail}), but it passes; unlist it")

    def note(self, names: Iterable[str]) -> None:
        """Note the patterns that match a check that was judged in another process."""
        for patterns in (self.unsupported, self.xfail):
            self._find(patterns, names)

    def unmatched(self) -> list[str]:
        """The patterns that have matched no check so far."""
        return [pattern for pattern in (*self.unsupported, *self.xfail) if pattern not in self._matched]

    def _find(self, patterns: Mapping[str, str], names: Iterable[str]) -> str | None:
        """The reason of the first pattern that matches; all that do are noted."""
        found: str | None = None
        for pattern, reason in patterns.items():
            if any(fnmatchcase(name, pattern) for name in names):
                self._matched.add(pattern)
                found = found or reason
        return found


def _function(file: Path, name: Any) -> Callable[[Stream], Call]:
    try:
        found = resolve_name(name)
    except Exception as error:
        raise ConfigError(f"{file}: failing_call is the name of a function, as module:function: {error}") from error
    if not callable(found):
        raise ConfigError(f"{file}: failing_call names {name}, which is no function")
    function: Callable[[Stream], Call] = found
    return function


def _table(file: Path, document: Mapping[str, Any], name: str) -> dict[str, str]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f'{file}: [{name}] is a table of "pattern" = "reason"')
    for pattern, reason in table.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"{file}: [{name}] {pattern!r} needs a reason, a text that says why")
    return table
