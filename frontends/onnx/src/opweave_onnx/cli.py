"""``opweave onnx``: commands that show, plan, run and compare ONNX models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.text import Text

from opweave.cli.options import Html, Json, writable_folder
from opweave.cli.output import Row, plain, print_json, print_rows, quiet_stdout
from opweave.errors import SchedulerError, UnknownNameError
from opweave.units import human_bytes, human_time

if TYPE_CHECKING:
    from opweave_onnx.graphs import Value
    from opweave_onnx.model import Model

__all__ = ["add_commands"]

_File = Annotated[str, typer.Argument(help="An ONNX file.", metavar="MODEL")]
_Devices = Annotated[
    str, typer.Option("--devices", metavar="A,B,...", help="Devices, earlier ones preferred; default: all usable ones.")
]
_Lengths = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=N", help="The length of a dynamic axis; repeatable. Default: 1."),
]
_Inputs = Annotated[
    list[str] | None, typer.Option("--input", metavar="NAME=FILE.npy", help="Values of an input; default: random.")
]


def add_commands(app: typer.Typer) -> None:
    """Add ``opweave onnx`` to the command line."""
    group = typer.Typer(name="onnx", help="Look at, plan, run and compare ONNX models.", no_args_is_help=True)
    group.command("info")(_info)
    group.command("plan")(_plan)
    group.command("run")(_run)
    group.command("compare")(_compare)
    app.add_typer(group)


def _loaded(model: str, devices: str) -> Model:
    from opweave_onnx.model import load  # imports the package onnx

    return load(model, [name.strip() for name in devices.split(",")] if devices else None)


def _pairs(given: list[str] | None, what: str, form: str) -> dict[str, str]:
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise SchedulerError(f"{what} is given as {form}, not {text!r}")
        found[name] = value
    return found


def _feeds(model: Model, dims: list[str] | None, inputs: list[str] | None) -> dict[str, Any]:
    from opweave_onnx.compare import examples

    lengths = {}
    axes = {axis for value in model.inputs for axis in value.shape or () if isinstance(axis, str)}
    for name, text in _pairs(dims, "--dim", "NAME=N").items():
        if name not in axes:
            raise UnknownNameError("dynamic axis", name, axes)
        if not text.isdigit():
            raise SchedulerError(f"the length of {name!r} is a number, not {text!r}")
        lengths[name] = int(text)
    feeds = examples(model, 0, **lengths)
    for name, path in _pairs(inputs, "--input", "NAME=FILE.npy").items():
        try:
            feeds[name] = np.load(path, allow_pickle=False)
        except OSError as error:
            raise SchedulerError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise SchedulerError(f"cannot read {path}: {error}") from None
    return feeds


def _shown(value: Value) -> dict[str, Any]:
    from opweave_onnx.tensors import dtype_of

    return {
        "name": value.name,
        "dtype": dtype_of(value.elem).name if value.elem else "",
        "shape": None if value.shape is None else list(value.shape),
    }


def _info(model: _File, as_json: Json = False) -> None:
    """Show inputs, outputs, operators, weights and metadata of a file, and the operators that opweave does not know."""
    from opweave_onnx.reading import read_model
    from opweave_onnx.session import missing_operators

    source = read_model(model)
    graph = source.graph
    counts = Counter(f"{n.domain}.{n.op}" if n.domain else n.op for n in graph.nodes)
    missing = {f"{d}.{op}" if d else op: [n.name for n in nodes]
               for (d, op), nodes in missing_operators(graph, source.functions).items()}  # fmt: skip
    nbytes = sum(a.nbytes for a in graph.initializers.values())
    if as_json:
        print_json({
            "path": model, "metadata": source.metadata,
            "versions": {k or "ai.onnx": v for k, v in source.versions.items()},
            "inputs": [_shown(v) for v in graph.inputs], "overridable": [_shown(v) for v in graph.defaults],
            "outputs": [_shown(v) for v in graph.outputs],
            "operators": dict(counts.most_common()), "missing": missing, "initializers": len(graph.initializers),
            "bytes": nbytes,
        })  # fmt: skip
        return
    rows = []
    for kind, values in (("input", graph.inputs), ("overridable", graph.defaults), ("output", graph.outputs)):
        for value in map(_shown, values):
            shape = (
                "?" if value["shape"] is None else "×".join("?" if n is None else str(n) for n in value["shape"]) or "-"
            )
            rows.append(Row([Text(value["name"], "bold cyan"), Text(kind), Text(value["dtype"]), Text(shape)], []))
    footer = [
        f"{len(graph.nodes)} nodes: " + ", ".join(f"{n} {op}" for op, n in counts.most_common()),
        f"{len(graph.initializers)} initializers, {human_bytes(nbytes)}",
        "operators: " + ", ".join(f"{k or 'ai.onnx'} {v}" for k, v in source.versions.items()),
        *[f"{key}: {value}" for key, value in source.metadata.items()],
        *[f"not known: {op} ({', '.join(names[:4])})" for op, names in missing.items()],
    ]
    print_rows(["name", "", "dtype", "shape"], rows, indent=3, footer="\n".join(footer))


def _plan(
    model: _File,
    devices: _Devices = "",
    dims: _Lengths = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Show where each node would run and why, and how much memory each device needs. No weights are loaded."""
    with quiet_stdout(), _loaded(model, devices) as loaded:
        planned = loaded.plan(_feeds(loaded, dims, None))
        explanation = planned.explain()
        memory = planned.memory
        lacking = _lacking(loaded, planned)
    if html is not None:
        explanation.save(html)
    if as_json:
        print_json({
            "path": model,
            "nodes": [row._asdict() for row in explanation.nodes],
            "copies": [row._asdict() for row in explanation.copies],
            "memory": {name: use._asdict() for name, use in memory.items()},
            "lacking": lacking,
        })  # fmt: skip
        return
    typer.echo(plain(str(explanation)))
    for name, use in memory.items():
        typer.echo(f"{name}: {human_bytes(use.weights)} weights, {human_bytes(use.temporaries)} temporaries")
    for name, operations in lacking.items():
        for op, reason in operations.items():
            typer.echo(plain(f"{name} does not run {op}: {reason}"))


