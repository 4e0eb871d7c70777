"""opweave: one compute graph, many devices.

``import opweave as ow`` gives everything that a person who runs graphs needs; authors of backends find the contract in
`opweave.contract` and `opweave.contract.kernels`, and what they need to read in ``docs/backend``.
"""

from typing import TYPE_CHECKING, Any

from opweave import names, ops
from opweave.lazy import later
from opweave.names import *
from opweave.ops import *

if TYPE_CHECKING:
    from opweave.backward import gradients as gradients
    from opweave.dlpack import from_dlpack as from_dlpack
    from opweave.formats.load import load_weights as load_weights
    from opweave.function import Function as Function
    from opweave.function import compile as compile
    from opweave.kv_cache import KVCache as KVCache
    from opweave.runtime.host.threads import ThreadPool as ThreadPool
    from opweave.sharding.placing import Sharded as Sharded
    from opweave.warning import OpweaveWarning as OpweaveWarning

__version__ = "0.1.0"

# What most programs never use is imported when it is first asked for.
_LATER = {
    "Function": "opweave.function",
    "KVCache": "opweave.kv_cache",
    "OpweaveWarning": "opweave.warning",
    "Sharded": "opweave.sharding.placing",
    "ThreadPool": "opweave.runtime.host.threads",
    "compile": "opweave.function",
    "from_dlpack": "opweave.dlpack",
    "load_weights": "opweave.formats.load",
    "gradients": "opweave.backward",
}

# What has become a package of its own, by the name that it had here; the distribution is named like the module.
_MOVED = {
    "add_relative_positions": "opweave_models.add_relative_positions",
    "col2im1d": "opweave_models.col2im1d",
    "combine": "opweave_combined.combine",
    "compare": "opweave_conformance.compare",
    "conformance": "opweave_conformance",
    "copy_graph": "opweave_cost.copy_graph",
    "hyper_connection_post": "opweave_models.hyper_connection_post",
    "hyper_connection_pre": "opweave_models.hyper_connection_pre",
    "measure_steps": "opweave_cost.measure_steps",
    "profile": "opweave_cost.profile",
    "profile_run": "opweave_cost.profile_run",
    "relative_positions": "opweave_models.relative_positions",
    "simulate": "opweave_cost.simulate",
    "trace": "opweave_cost.trace",
    "training": "opweave_training",
    "tune": "opweave_cost.tune",
    "window_partition": "opweave_models.window_partition",
    "window_unpartition": "opweave_models.window_unpartition",
}


if not TYPE_CHECKING:  # see opweave.ops
    _names = {*names.__all__, *ops.__all__, *_LATER}
    # Constants, then classes, then functions.
    __all__ = sorted(_names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


_find = later(__name__, _LATER)


def __getattr__(name: str) -> Any:
    if home := _MOVED.get(name):
        from opweave.packages import pip_install

        raise AttributeError(f"opweave.{name} is {home} now: {pip_install(home.partition('.')[0].replace('_', '-'))}")
    return _find(name)
