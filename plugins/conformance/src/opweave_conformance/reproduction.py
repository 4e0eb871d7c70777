"""Writes a script that runs one node on two devices, and its data; the script needs opweave and NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import PurePath
from typing import Any

import numpy as np

from opweave.graph.graph import Graph
from opweave.graph.tensor import Tensor

__all__ = ["write_script"]

SCRIPT = '''"""One node on two devices: {what}

Written by opweave_conformance.compare; the graph and its data are in {data} beside this file.
"""

from pathlib import Path

import numpy as np

import opweave as ow
from opweave.tools.distance import distance

data = np.load(Path(__file__).with_suffix(".npz"))


def result(device):
    graph = ow.Graph.from_bytes(data["graph"])
    inputs = [leaf for leaf in graph.leaves if leaf.name in data]
    with ow.Scheduler(device) as scheduler:
        program = scheduler.build(graph.outputs[0])
        return program.run({{x: data[x.name].view(x.dtype.numpy).reshape(x.shape) for x in inputs}})


first, second = {devices!r}
want, got = result(first), result(second)
nmse, largest, worst, _ = distance(got, want)
print(f"{{second}} against {{first}}: normalised mean square error {{nmse:.2e}}, largest error {{largest:.2e}}")
if got.tobytes() != want.tobytes():
    at = tuple(map(int, np.unravel_index(worst, got.shape)))
    print(f"largest at {{at}}: {{second}} gives {{got[at]}}, {{first}} {{want[at]}}")
'''


def write_script(
    path: str | PathLike[str], node: Tensor, feeds: Mapping[str, np.ndarray[Any, Any]], devices: tuple[str, str]
) -> str:
    """Write the script and its data; gives the script's path.

    Args:
        path: the script's file; a missing ``.py`` is added.
        node: the node on leaves of its own.
        feeds: the values of its inputs.

    Raises:
        SchedulerError: the node has an attribute that cannot be written down (a function of `opweave.custom`).
        OSError: the files cannot be written.
    """
    target = fspath(path).removesuffix(".py")
    # NumPy's files have no bf16: bytes are written, and viewed as their dtype when read.
    arrays = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in feeds.items()}
    graph = np.frombuffer(Graph(node).to_bytes(weights=True, states=True), np.uint8)
    np.savez(f"{target}.npz", graph=graph, **arrays)  # type: ignore[arg-type]
    text = SCRIPT.format(what=node.describe(), data=f"{PurePath(target).name}.npz", devices=devices)
    with open(f"{target}.py", "w", encoding="utf-8") as file:
        file.write(text)
    return f"{target}.py"
