"""Placement by predicted cost, profiles of devices, and planning with simulated ones.

``profile`` measures a device once, ``tune`` and ``measure_steps`` measure a graph, ``profile_run`` the parts of a
program's runs, ``trace`` records a timeline; ``copy_graph`` makes a graph again with states of its own, ``simulate`` a
device of figures. With this package installed, ``opweave.Scheduler(placement="cost")`` and ``Program.predicted`` work.
"""

from typing import TYPE_CHECKING

from opweave.lazy import later

if TYPE_CHECKING:
    from opweave_cost.autotune import tune as tune
    from opweave_cost.graph_copy import copy_graph as copy_graph
    from opweave_cost.run_parts import profile_run as profile_run
    from opweave_cost.simulation import simulate as simulate
    from opweave_cost.step_times import measure_steps as measure_steps
    from opweave_cost.store import profile as profile
    from opweave_cost.timeline import trace as trace

__all__ = ["copy_graph", "measure_steps", "profile", "profile_run", "simulate", "trace", "tune"]

# The hooks of this package are imported by commands that never measure.
_HOMES = {
    "copy_graph": "opweave_cost.graph_copy",
    "measure_steps": "opweave_cost.step_times",
    "profile": "opweave_cost.store",
    "profile_run": "opweave_cost.run_parts",
    "simulate": "opweave_cost.simulation",
    "trace": "opweave_cost.timeline",
    "tune": "opweave_cost.autotune",
}

__getattr__ = later(__name__, _HOMES)
