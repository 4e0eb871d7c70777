"""`compare`: the outputs of a model on opweave and by ONNX Runtime, and the results of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx

from opweave.errors import FormatError, OpweaveError, Unavailable
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
        diverges: whether ``nmse`` is above the tolerance.
        own: where it diverges: ``nmse`` of the node alone, computed from ONNX Runtime's values of its inputs; ``None``
            where it does not diverge, or the node cannot be run alone (it takes or gives a sequence).
        wrong: whether ``own`` is above the tolerance: the node computes something else from the same inputs.
        cancels: it diverges, is not wrong, and the values that it reads do not diverge: large numbers cancel, which
            makes their rounding an error as large as the result. What diverges and is neither wrong nor cancels has
            its error from values that diverge before it.
    """

    value: str
    node: str
    op: str
    nmse: float
    largest: float
    diverges: bool
    own: float | None = None
    wrong: bool = False
    cancels: bool = False

    @property
    def cause(self) -> str:
        """Why it diverges, in words; ``""`` if it does not."""
        if not self.diverges:
            return ""
        if self.own is None:
            return "not run alone"
        if self.wrong:
            return "computes something else"
        return "cancellation of its inputs" if self.cancels else "from its inputs"


class Comparison:
    """The result of `compare`; true if no output of the model differs by more than the tolerance.

    Attributes:
        outputs: one row for each output, computed by the model as it is.
        values: one row for each value that both computed, in the order of the graph. Errors accumulate along the graph,
            because each runs on its own results.
    """

    def __init__(self, outputs: Sequence[Difference], values: Sequence[Difference]) -> None:
        self.outputs: Final = outputs
        self.values: Final = values

    def __bool__(self) -> bool:
        return not any(row.diverges for row in self.outputs)

    @property
    def first_divergence(self) -> Difference | None:
        """The first value whose node computes something else from the same inputs; ``None`` if none does."""
        return next((row for row in self.values if row.wrong), None)

    def __str__(self) -> str:
        lines = [f"{len(self.values)} values beside ONNX Runtime's; the furthest from it:"]
        worst = sorted(self.values, key=lambda row: -row.nmse)[:10]
        width = max((len(row.node) for row in worst), default=0)
        for r in worst:
            errors = f"mean square error {r.nmse:.2e}, largest {r.largest:.2e}"
            lines.append(f"    {r.node:<{width}}  {r.op:<16} {errors}  {r.cause}".rstrip())
        if (found := self.first_divergence) is not None:
            lines.append(
                f"first difference at {found.node} ({found.op}), which computes something else from equal inputs"
            )
        if not self.outputs:
            lines.append("outputs agree: none of them is an array")
        else:
            far = max(self.outputs, key=lambda row: (row.diverges, row.nmse))
            verdict = "agree" if self else f"differ at {far.value}"
            lines.append(f"outputs {verdict}: largest mean square error {far.nmse:.2e}, largest {far.largest:.2e}")
        return "\n".join(lines)


def compare(
    path: Any,
    feeds: Mapping[str, Any] | None = None,
    devices: Any = None,
    *,
    tolerance: float | None = None,
    **options: Any,
) -> Comparison:
    """Run a model on opweave and by ONNX Runtime, and compare its outputs and the results of all nodes of its main
    graph.

    A node whose result diverges is run once more by itself, on ONNX Runtime's values of its inputs.

    Args:
        path: the file, or an ``onnx.ModelProto``.
        feeds: as of `Model.run`; ``None``: random numbers, dynamic axes of length 1.
        devices, options: as of `load`.
        tolerance: the normalised mean square error up to which floats count as equal; ``None``: `ALLOWED`.

    Raises:
        Unavailable: ONNX Runtime is not installed, or does not load the model; the message says why.
        FormatError, DTypeError, UnsupportedOpError: as of `load`.
        ValueError: the tolerance is negative, or no number.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"a tolerance is a number from 0 on, not {tolerance}")
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
    with load(proto, devices, **options) as model:
        given = dict(feeds) if feeds is not None else examples(model)
        results = model.run(given)
    with load(shown, devices, **options) as model:
        ours = model.run(given)
    theirs = dict(zip([o.name for o in session.get_outputs()], session.run(None, given), strict=True))
    outputs = [_difference(name, made.get(name), results.get(name), theirs.get(name), tolerance)
               for name in (value.name for value in proto.graph.output)]  # fmt: skip
    rows: dict[str, Difference] = {}
    for name, node in made.items():
        row = _difference(name, node, ours.get(name), theirs.get(name), tolerance)
        if row is None:
            continue
        if row.diverges:
            alone = _run_alone(shown, node, {**given, **theirs}, devices, options)
            own = _difference(name, node, alone.get(name), theirs[name], tolerance)
            if own is not None:
                inherited = any(read in rows and rows[read].diverges for read in _reads(node))
                row = row._replace(own=own.nmse, wrong=own.diverges, cancels=not own.diverges and not inherited)
        rows[name] = row
    return Comparison([row for row in outputs if row is not None], list(rows.values()))


def _difference(
    name: str, node: onnx.NodeProto | None, mine: Any, other: Any, tolerance: float | None
) -> Difference | None:
    """How far ``mine`` is from ``other``; ``None`` if one of them is no array, but a sequence or missing."""
    if not isinstance(mine, np.ndarray) or not isinstance(other, np.ndarray):
        return None
    by, op = (name, "") if node is None else (node.name or node.op_type, node.op_type)
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return Difference(name, by, op, np.inf, np.inf, True)
    d = distance(mine, other)
    allowed = ALLOWED.get(mine.dtype.name, 0.0)
    if tolerance is not None and allowed:
        allowed = tolerance
    diverges = d.nmse > allowed
    if op == "Sigmoid" and diverges:
        diverges = not np.allclose(mine, other, rtol=0, atol=SIGMOID)
    return Difference(name, by, op, d.nmse, d.largest, diverges)


def _run_alone(
    proto: onnx.ModelProto, node: onnx.NodeProto, values: Mapping[str, Any], devices: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The results of one node of the main graph on given values of what it reads; none if it cannot be run so."""
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    constants = {name for other in proto.graph.node if other.op_type == "Constant" for name in other.output}
    inputs, initializers = [], []
    for name in _reads(node):
        if name in weights:
            initializers.append(weights[name])
            continue
        value = np.asarray(values.get(name))
        if value.dtype == object:  # a sequence, or an optional value
            return {}
        if name in constants:
            initializers.append(onnx.numpy_helper.from_array(value, name))
        else:
            elem = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            inputs.append(onnx.helper.make_tensor_value_info(name, elem, value.shape))
    results = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = onnx.helper.make_graph([node], "alone", inputs, results, initializers)
    alone = onnx.helper.make_model(graph, opset_imports=proto.opset_import, functions=proto.functions)
    alone.ir_version = proto.ir_version
    with suppress(OpweaveError), load(alone, devices, **options) as model:
        return dict(model.run({value.name: values[value.name] for value in inputs}))
    return {}


def _reads(node: onnx.NodeProto) -> list[str]:
    """Names of the values that a node reads, also those that graphs in its attributes take from around it."""
    names = dict.fromkeys(name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {value.name for value in (*graph.input, *graph.initializer)}
            own |= {name for inner in graph.node for name in inner.output}
            read = [name for inner in graph.node for name in _reads(inner)] + [value.name for value in graph.output]
            names.update(dict.fromkeys(name for name in read if name not in own))
    return list(names)


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
