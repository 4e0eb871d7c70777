"""``opweave what-if``: predicts time and memory of a graph on simulated devices."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from opweave import registry
from opweave.cli.output import Row, print_json, print_rows, quiet_stdout
from opweave.errors import OpweaveError, SchedulerError, UnknownNameError
from opweave.scheduler.place.prediction import Prediction
from opweave.units import human_bytes, human_time
from opweave_cost.cluster import Cluster, read_cluster
from opweave_cost.divide import what_if
from opweave_cost.step_times import measure_nodes

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.graph.tensor import Tensor

__all__ = ["show_what_if"]

SHOWN = 8
"""Of a group with more devices than this, only the first and the last ones are shown."""


def show_what_if(graph: str, cluster: str, *, pipeline: bool, measure: bool, as_json: bool) -> bool:
    """Plan and print; returns whether the memory suffices.

    With ``measure``, the graph's steps are measured on the devices that groups are like, where these are here.

    Args:
        graph: ``FILE.py:function``; the function takes nothing and returns a tensor, several or a dict of them.
        cluster: a TOML file, see `opweave_cost.cluster`.

    Raises:
        SchedulerError, UnknownNameError: files or names that do not exist or are invalid, or the code of the graph
            raised an error.
        UnsupportedOpError: no group supports a node.
    """
    with quiet_stdout():
        registry.REGISTRY.make_devices()
        described = read_cluster(cluster)
        plan = what_if(_outputs(graph), described, pipeline=pipeline, measure=_measure if measure else None)
        predicted = plan.predicted
    sizes = {d.name: d.mem_info()[1] for d in (target.device for target in plan.partition.assignment.targets)}
    counts = dict.fromkeys(predicted.busy, 0)
    for split in plan.splits:
        counts[split.target.name] += len(split.steps)
    if as_json:
        print_json(_as_json(described, predicted, sizes, counts))
    else:
        _print(described, predicted, sizes, counts, plan.n_copies)
    return not predicted.short


def _measure(nodes: Iterable[Tensor], device: Device) -> None:
    try:
        measure_nodes(nodes, device)
    except OpweaveError as error:  # of memory, for one; predictions by the profile are there
        print(f"not measured on {device.name}, predicted by its profile: {error}", file=sys.stderr)


def _outputs(graph: str) -> Any:
    path, colon, name = graph.rpartition(":")
    if not colon or not path:
        raise SchedulerError(f"a graph is given as FILE.py:FUNCTION, not {graph!r}")
    if not Path(path).is_file():
        raise SchedulerError(f"there is no file {path!r}")
    spec = importlib.util.spec_from_file_location("opweave_what_if_graph", path)
    if spec is None or spec.loader is None:
        raise SchedulerError(f"{path!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        if not callable(function):
            raise UnknownNameError(f"function in {path}", name, [k for k, v in vars(module).items() if callable(v)])
        return function()
    except OpweaveError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise SchedulerError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        del sys.path[0]


def _as_json(cluster: Cluster, predicted: Prediction, sizes: dict[str, int], counts: dict[str, int]) -> dict[str, Any]:
    return {
        "seconds": predicted.seconds,
        "interval_seconds": predicted.interval,
        "copy_seconds": predicted.copies,
        "groups": [{"name": g.name, "count": g.count} for g in cluster.groups],
        "devices": [
            {
                "name": name,
                "steps": counts[name],
                "busy_seconds": busy,
                "memory": predicted.memory[name]._asdict(),
                "memory_total": sizes[name] or None,
                "lacks": predicted.short.get(name, 0),
            }
            for name, busy in predicted.busy.items()
        ],
    }


def _print(cluster: Cluster, predicted: Prediction, sizes: dict[str, int], counts: dict[str, int], copies: int) -> None:
    rows: list[Row] = []
    used: dict[str, int] = {}
    for group, members in groupby(predicted.busy, key=lambda name: _group_of(cluster, name)):
        names = list(members)
        used[group] = len(names)
        few = names if len(names) <= SHOWN else [*names[: SHOWN // 2], "", *names[-SHOWN // 2 :]]
        for name in few:
            if name:
                rows.append(_row(predicted, sizes, counts, name))
            else:
                hidden = names[SHOWN // 2 : -SHOWN // 2]
                longest = max(hidden, key=predicted.busy.__getitem__)
                rows.append(Row([Text(f"... {len(hidden)} more", "dim"), Text(""), Text(
                    f"<= {human_time(predicted.busy[longest])}", "dim"), Text(""), Text("")], []))  # fmt: skip
    print_rows(["device", "steps", "busy", "utilization", "memory used / total"], rows, indent=3)
    idle = [f"{g.count - used.get(g.name, 0)} of {g.name}" for g in cluster.groups if g.count > used.get(g.name, 0)]
    summary = [
        f"one run: {human_time(predicted.seconds)}, {human_time(predicted.copies)} of it for {copies} copies, "
        "inputs and results",
        f"overlapping runs: one every {human_time(predicted.interval)}",
    ]
    if idle:
        summary.append(f"not used: {', '.join(idle)}")
    if predicted.short:
        summary.append(f"out of memory: {len(predicted.short)} of {len(predicted.busy)} devices, "
                    f"{human_bytes(max(predicted.short.values()))} at most")  # fmt: skip
    print()
    print("\n".join(summary))


def _group_of(cluster: Cluster, name: str) -> str:
    return next((g.name for g in cluster.groups if name == g.name), name.rpartition(":")[0])


def _row(predicted: Prediction, sizes: dict[str, int], counts: dict[str, int], name: str) -> Row:
    busy, lacks, use = predicted.busy[name], predicted.short.get(name, 0), predicted.memory[name]
    share = busy / predicted.seconds if predicted.seconds else 0.0
    there = human_bytes(sizes[name]) if sizes[name] else "unlimited"
    details = [
        ("", Text(f"{human_bytes(use.weights)} weights, {human_bytes(use.temporaries)} temporaries, "
                  f"{human_bytes(use.states)} states", "dim"))
    ]  # fmt: skip
    if lacks:
        details.append(("lacks", Text(human_bytes(lacks), "red")))
    cells = [
        Text(name, "bold cyan"),
        Text(str(counts[name])),
        Text(human_time(busy)),
        Text(f"{share:.0%}"),
        Text(f"{human_bytes(sum(use))} / {there}", "red" if lacks else ""),
    ]
    return Row(cells, details)
