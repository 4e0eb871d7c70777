"""The levels of the conformance suite other than kernels, on a registered backend."""

from __future__ import annotations

from opweave.contract import Backend
from opweave.registry import Registry
from opweave_conformance.suite import Suite

__all__ = ["GRAPHS", "failed"]

GRAPHS = ("products", "attention", "state-written", "layers")
"""Graphs of level 4 between whose devices everything is carried that can be."""


def failed(backend: type[Backend], *, beside: str) -> list[str]:
    """Names and reasons of the checks of levels 3 to 5 that fail, of level 4 those beside one second device."""
    registry = Registry(environ={}, search=[])
    name = registry.register(backend).name
    only = ["async-*", "worker-*", "fault-*", *[f"*-{beside}-{graph}" for graph in GRAPHS]]
    suite = Suite(name, levels=[3, 4, 5], only=only, using=registry, seconds=120)
    results = [suite.perform(item) for item in suite.items]
    assert {r.level for r in results if r.status == "passed"} == {3, 4, 5}
    return [f"{r.name}: {r.reason}" for r in results if r.status == "failed"]
