"""Collected by ``pytest --pyargs opweave_conformance``: one test for each check of the suite, see `plugin`."""

from __future__ import annotations

import pytest

from opweave_conformance.plugin import SUITE
from opweave_conformance.suite import Item


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    suite = metafunc.config.stash.get(SUITE, None)
    if suite is None:
        raise pytest.UsageError("say which backend: --opweave-backend NAME")
    metafunc.parametrize("conformance_item", suite.items, ids=[item.name for item in suite.items])


def test_conformance(conformance_item: Item, pytestconfig: pytest.Config) -> None:
    result = pytestconfig.stash[SUITE].perform(conformance_item)
    if result.status in ("refused", "skipped", "unsupported"):
        pytest.skip(result.reason)
    if result.status == "xfailed":
        pytest.xfail(result.reason)
    if result.status == "failed":
        pytest.fail(f"{result.reason}\nrepeat: {result.repeat}", pytrace=False)
