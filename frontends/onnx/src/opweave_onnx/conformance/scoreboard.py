"""The scoreboard: every test of ``onnx.backend.test`` that comes with the package ``onnx``, passed, refused or wrong.

``python -m opweave_onnx.conformance`` prints it. A test is *refused* where opweave says by a typed error that it does
not run the model, and *wrong* where it runs and its results differ, or where anything else is raised.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper as helper
from onnx.backend.test.loader import load_model_tests

import opweave as ow
from opweave.errors import DTypeError, FormatError, OpweaveError, UnsupportedOpError
from opweave_onnx.model import load

__all__ = ["KINDS", "Case", "Result", "Spread", "cases", "markdown", "run_case", "run_cases", "summary"]

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted", "light")


class Case(NamedTuple):
    """One test.

    Attributes:
        name, kind: as ONNX has them.
        model: the model.
        sets: inputs and outputs of each run, in the order of the model's.
        rtol, atol: how far the results may be from the outputs.
    """

    name: str
    kind: str
    model: onnx.ModelProto
    sets: Sequence[Any]
    rtol: float
    atol: float


class Result(NamedTuple):
    """The result of a test: ``"passed"``, ``"refused"`` or ``"wrong"``, and the reason."""

    case: Case
    state: str
    why: str = ""


@lru_cache(8)
def cases(kind: str = "node") -> tuple[Case, ...]:
    """All tests of a kind whose files are installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(_cases(kind))


def _cases(kind: str) -> Iterator[Case]:
    for test in load_model_tests(kind=kind):
        if test.model is not None:
            yield Case(test.name, kind, test.model, test.data_sets or (), test.rtol, test.atol)
            continue
        folder = Path(test.model_dir or "")
        if not (folder / "model.onnx").is_file():
            continue
        model = onnx.load(str(folder / "model.onnx"))
        sets = [tuple([_read(part, f"{what}_{i}.pb", value) for i, value in enumerate(values)]
                      for what, values in (("input", _fed(model)), ("output", model.graph.output)))
                for part in sorted(folder.glob("test_data_set_*"))]  # fmt: skip
        yield Case(test.name, kind, model, sets, test.rtol, test.atol)