def _lacking(model: Model, planned: Any) -> dict[str, dict[str, str]]:
    """Device -> operation of the graph that it does not run -> the reason for the first such node."""
    capabilities = planned.partition.assignment.capabilities
    found: dict[str, dict[str, str]] = {}
    for target in planned.partition.assignment.targets:
        for node in planned.partition.graph.nodes:
            if node.base is not None or node.op is None:
                continue
            reason = capabilities.support(target, node).reason
            if reason:
                found.setdefault(target.name, {}).setdefault(node.op.name, reason)
    return found


def _run(
    model: _File,
    devices: _Devices = "",
    dims: _Lengths = None,
    inputs: _Inputs = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs; the fastest is shown.")] = 1,
    folder: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Write each output as NAME.npy.", callback=writable_folder),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a model with random or given inputs, and show its outputs and times."""
    with quiet_stdout(), _loaded(model, devices) as loaded:
        feeds = _feeds(loaded, dims, inputs)
        start = perf_counter()
        results = loaded.run(feeds)
        first, building = perf_counter() - start, loaded.traced[1]
        times = []
        for _ in range(repeat):
            start = perf_counter()
            results = loaded.run(feeds)
            times.append(perf_counter() - start)
    arrays = {name: value for name, value in results.items() if isinstance(value, np.ndarray)}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            np.save(folder / f"{name.replace('/', '_')}.npy", array)
    seconds = {"first": first, "building": building, "fastest": min(times)}
    if as_json:
        print_json({
            "path": model, "seconds": seconds,
            "outputs": [{"name": k, "dtype": str(a.dtype), "shape": list(a.shape)} for k, a in arrays.items()],
        })  # fmt: skip
        return
    rows = [Row([Text(k, "bold cyan"), Text(str(a.dtype)), Text("×".join(map(str, a.shape)) or "-")], [])
            for k, a in arrays.items()]  # fmt: skip
    print_rows(["output", "dtype", "shape"], rows, indent=3,
               footer=f"first run {human_time(first)}, of which building the programs for these shapes "
                      f"{human_time(building)}; fastest {human_time(min(times))}")  # fmt: skip


def _compare(
    model: _File,
    devices: _Devices = "",
    dims: _Lengths = None,
    inputs: _Inputs = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="NMSE", min=0,
            help="Normalised mean square error up to which floats agree; default: 1e-9 for f32, 1e-5 for f16.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare the outputs with ONNX Runtime's, and the result of every node. Exits with 1 if outputs do not agree."""
    from opweave_onnx.compare import compare
    from opweave_onnx.model import load

    with quiet_stdout():
        names = [name.strip() for name in devices.split(",")] if devices else None
        with load(model, names) as loaded:
            feeds = _feeds(loaded, dims, inputs)
        found = compare(model, feeds, names, tolerance=tolerance)
    if as_json:
        first = found.first_divergence
        print_json({"path": model, "agree": bool(found), "first": first and first._asdict(),
                    "outputs": [row._asdict() for row in found.outputs],
                    "values": [row._asdict() for row in found.values]})  # fmt: skip
    else:
        typer.echo(plain(str(found)))
    if not found:
        raise typer.Exit(1)
