"""The commands ``opweave profile`` and ``opweave what-if``: their arguments and options."""

from __future__ import annotations

from typing import Annotated

import typer

from opweave.cli.options import Json
from opweave.cli.probe import leave_out_deadly
from opweave_cost.profile_command import show_profiles
from opweave_cost.what_if_command import show_what_if

__all__ = ["profile", "what_if"]


def profile(
    devices: Annotated[list[str] | None, typer.Argument(help="Devices; default: all.", metavar="DEVICE")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again what was measured before.")] = False,
    as_json: Json = False,
) -> None:
    """Measure how long steps and transfers take on each device, for placement by cost, and keep the figures."""
    leave_out_deadly(devices or ())
    show_profiles(devices or (), refresh=refresh, as_json=as_json)


def what_if(
    graph: Annotated[str, typer.Argument(help="FILE.py:FUNCTION; the function returns the outputs.", metavar="GRAPH")],
    cluster: Annotated[str, typer.Argument(help="A TOML file that describes the devices.", metavar="CLUSTER")],
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Minimize the time between overlapping runs, not that of one run.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Measure the graph's steps on real devices that groups are like (like = ...); else by their profiles.",
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Predict time and memory of a graph on simulated devices. Exits with 1 if their memory does not suffice."""
    leave_out_deadly()
    if not show_what_if(graph, cluster, pipeline=pipeline, measure=measure, as_json=as_json):
        raise typer.Exit(1)
