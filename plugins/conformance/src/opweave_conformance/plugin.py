"""The suite under pytest::

    pytest --pyargs opweave_conformance --opweave-backend NAME

Options are those of the command ``opweave conformance``, prefixed with ``opweave-``. pytest's own selection (``-k``,
node ids) works too; a run that leaves tests out does not fail for unmatched patterns. With pytest-xdist, which is not
needed, the processes that perform checks send their results to the one that reports.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

# pytest imports this module in every environment that has the package: all else waits until a backend is named.
if TYPE_CHECKING:
    from opweave_conformance.suite import Suite

__all__ = ["SUITE"]

SUITE: Final[pytest.StashKey[Suite]] = pytest.StashKey()
_SELECTED: Final = pytest.StashKey[int]()
_SENT: Final = "opweave_conformance"
"""What a process of pytest-xdist sends: how many checks are selected, and the results of those that it performed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("opweave", "conformance of a backend of opweave")
    group.addoption("--opweave-backend", metavar="NAME", help="the backend or device to test")
    group.addoption("--opweave-level", metavar="N", type=int, action="append", default=[], help="only this level (0-5)")
    group.addoption("--opweave-only", metavar="PATTERN", action="append", default=[], help="only checks that match")
    group.addoption("--opweave-seed", metavar="N", type=int, default=0, help="seed of all random values (default 0)")
    group.addoption("--opweave-sample", metavar="N", type=int, help="only N checks, of all operations")
    group.addoption("--opweave-config", metavar="FILE", help="default: conformance.toml in the current directory")
    group.addoption("--opweave-beside", metavar="DEVICE", default="", help="a further second device for level 4")
    group.addoption("--opweave-timeout", metavar="SECONDS", type=float, help="timeout of a check from level 3 on")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--opweave-backend")
    if not name:
        return
    from opweave.errors import OpweaveError
    from opweave_conformance import suite
    from opweave_conformance.expectations import Expectations
    from opweave_conformance.watch import SECONDS

    file, sample = config.getoption("--opweave-config"), config.getoption("--opweave-sample")
    try:
        config.stash[SUITE] = suite.Suite(
            name,
            levels=config.getoption("--opweave-level"),
            only=config.getoption("--opweave-only"),
            seed=config.getoption("--opweave-seed"),
            expectations=Expectations.read(file),
            config=file or "",
            beside=config.getoption("--opweave-beside"),
            seconds=config.getoption("--opweave-timeout") or SECONDS,
            sample=sample is not None,
        )
        if sample is not None:
            del config.stash[SUITE].items[sample:]
    except OpweaveError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header(config: pytest.Config) -> list[str]:
    suite = config.stash.get(SUITE, None)
    if suite is None:
        return []
    devices = ", ".join(device.name for device in suite.devices)
    return [f"opweave conformance: {suite.name} ({devices}), {len(suite.items)} checks, seed {suite.seed}"]


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_SELECTED] = sum("conformance_item" in getattr(i, "fixturenames", ()) for i in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    suite = node.config.stash.get(SUITE, None)
    sent = getattr(node, "workeroutput", {}).get(_SENT)  # nothing, if the process crashed
    if suite is not None and sent is not None:
        from opweave_conformance.result import Result

        node.config.stash[_SELECTED], results = json.loads(sent)
        for result in results:
            suite.note(Result(*result))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output, suite = getattr(session.config, "workeroutput", None), session.config.stash.get(SUITE, None)
    if output is not None:
        if suite is not None:
            output[_SENT] = json.dumps((session.config.stash.get(_SELECTED, 0), suite.results))
        return
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and _problems(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for problem in _problems(config):
        terminalreporter.write_line(f"opweave conformance: {problem}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    suite = config.stash.get(SUITE, None)
    if suite is not None and suite.hung:
        from opweave_conformance.watch import leave

        leave(int(pytest.ExitCode.TESTS_FAILED))


def _problems(config: pytest.Config) -> Sequence[str]:
    suite = config.stash.get(SUITE, None)
    if suite is None or config.option.collectonly:
        return ()
    left_out = config.stash.get(_SELECTED, 0) < len(suite.items)
    return suite.problems(filtered=left_out)
