"""Asking plugins in a process of their own, so that one that crashes, exits or hangs cannot take the command down.

The question is asked with all plugins at once. Where that process dies, or with ``--isolated``, each plugin is asked
alone, which shows whose fault it is; then the question is asked again without those.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, Final

from opweave import registry
from opweave.cli.output import plain, quiet_stdout, to_json
from opweave.errors import Broken, OpweaveError
from opweave.registry import State
from opweave.registry.isolation import CHILD_SECONDS, Death, run_child

__all__ = ["SECONDS", "answer", "ask", "collect", "leave_out_deadly"]

SECONDS: Final = 20.0
"""How long one process may take by default that is asked for a command with ``--timeout``."""

_QUESTIONS: Final = ("devices", "doctor", "extensions", "plugins")
"""Names of the modules beside this one with a function ``collect(**options)``, which gives a document."""


def ask(question: str, *, isolated: bool = False, seconds: float = SECONDS, **options: Any) -> dict[str, Any]:
    """The document that answers ``question``, whatever plugins do.

    Args:
        question: one of ``"devices"``, ``"doctor"``, ``"extensions"``, ``"plugins"``.
        isolated: ask each plugin alone first.
        seconds: how long a process may take.
        options: of the question's ``collect``.

    Raises:
        OpweaveError: the process dies although no plugin by itself is the cause.
    """
    if not isolated:
        first = _in_child(question, options, {}, seconds)
        if not isinstance(first, Death):
            return first
        print(f"opweave: {first.how}; each plugin is asked in a process of its own", file=sys.stderr)
    excluded = _deadly(question, options, _untried(), seconds)
    found = _in_child(question, options, excluded, seconds)
    if isinstance(found, Death):
        raise OpweaveError(
            f"{found.how}, and no plugin does so alone; try some of them together: OPWEAVE_BACKENDS=cpu,... opweave "
            f"{question}"
        )
    return found


def leave_out_deadly(names: Collection[str] = (), question: str = "plugins") -> None:
    """Load plugins in another process first; those that take it down are not run in this one, and named on
    standard error. For commands that use devices themselves.

    Args:
        names: of plugins or their devices; none: every plugin.
        question: what they are asked: ``"extensions"``, where the command uses their hooks, and no devices.
    """
    wanted = {name.partition(":")[0] for name in names}
    untried = [name for name in _untried() if not wanted or name in wanted]
    # What they print there is printed again here.
    if untried and isinstance(_in_child(question, {}, {}, CHILD_SECONDS, only=",".join(untried), quiet=True), Death):
        for name, why in _deadly(question, {}, untried, CHILD_SECONDS).items():
            print(plain(f"opweave: without plugin {name!r}: {why}"), file=sys.stderr)
            _exclude(name, why)


def _untried() -> list[str]:
    """Names of the plugins that would be run if they were asked."""
    return [record.name for record in registry.REGISTRY.plugins() if record.state is State.DISCOVERED]


def _deadly(question: str, options: Mapping[str, Any], names: Collection[str], seconds: float) -> dict[str, str]:
    """Those of the plugins ``names`` that take a process down in which each is asked alone, and how."""
    found: dict[str, str] = {}
    for name in names:
        alone = _in_child(question, options, {}, seconds, only=name)
        if isinstance(alone, Death):
            found[name] = f"{alone.how} while it was loaded and asked in a process of its own"
    return found


def _exclude(name: str, why: str) -> None:
    remedy = f"update or uninstall it; OPWEAVE_DISABLE={name} goes on without it"
    if "did not answer" in why:
        remedy += ", --timeout waits longer"
    registry.REGISTRY.exclude(name, Broken(why, remedy=remedy))


def collect(question: str, options: Mapping[str, Any], excluded: Mapping[str, str]) -> dict[str, Any]:
    """The document, asked in this process.

    Args:
        excluded: names of plugins that are not run, and why.
    """
    with quiet_stdout():
        for name, why in excluded.items():
            _exclude(name, why)
        try:
            found = import_module(f"opweave.cli.{question}").collect(**options)
        except OpweaveError as error:
            found = {"failed": "\n".join([str(error), *getattr(error, "__notes__", ())])}
    return to_json(found)  # type: ignore[no-any-return]


def answer(asked: Mapping[str, Any], out: int) -> None:
    """Answer what the parent process asked."""
    document = json.dumps(collect(asked["question"], asked["options"], asked["excluded"]))
    with open(out, "w", encoding="ascii", closefd=False) as file:
        file.write(document)


def _in_child(
    question: str,
    options: Mapping[str, Any],
    excluded: Mapping[str, str],
    seconds: float,
    *,
    only: str = "",
    quiet: bool = False,
) -> dict[str, Any] | Death:
    assert question in _QUESTIONS
    asked = {"question": question, "options": options, "excluded": excluded}
    environ = {**os.environ, "OPWEAVE_BACKENDS": only} if only else os.environ
    told = run_child("from opweave.cli.probe import answer; answer(asked, out)", asked, seconds, environ, quiet=quiet)
    if isinstance(told, Death):
        return told
    found: dict[str, Any] = json.loads(told)
    return found