def _fed(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    known = {t.name for t in model.graph.initializer}
    return [v for v in model.graph.input if v.name not in known]


def _read(folder: Path, name: str, value: onnx.ValueInfoProto) -> Any:
    raw = (folder / name).read_bytes()
    match value.type.WhichOneof("value"):
        case "sequence_type":
            return helper.to_list(onnx.SequenceProto.FromString(raw))
        case "optional_type":
            return helper.to_optional(onnx.OptionalProto.FromString(raw))
    return helper.to_array(onnx.TensorProto.FromString(raw))


class Spread(ow.Scheduler):
    """Runs every second node on the second device, where that supports it, so that values are copied between
    devices."""

    def build(self, outputs: Any, *args: Any, **options: Any) -> Any:
        """A program whose nodes are pinned."""
        parts = self.partition(outputs).partition
        targets, able = parts.assignment.targets, parts.assignment.capabilities
        pins = {
            node: targets[i % 2].device
            for i, node in enumerate(n for n in parts.graph.nodes if n.base is None)
            if able.supports(targets[i % 2], node)
        }
        return super().build(outputs, pins)


def run_case(case: Case, devices: Sequence[str] | ow.Scheduler) -> Result:
    """Run one test, on devices or by a scheduler."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(case, devices)
    except (UnsupportedOpError, DTypeError, FormatError) as error:
        return Result(case, "refused", str(error))
    except OpweaveError as error:
        return Result(case, "wrong", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Result(case, "wrong", f"{type(error).__name__}: {error}")


def _run(case: Case, devices: Sequence[str] | ow.Scheduler) -> Result:
    with load(case.model, devices) as model:
        for inputs, wanted in case.sets:
            feeds = {v.name: _fitting(x) for v, x in zip(model.inputs, map(_array, inputs), strict=False)}
            found = list(model.run(feeds).values())
            for value, have, want in zip(model.outputs, found, map(_array, wanted), strict=False):
                why = _difference(have, want, case)
                if why:
                    return Result(case, "wrong", f"output {value.name!r}: {why}")
    return Result(case, "passed")


def _fitting(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        raise DTypeError("an input consists of texts")
    return value


def _array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return helper.to_array(value)
    if isinstance(value, onnx.SequenceProto):
        return helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return helper.to_optional(value)
    return value


def _difference(have: Any, want: Any, case: Case) -> str:
    """What is different, by the rules of ``onnx.backend.test``."""
    if isinstance(want, (list, tuple)):
        if not isinstance(have, list) or len(have) != len(want):
            return f"{len(want)} elements are expected"
        return next((why for h, w in zip(have, want, strict=True) if (why := _difference(h, w, case))), "")
    if want is None or have is None:
        return "" if want is None and have is None else "an optional value"
    want = np.asarray(want)
    if have.shape != want.shape:
        return f"shape {have.shape}, not {want.shape}"
    if have.dtype != want.dtype:
        return f"dtype {have.dtype}, not {want.dtype}"
    if case.name.startswith(("test_bernoulli", "test_training_dropout")) and "zero_ratio" not in case.name:
        return ""
    exact = want.dtype.kind in "biu"
    a, b = (have, want) if exact else (have.astype(np.float64), want.astype(np.float64))
    if exact and want.dtype.kind != "b":
        a, b = have.astype(np.int64), want.astype(np.int64)
    rtol = max(case.rtol, 2**-6) if want.dtype.name == "bfloat16" else case.rtol
    close = a == b if exact and want.dtype.kind == "b" else np.isclose(a, b, rtol, case.atol, equal_nan=True)
    if close.all():
        return ""
    place = tuple(int(i) for i in np.argwhere(~close)[0])
    return f"{int((~close).sum())} of {close.size} elements differ; at {place} {have[place]}, not {want[place]}"


def run_cases(chosen: Iterable[Case], devices: Sequence[str], *, spread: bool = False) -> list[Result]:
    """Run tests, one after the other. ``spread``: every second node on the second device, where that supports it."""
    if not spread:
        return [run_case(case, devices) for case in chosen]
    with Spread(devices) as scheduler:
        return [run_case(case, scheduler) for case in chosen]


def summary(results: Sequence[Result]) -> dict[str, int]:
    """How many tests passed, were refused, were wrong."""
    return dict(Counter(result.state for result in results))


def markdown(placements: Sequence[str]) -> str:
    """The scoreboard of some placements, as ``python -m opweave_onnx.conformance`` takes them, as a table, and below it
    what is not run, by reason."""
    lines = ["| tests | devices | passed | refused | wrong |", "|---|---|---:|---:|---:|"]
    refusals: dict[str, dict[str, None]] = {}
    for kind in KINDS:
        chosen = cases(kind)
        for names in placements if chosen else ():
            spread = names.startswith("spread:")
            results = run_cases(chosen, names.removeprefix("spread:").split(","), spread=spread)
            counts = [summary(results).get(state, 0) for state in ("passed", "refused", "wrong")]
            lines.append(f"| {kind} | `{names}` | " + " | ".join(map(str, counts)) + " |")
            for result in results:
                if result.state != "passed":
                    refusals.setdefault(_reason(result), {})[result.case.name.removeprefix("test_")] = None
    lines += ["", "| not run | because |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {why} |" for why, names in sorted(refusals.items())]
    return "\n".join(lines)


def _reason(result: Result) -> str:
    """The reason without what differs from test to test."""
    if result.state == "wrong":
        return f"WRONG: {result.why[:200]}"
    if "not known:" in result.why:
        return "no operator " + result.why.split("not known: ")[1].split(" (")[0]
    return "texts" if "texts" in result.why or "string" in result.why else result.why[:200].replace("|", "/")
