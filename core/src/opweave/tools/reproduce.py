"""Writes a script that runs one node on two devices, and its data; the script needs opweave and NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

import numpy as np

from opweave.errors import SchedulerError
from opweave.graph.dtypes import DType
from opweave.graph.tensor import Tensor
from opweave.leaf_memory import read_leaf

__all__ = ["literal", "write_script"]

Array = np.ndarray[Any, Any]

SCRIPT = '''"""One node on two devices: {what}

Written by opweave.compare; the data is in {data} beside this file.
"""

from pathlib import Path

import numpy as np

import opweave as ow
from opweave.tools.distance import distance
from opweave.graph.opdef import find_op
from opweave.graph.tensor import node, view_node

data = np.load(Path(__file__).with_suffix(".npz"))
feeds = {{}}


def source(name, shape, dtype, state=False):
    dtype = ow.as_dtype(dtype)
    array = data[name]
    if dtype.block > 1:
        return ow.weights({{name: ow.Blocks(array, shape, dtype)}})[name]
    array = array.view(dtype.numpy).reshape(shape)
    if state:
        leaf = ow.state(name, shape, dtype)
        ow.write(leaf, array)
        return leaf
    feeds[name] = array
    return ow.input(name, shape, dtype)


def result(device):
{lines}
    with ow.Scheduler(device) as scheduler:
        return scheduler.build(t{last}).run(feeds)


first, second = {devices!r}
want, got = result(first), result(second)
nmse, largest, worst, _ = distance(got, want)
print(f"{{second}} against {{first}}: normalised mean square error {{nmse:.2e}}, largest error {{largest:.2e}}")
if got.tobytes() != want.tobytes():
    at = tuple(map(int, np.unravel_index(worst, got.shape)))
    print(f"largest at {{at}}: {{second}} gives {{got[at]}}, {{first}} {{want[at]}}")
'''


def write_script(
    path: str | PathLike[str], tensor: Tensor, known: Mapping[Tensor, Array], devices: tuple[str, str]
) -> str:
    """Write the script and its data; gives the script's path.

    Args:
        path: the script's file; a missing ``.py`` is added.
        known: values of the node's sources (by their roots), except leaves that have values of their own.

    Raises:
        SchedulerError: the node has an attribute that cannot be written down (a function of `opweave.custom`).
        OSError: the files cannot be written.
    """
    target = fspath(path)
    target = target if target.endswith(".py") else f"{target}.py"
    names: dict[Tensor, int] = {}
    arrays: dict[str, Array] = {}
    lines: list[str] = []

    def add(code: str, of: Tensor) -> None:
        names[of] = len(names)
        lines.append(f"    t{names[of]} = {code}")

    def visit(of: Tensor) -> None:
        if of in names:
            return
        if of.op is not None and of.op.is_view:
            visit(of.srcs[0])
            add(
                f"view_node(find_op({of.op.name!r}), t{names[of.srcs[0]]}, {_attrs(of)}, {of.shape}, {of.strides}, "
                f"{of.offset})",
                of,
            )
            return
        name = f"source{len(arrays)}"
        value = known.get(of)
        value = np.ascontiguousarray(read_leaf(of) if value is None else value)
        # NumPy's files have no bf16: bytes are written, and viewed as their dtype when read.
        arrays[name] = value.reshape(-1).view(np.uint8)
        written = tensor.op is not None and tensor.op.writes and of is tensor.srcs[0].root
        add(f"source({name!r}, {of.shape}, {of.dtype.name!r}{', state=True' * written})", of)

    assert tensor.op is not None
    for src in tensor.srcs:
        visit(src)
    sources = "".join(f"t{names[s]}, " for s in tensor.srcs)
    add(f"node(find_op({tensor.op.name!r}), ({sources}), {_attrs(tensor)})", tensor)
    data = f"{target[:-3]}.npz"
    np.savez(data, **arrays)  # type: ignore[arg-type]
    with open(target, "w", encoding="utf-8") as file:
        file.write(
            SCRIPT.format(
                what=tensor.describe(), data=data.replace("\\", "/").rsplit("/", 1)[-1], lines="\n".join(lines),
                last=names[tensor], devices=devices,
            )
        )  # fmt: skip
    return target


def _attrs(tensor: Tensor) -> str:
    try:
        return "{" + ", ".join(f"{k!r}: {literal(v)}" for k, v in tensor.attrs.items()) + "}"
    except SchedulerError as error:
        raise SchedulerError(f"{tensor.describe()} has {error}") from None


def literal(value: Any) -> str:
    """The value of an attribute as a Python expression, in which opweave is ``ow``; raises `SchedulerError` for one
    that has none, as a function."""
    if isinstance(value, DType):
        return f"ow.as_dtype({value.name!r})"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    if isinstance(value, slice):
        return f"slice({value.start!r}, {value.stop!r}, {value.step!r})"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        return f"float({str(value)!r})"
    raise SchedulerError(f"the attribute {value!r}, which cannot be written into a script")
