"""Is it right? Devices and doctor, every family of operations, the conformance suite, the tests that need a card."""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any, Final

import numpy as np

import opweave as ow
from benchmarks._measure import machine
from benchmarks.card.part import Context

__all__ = ["conformance", "devices", "opencl", "sample", "smoke", "tests"]

ROOT: Final = Path(__file__).resolve().parents[2]
RESERVE: Final = 2.0
"""Seconds before its limit at which a part of the suite ends, in the middle of a check if need be."""

WHOLE: Final = (0, 1, 3, 5)
SAMPLED: Final = (2, 4)


def devices(context: Context) -> None:
    """What is there, what works, what the doctor says."""
    from benchmarks.card.hardware import hardware
    from opweave.cli.devices import collect
    from opweave.registry import REGISTRY, State
    from opweave.tools.doctor import diagnose

    ow.device(context.device)  # raises why it cannot be used
    context.row("machine", **{**machine(), **hardware(context.device).facts()})
    for found in collect(features=True)["devices"]:
        problems, shown = found["problems"], ("name", "kind", "description", "memory_free", "memory_total", "features")
        context.row("devices", **{name: found[name] for name in shown if name in found})
        for problem in problems if found["name"] == context.device else ():
            context.failure(found["name"], problem)
    for record in ow.plugins():
        if not record.devices and record.state is not State.READY:
            context.row("plugins without devices", plugin=record.name, state=record.state.value, why=str(record.error))
    for plugin, diagnosis in diagnose(REGISTRY):
        if diagnosis.status != "ok":
            context.row("doctor", plugin=plugin, status=diagnosis.status, about=diagnosis.about,
                        message=diagnosis.message, remedy=diagnosis.remedy)  # fmt: skip
        if diagnosis.status == "wrong" and plugin == "torch":
            context.failure(f"doctor: {diagnosis.about}", diagnosis.message)


def smoke(context: Context) -> None:
    """A case of every operation, and a graph of every family, against the host."""
    from opweave.graph.opdef import OPS
    from opweave_conformance import CASES, run_case

    device = ow.device(context.device)
    first = {case.op: case for case in reversed(CASES) if case.operands and case.operands[0].dtype == "f32"}
    cases = {**{case.op: case for case in reversed(CASES)}, **first}
    counts: dict[str, Counter[str]] = {}
    for op, case in cases.items():
        context.begin(case.id)
        result = run_case(device, case, context.seed)
        counts.setdefault(OPS[op].family, Counter())[result.status] += 1
        if not result:
            context.failure(case.id, result.reason)
    for family, found in sorted(counts.items()):
        context.row("families", family=family, **found)
    _graphs(context)


def _graphs(context: Context) -> None:
    """The graphs of level 4, each on the device as far as it can and as a whole on the host."""
    from opweave_conformance.graphs import MODELS, LeafDevices

    host = ow.device("host")
    for name, model in MODELS.items():
        context.begin(name)
        results = []
        for where in ([ow.device(context.device), host], [host]):
            outputs = model.build(LeafDevices(where[0], where[0]))
            feeds = model.feeds(outputs, np.random.default_rng(context.seed))
            with ow.Scheduler(where) as scheduler:
                program = scheduler.build(outputs)
                results.append([np.asarray(array, np.float64) for array in program.run(feeds)])
                if where[0] is not host:
                    there = sum(program.device_of(node) is where[0] for node in program.partition.graph.nodes)
                    context.row("graphs", graph=name, nodes=len(program.partition.graph.nodes), on_device=there)
        for got, want in zip(*results, strict=True):
            if not np.allclose(got, want, rtol=2e-2, atol=2e-2, equal_nan=True):
                context.failure(name, f"differs by {np.nanmax(np.abs(got - want)):.2g} from the host")


# --- the suite ------------------------------------------------------------------------------------------------------


def conformance(context: Context) -> None:
    """Levels 0, 1, 3 and 5, all of their checks."""
    _suite(context, context.device, levels=(1,) if context.short else WHOLE, sample=False)


def sample(context: Context) -> None:
    """Levels 2 and 4 in an order of their own for each process, until the time is over."""
    _suite(context, context.device, levels=SAMPLED, sample=True)


def opencl(context: Context) -> None:
    """The same card by its OpenCL driver: a sample of all levels."""
    kinds = (ow.Kind.GPU, ow.Kind.IGPU) if not context.is_stand_in else (ow.Kind.CPU,)
    found = [d.name for d in ow.devices() if d.name.startswith("opencl:") and d.kind in kinds]
    if not found:
        states = [f"{r.name}: {r.error or r.state.value}" for r in ow.plugins() if r.name == "opencl"]
        context.absent(f"no such device of OpenCL ({'; '.join(states) or 'opweave-opencl is not installed'})")
    _suite(context, found[0], levels=(1,) if context.short else (0, 1, 2, 3, 4, 5), sample=True)


def _suite(context: Context, device: str, *, levels: tuple[int, ...], sample: bool) -> None:
    """Perform checks, and write how many there were, also where the time is over in the middle of one."""
    from opweave_conformance.suite import Suite

    suite = Suite(device, levels=levels, seed=context.seed + context.worker, sample=sample)
    counts: Counter[tuple[int, str]] = Counter()

    def write_counts() -> None:
        for level in levels:
            total = sum(item.check.level == level for item in suite.items)
            found = {status: n for (at, status), n in sorted(counts.items()) if at == level}
            context.row("conformance", device=device, level=level, process=context.worker, checks=total,
                        performed=sum(found.values()), **found)  # fmt: skip

    def end() -> None:
        write_counts()
        left_out = len(suite.items) - sum(counts.values()) - len(context.skip)
        if left_out and not sample:
            context.failure("all checks", f"{left_out} were not reached in {context.seconds:.0f} s")
        os._exit(0)

    limit = Timer(max(context.left - RESERVE, 0), end)
    limit.daemon = True
    limit.start()
    for item in suite.items:
        if item.name in context.skip:
            continue
        if context.short and sum(counts.values()) >= 20:
            break
        context.begin(item.name)
        result = suite.perform(item)
        counts[result.level, result.status] += 1
        if not result:
            context.failure(item.name, f"{result.reason}\n{result.repeat}")
            if "DeviceLostError" in result.reason:
                raise SystemExit(3)  # nothing works in this process any more; the next one goes on
        context.done(item.name)
    limit.cancel()
    write_counts()


# --- tests ----------------------------------------------------------------------------------------------------------


class _Reports:
    """A plugin of pytest that writes each failure when it happens."""

    def __init__(self, context: Context) -> None:
        self.context, self.counts = context, Counter[str]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.context.begin(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.context.failure(report.nodeid, f"{report.longrepr!s:.2000}")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.context.failure(report.nodeid, f"{report.longrepr!s:.2000}")


def tests(context: Context) -> None:
    """Those of ``tests/torch`` that need a card, but for those of kernels, which the suite tests."""
    import pytest

    files = ["test_cuda.py"] if context.short else ["test_cuda.py", "test_streams.py", "test_devices.py"]
    paths = [str(ROOT / "tests/torch" / name) for name in files]
    reports = _Reports(context)
    # This project's rule that warnings are errors is not about those of this machine's versions of torch.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", *(["-n", "0"] if find_spec("xdist") else [])]
    status = int(pytest.main([*paths, *options, "-k", "not test_kernels_of"], plugins=[reports]))
    context.row("tests", files=" ".join(files), **reports.counts)
    if status not in (0, 1) or not reports.counts:
        context.failure("pytest", f"ran {sum(reports.counts.values())} tests and ended with {status}")
