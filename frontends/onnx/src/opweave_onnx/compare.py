"""`compare`: the results of a model on opweave and by ONNX Runtime, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx

from opweave.errors import FormatError, Unavailable
from opweave.tools.distance import distance
from opweave_onnx.model import Model, load

__all__ = ["Comparison", "Difference", "compare", "examples"]

ALLOWED: Final = {"float64": 1e-20, "float32": 1e-9, "float16": 1e-5, "bfloat16": 1e-3}
"""Normalised mean square errors up to which values count as equal, by type; values of other types have to be equal."""

SIGMOID: Final = 1e-6
"""ONNX Runtime's sigmoid of f32 is wrong by up to 1e-7, so that very small values have no digit right: it is 0 below
-18, and 17 % off at -15."""


class Difference(NamedTuple):
    """How far a value is from ONNX Runtime's.

    Attributes:
        value: its name in the file.
        node, op: the name and the operator of the node that computes it.
        nmse: mean square error over the mean square of ONNX Runtime's; infinite where integers, NaN or infinities
            differ.
        largest: largest error of an element, relative to the element plus the root mean square of all.
        diverges: whether ``nmse`` is above `ALLOWED`.
    """

    value: str
    node: str
    op: str
    nmse: float
    largest: float
    diverges: bool


class Comparison:
    """The result of `compare`; true if no value differs by more than rounding.

    Attributes:
        values: one row for each value that both computed, in the order of the graph. Errors accumulate along the graph,
            because each runs on its own results.
    """

    def __init__(self, values: Sequence[Difference]) -> None:
        self.values: Final = values

    def __bool__(self) -> bool:
        return not any(row.diverges for row in self.values)

    @property
    def first_divergence(self) -> Difference | None:
        """The first value that differs by more than rounding; ``None`` if none does."""
        return next((row for row in self.values if row.diverges), None)

    def __str__(self) -> str:
        found = self.first_divergence
        verdict = "no difference beyond rounding" if found is None else f"first difference at {found.node} ({found.op})"
        lines = [f"{len(self.values)} values beside ONNX Runtime's: {verdict}"]
        worst = sorted(self.values, key=lambda row: -row.nmse)[:10]
        width = max((len(row.node) for row in worst), default=0)
        lines += [f"    {r.node:<{width}}  {r.op:<16} mean square error {r.nmse:.2e}, largest {r.largest:.2e}"
                  for r in worst]  # fmt: skip
        return "\n".join(lines)


def compare(path: Any, feeds: Mapping[str, Any] | None = None, devices: Any = None, **options: Any) -> Comparison:
    """Run a model on opweave and by ONNX Runtime, and compare the results of all nodes of the main graph.

    Args:
        path: the file, or an ``onnx.ModelProto``.
        feeds: as of `Model.run`; ``None``: random numbers, dynamic axes of length 1.
        devices, options: as of `load`.

    Raises:
        Unavailable: ONNX Runtime is not installed, or does not load the model; the message says why.
        FormatError, DTypeError, UnsupportedOpError: as of `load`.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise Unavailable("ONNX Runtime is not installed", remedy="pip install onnxruntime") from error
    proto = path if isinstance(path, onnx.ModelProto) else _read(path)
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    there = {value.name for value in shown.graph.output}
    made = {name: node for node in shown.graph.node for name in node.output if name}
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    shown.graph.output.extend([onnx.ValueInfoProto(name=name) for name in made if name not in there])
    try:
        session = onnxruntime.InferenceSession(shown.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnxruntime's own classes, which have no common base
        raise Unavailable(
            f"ONNX Runtime {onnxruntime.__version__} does not load the model: {str(error)[:300]}",
            remedy="compare a model that it supports (it refuses operators of version 27 on)",
        ) from None
    with load(shown, devices, **options) as model:
        given = dict(feeds) if feeds is not None else examples(model)
        ours = model.run(given)
        theirs = dict(zip([o.name for o in session.get_outputs()], session.run(None, given), strict=True))
    rows = []
    for name, node in made.items():
        mine, other = ours.get(name), theirs.get(name)
        if not isinstance(mine, np.ndarray) or not isinstance(other, np.ndarray):
            continue
        if mine.shape != other.shape or mine.dtype != other.dtype:
            rows.append(Difference(name, node.name or node.op_type, node.op_type, np.inf, np.inf, True))
            continue
        d = distance(mine, other)
        diverges = d.nmse > ALLOWED.get(mine.dtype.name, 0.0)
        if node.op_type == "Sigmoid" and diverges:
            diverges = not np.allclose(mine, other, rtol=0, atol=SIGMOID)
        rows.append(Difference(name, node.name or node.op_type, node.op_type, d.nmse, d.largest, diverges))
    return Comparison(rows)


def _read(path: Any) -> onnx.ModelProto:
    try:
        return onnx.load(str(Path(path)))
    except Exception as error:  # a damaged file; `load` gives the reason
        load(path, ["host"]).close()
        raise FormatError(f"{path} cannot be read: {error}") from None


def examples(model: Model, seed: int = 0, **lengths: int) -> dict[str, Any]:
    """Random values for the inputs: normally distributed floats; rows of the tables that integers index; bytes of the
    whole range; ones for other integers and for booleans, which mostly are masks and lengths.

    Args:
        seed: of the random numbers.
        lengths: name of a dynamic axis -> its length; 1 for others.
    """
    rng = np.random.default_rng(seed)
    rows = _rows(model)

    def drawn(name: str, zeros: Any) -> Any:
        dtype = zeros.dtype
        if dtype.kind not in "iub":
            return np.asarray(rng.standard_normal(zeros.shape)).astype(dtype)
        if name in rows:
            top = min(rows[name], np.iinfo(dtype).max + 1)
            return rng.integers(0, top, zeros.shape, np.int64).astype(dtype)
        if dtype.kind in "iu" and dtype.itemsize == 1:
            limits = np.iinfo(dtype)
            return rng.integers(limits.min, limits.max, zeros.shape, dtype, endpoint=True)
        return np.ones_like(zeros)

    return {name: drawn(name, zeros) for name, zeros in model.examples(**lengths).items()}


MOVING: Final = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose results consist of values of their first inputs."""


def _rows(model: Model) -> dict[str, int]:
    """Names of inputs that index an initializer -> the rows of the smallest one."""
    graph = model.source.graph
    origin = {value.name: value.name for value in graph.inputs}
    rows: dict[str, int] = {}
    for node in graph.nodes:
        if node.op in MOVING and node.inputs[0] in origin:
            origin[node.outputs[0]] = origin[node.inputs[0]]
        elif node.op == "Gather" and node.inputs[0] in graph.initializers and node.inputs[1] in origin:
            shape = graph.initializers[node.inputs[0]].shape
            length = shape[int(node.attributes.get("axis", 0))]
            name = origin[node.inputs[1]]
            rows[name] = min(rows.get(name, length), length)
    return {name: length for name, length in rows.items() if length}
