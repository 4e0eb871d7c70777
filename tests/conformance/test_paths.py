"""Every path of every kernel: limits are set to extreme values, and small operands go the ways of large ones."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from importlib import import_module
from textwrap import dedent
from typing import Final

import numpy as np
import pytest

from opweave.contract import NEVER, Backend, Device, Kind, Limit, Stream, Tunable
from opweave.contract.kernels import KernelTable
from opweave.errors import PluginError
from opweave.registry import Registry
from opweave.runtime.host.memory import HostMemory
from opweave_conformance.cases import CASES
from opweave_conformance.cases.long_operands import LONG_CASES
from opweave_conformance.check import run_case
from opweave_conformance.decisions import decisions
from opweave_conformance.levels import paths
from opweave_conformance.report import paths as taken
from opweave_conformance.suite import Suite

# --- limits ---------------------------------------------------------------------------------------------------------


def test_values_of_a_limit_are_the_ends_of_what_makes_sense_and_of_what_is_right():
    assert Limit("rows", 8, 2, 64).values() == {"1": 1, "smallest": 2, "few": 13, "largest": 64, "never": NEVER}
    assert Limit("rows", 8, 1, 64).values() == {"1": 1, "few": 13, "largest": 64, "never": NEVER}
    assert Limit("rows", 8, 4, 12, bounds=(4, 12)).values() == {"1": 4, "few": 12}
    assert Limit("side", 64, 16, 64, bounds=(16, 64)).values() == {"1": 16, "few": 29, "largest": 64}
    tunable = Tunable("rows", 8, (4, 8, 32), list)
    assert (tunable.smallest, tunable.largest) == (4, 32)


def test_a_choice_between_few_ways_takes_each_of_them():
    assert Limit("way", 3, 1, 3, bounds=(1, 3)).values() == {"1": 1, "2": 2, "3": 3}


@pytest.mark.parametrize("numbers", [(0, 1, 2), (4, 1, 3), (1, 5, 3), (True, 1, 2), (2.0, 1, 3)])
def test_numbers_that_are_none_or_in_no_order_are_refused(numbers):
    default, smallest, largest = numbers
    with pytest.raises(PluginError, match="limit rows"):
        Limit("rows", default, smallest, largest)
    with pytest.raises(PluginError, match="in order"):
        Limit("rows", 8, 2, 64, bounds=(4, NEVER))


def test_reads_are_collected_where_somebody_asks():
    rows, columns = Limit("rows", 8, 1, 64), Limit("columns", 8, 1, 64)
    with decisions() as found:
        assert rows.value == 8
        with columns.at(3):
            pass
    assert columns.value == 8
    assert list(found) == ["rows"]


@pytest.mark.parametrize(
    ("decide", "number", "side"),
    [
        (operator.ge, 7, "below"), (operator.ge, 8, "above"), (operator.gt, 8, "below"), (operator.gt, 9, "above"),
        (operator.lt, 7, "below"), (operator.lt, 8, "above"), (operator.le, 8, "below"), (operator.le, 9, "above"),
        (min, 5, "below"), (min, 50, "above"), (operator.floordiv, 8, "below"), (operator.floordiv, -9, "above"),
        (lambda number, limit: number > limit // 2, 4, "below"),
        (lambda number, limit: number < 2 * limit, 16, "above"),
    ],
)  # fmt: skip
def test_sides_that_comparisons_take_are_noted(decide, number, side):
    with decisions() as found:
        decided = decide(number, Limit("rows", 8, 1, 64).value), decide(number, 8)
    assert decided[0] == decided[1]
    assert found == {"rows": {side: 1}}


@pytest.mark.parametrize(("compare", "side"), [(operator.gt, "below"), (operator.le, "above")])
def test_sides_are_noted_whichever_number_stands_first(compare, side):
    with decisions() as found:
        compare(Limit("rows", 8, 1, 64).value, 8 if side == "above" else 7)
    assert found == {"rows": {side: 1}}


def test_of_two_limits_that_are_compared_both_note_their_sides():
    with decisions() as found:
        assert max(Limit("rows", 8, 1, 64).value, Limit("columns", 16, 1, 64).value) == 16
    assert found == {"rows": {"above": 1}, "columns": {"below": 1}}


def test_a_limit_that_is_only_computed_with_has_no_side():
    with decisions() as found:
        assert f"{Limit('rows', 8, 1, 64).value}" == "8"
        assert list(range(0, 16, Limit("columns", 8, 1, 64).value)) == [0, 8]
    assert found == {"rows": {}, "columns": {}}


def test_what_was_made_under_another_value_is_not_used():
    limit = Limit("rows", 8, 1, 64)
    made: list[int] = []

    def make() -> object:
        made.append(limit.value)
        return object()

    with Unit().open() as stream:
        for value in (8, 8, 1, 1):
            if limit.value != value:
                limit.value = value
            stream.artefact("key", make)
    assert made == [8, 1]


# --- the checks -----------------------------------------------------------------------------------------------------

PARTS = Limit("row_part", 1 << 20, 1, 1 << 20)
"""Elements of a row that are added up at a time."""


def parts_of(n: int) -> list[slice]:
    part = min(PARTS.value, n)
    return [slice(i, min(i + part, n)) for i in range(0, n, part)]


def right(x: np.ndarray) -> np.ndarray:
    return np.sum([x[..., p].sum(-1, dtype=np.float64) for p in parts_of(x.shape[-1])], axis=0)


def last_part_only(x: np.ndarray) -> np.ndarray:
    """Each part is treated as a row; the last one wins."""
    return x[..., parts_of(x.shape[-1])[-1]].sum(-1)


def without_tail(x: np.ndarray) -> np.ndarray:
    part = min(max(2, PARTS.value), x.shape[-1])
    return x[..., : x.shape[-1] // part * part].sum(-1)


def first_part_twice(x: np.ndarray) -> np.ndarray:
    some = [x[..., p].sum(-1) for p in parts_of(x.shape[-1])]
    return sum(some) + (some[0] if len(some) > 1 else 0)


def masked_one_too_few(x: np.ndarray) -> np.ndarray:
    """The last element is masked out where the row does not fill the last vector."""
    vector = min(max(4, PARTS.value), x.shape[-1])
    return x[..., : x.shape[-1] - bool(x.shape[-1] % vector)].sum(-1)


class Unit(HostMemory):
    kind = Kind.ACCEL
    kernels = KernelTable("f32", "strided")
    limits: Sequence[Limit] = (PARTS,)
    sums = staticmethod(right)


@Unit.kernels("sum", when=lambda step: None if step.attrs["axes"] == (len(step.srcs[0].shape) - 1,) else "other axes")
def add_up(stream: Stream, op: str, out, x, *, axes):
    assert isinstance(stream.device, Unit)
    sums, given, target = stream.device.sums, x.view, out.view
    parts_of(1)  # as a kernel does that decides when it is bound
    return lambda: np.copyto(target, sums(given), "unsafe")


def checked(device: Device, pattern: str, monkeypatch: pytest.MonkeyPatch, *ops: str) -> dict[str, str]:
    """Id of each check -> its status, and the reason of failures, with cases of some operations only."""

    class Acme(Backend):
        def devices(self):
            return [device]

    registry = Registry(environ={}, search=[])
    registry.register(Acme)
    monkeypatch.setattr(paths, "CASES", tuple(case for case in CASES if case.op in ops))
    suite = Suite("acme", only=[pattern], using=registry)
    found = {}
    for item in suite.items:
        result = suite.perform(item)
        found[result.id] = result.status if result else f"failed: {result.reason}"
    return found


def test_a_device_that_is_right_passes(monkeypatch):
    assert checked(Unit(), "path-*", monkeypatch, "sum") == {
        "path-row_part-1": "passed", "path-row_part-few": "passed", "path-row_part-largest": "passed",
        "path-row_part-never": "passed", **{f"path-all-{value}": "passed" for value in paths.VALUES},
    }  # fmt: skip
    assert PARTS.value == PARTS.default


@pytest.mark.parametrize("fault", [last_part_only, without_tail, first_part_twice, masked_one_too_few])
def test_planted_faults_of_large_operands_are_found_on_small_ones(fault, monkeypatch):
    class Faulty(Unit):
        sums = staticmethod(fault)

    found = checked(Faulty(), "path-row_part-*", monkeypatch, "sum")
    assert found["path-row_part-1"].startswith("failed: with row_part=1, the other limits as they are, ")
    assert "cases fail; sum-f32-" in found["path-row_part-1"]
    assert found["path-row_part-never"] == "passed"
    assert PARTS.value == PARTS.default, "it is as it was, after failures too"


def test_a_limit_that_no_case_reads_fails(monkeypatch):
    class Careless(Unit):
        limits = (PARTS, Limit("unread", 8, 1, 64))

    found = checked(Careless(), "path-unread-*", monkeypatch, "sum")
    assert found["path-unread-1"] == (
        "failed: no case of the suite reads the limit unread: none of its paths through a kernel is tried"
    )


def test_the_report_tells_the_sides_and_a_side_that_no_case_takes(monkeypatch):
    class OneSided(Unit):
        limits = (PARTS, Limit("unreached", 1 << 20, 1 << 19, NEVER, bounds=(1 << 19, NEVER)))

    device = OneSided()

    @OneSided.kernels("max", when=lambda step: None)
    def largest(stream: Stream, op: str, out, x, *, axes):
        assert x.size < stream.device.limits[1].value
        return lambda: np.copyto(out.view, x.view.max(tuple(axes)))

    class Acme(Backend):
        def devices(self):
            return [device]

    registry = Registry(environ={}, search=[])
    registry.register(Acme)
    monkeypatch.setattr(paths, "CASES", tuple(case for case in CASES if case.op in ("sum", "max")))
    suite = Suite("acme", only=["path-row_part-*", "path-unreached-*"], using=registry)
    for item in suite.items:
        suite.perform(item)
    found = taken(suite.results)[device.name]
    sides = {limit: {op: set(counts) for op, counts in ops.items()} for limit, ops in found.items()}
    assert sides == {"row_part": {"sum": {"below", "above"}}, "unreached": {"max": {"below"}}}
    assert suite.problems() == [], "whoever chooses checks is not told about the others"
    monkeypatch.setattr(suite, "only", ())
    expected = f"{device.name}: no case of the suite reaches the way of its kernels above the limit unreached"
    assert suite.problems()[-1] == expected


# --- the device of this project that is many programs ---------------------------------------------------------------


def test_the_row_that_was_cut_between_threads_would_be_found(monkeypatch):
    """Of a walk with one axis that axis was divided, also where it is a row."""
    pytest.importorskip("llvmlite", reason="nothing is compiled")
    walk = pytest.importorskip("opweave_cpu.jit.walk")
    from opweave_cpu.device import CpuDevice
    from opweave_cpu.threads import THREADS

    monkeypatch.setattr(THREADS, "default", 2)
    real = walk.walk_over
    ops = ("softmax", "cumsum", "rms_norm", "log_softmax")
    assert set(checked(CpuDevice(), "path-compiled_work-1", monkeypatch, *ops).values()) == {"passed"}

    def all_divisible(*args, rows=False):
        found = real(*args, rows=rows)
        return found._replace(divisible=len(found.lengths) if len(found.lengths) == 1 else found.divisible)

    monkeypatch.setattr("opweave_cpu.jit.rows.walk_over", all_divisible)
    found = checked(CpuDevice(), "path-compiled_work-1", monkeypatch, *ops)
    assert found["path-compiled_work-1"].startswith("failed: with compiled_work=1, the other limits as they are, ")


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "cumsum"])
def test_long_operands_find_that_row_without_any_limit(op, monkeypatch):
    pytest.importorskip("llvmlite", reason="nothing is compiled")
    pytest.importorskip("opweave_cpu.jit.walk")
    from opweave_cpu.device import CpuDevice
    from opweave_cpu.jit import rows, walk
    from opweave_cpu.threads import THREADS

    monkeypatch.setattr(THREADS, "default", 2)
    real = walk.walk_over
    mine = [case for case in LONG_CASES if case.op == op and case.operands[0].shape[-1] > 1 << 14]
    assert [run_case(CpuDevice(), case).status for case in mine] == ["passed"] * len(mine)

    def all_divisible(*args, rows=False):
        found = real(*args, rows=rows)
        return found._replace(divisible=len(found.lengths))

    monkeypatch.setattr(rows, "walk_over", all_divisible)
    assert "failed" in [run_case(CpuDevice(), case).status for case in mine]


# --- kernels in OpenCL, in the text of which faults are planted -----------------------------------------------------

FAULTS: Final = {
    "the last part of a row is cut off": (
        "path-reduced_part-1", "sum", "(p.shape[0] + p.part_inner - 1) / p.part_inner", "p.shape[0] / p.part_inner"
    ),
    "a partial sum is left out": ("path-cumulative_part-1", "cumsum", "k < part;", "k + 1 < part;"),
    "the last partial sum wins": ("path-summed_block-1", "rms_norm", "left = BLOCK;", "left = BLOCK; all = (V(T))(0);"),
    "a row is cut between work-items": (
        "path-chunk-1", "pad", "FEWER(start + p.chunk, p.shape[0])", "FEWER(start + p.chunk - 1, p.shape[0])"
    ),
    "the last vector is masked by one too few": (
        "path-chunk-1", "exp", "end_of_##i - i))", "end_of_##i - i - (i > 0 && end_of_##i - i < VEC)))"
    ),
    "the tail of a block is lost": (
        "path-transposed_side-1", "contiguous", "j < j_first + high ? i_first + wide : i_first", "i_first + wide"
    ),
    "sums of parts of k are not added up": (
        "path-product_depth-1", "matmul", "to[0] = k0 ? to[0] + c##r : c##r,", "to[0] = c##r,"
    ),
    "equal elements of merged runs change places": (
        "path-counted_run-1", "argsort", "left = !BEFORE(b, a);", "left = BEFORE(a, b);"
    ),
    "what was added up before is not scaled": (
        "path-attention_keys-1", "attention", "total[r] = total[r] * factor +", "total[r] = total[r] +"
    ),
}  # fmt: skip
"""What is wrong -> the check that finds it, the operation, and what its source has instead of what."""


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_planted_in_the_source_of_kernels_are_found_on_small_operands(fault, monkeypatch):
    pytest.importorskip("opweave_opencl", reason="not installed")
    from opweave_opencl.program import code
    from tests.support.opencl import DEVICES, anew

    if not DEVICES:
        pytest.skip("no OpenCL driver works")
    check, op, right_text, wrong_text = FAULTS[fault]
    assert checked(anew(DEVICES[0]), check, monkeypatch, op) == {check: "passed"}
    device = anew(DEVICES[0])
    build, planted = device.programs.build, []

    def build_wrong(name, text, macros=None):
        planted.append(right_text in code(text))
        return build(name, code(text).replace(right_text, wrong_text), macros)

    monkeypatch.setattr(device.programs, "build", build_wrong)
    (found,) = checked(device, check, monkeypatch, op).values()
    assert any(planted), "the source has changed"
    assert found.startswith("failed: with "), found


# --- kernels in torch's operations ----------------------------------------------------------------------------------

TORCH_FAULTS: Final = {
    "the last part of a row is cut off": (
        "path-norm_part-few", "l2_norm", "normalization", "euclidean",
        "norm(rest, each[..., -1])", "each[..., -1].zero_",
    ),
    "each part is treated as a row": (
        "path-norm_part-1", "l2_norm", "normalization", "euclidean",
        "norm(each, norms.squeeze(-1))", "partial(norms.copy_, each[..., -1:])",
    ),
    "partial sums are added up, not their squares": (
        "path-norm_part-1", "rms_norm", "normalization", "euclidean",
        "norm(each, norms.squeeze(-1))", "partial(torch.sum, each, -1, out=norms.squeeze(-1))",
    ),
    "the tail of an axis is lost": (
        "path-attention_scores-few", "attention", "attention", "boxes",
        "range(0, lengths[0], step)", "range(0, lengths[0] - step + 1, step)",
    ),
    "the mask of the last vector is off by one": (
        "path-call_scores-1", "attention", "attention", "_Tiling.bind",
        "torch.arange(keys - tokens, keys,", "torch.arange(keys - tokens + 1, keys + 1,",
    ),
}  # fmt: skip
"""What is wrong -> the check that finds it, the operation, the module and the function, and what its source has instead
of what."""


@pytest.mark.parametrize("fault", TORCH_FAULTS)
def test_faults_planted_in_kernels_of_torch_are_found_on_small_operands(fault, monkeypatch):
    pytest.importorskip("opweave_torch", reason="not installed")
    from opweave_torch.device import TorchCpuDevice

    check, op, name, function, right_text, wrong_text = TORCH_FAULTS[fault]
    module = import_module(f"opweave_torch.kernels.{name}")
    assert checked(TorchCpuDevice(), check, monkeypatch, op) == {check: "passed"}
    owner, _, last = function.rpartition(".")
    target = getattr(module, owner) if owner else module
    text = dedent(inspect.getsource(getattr(target, last)))
    assert right_text in text, "the source has changed"
    names = dict(vars(module))
    exec(compile(f"from __future__ import annotations\n{text.replace(right_text, wrong_text)}", name, "exec"), names)
    monkeypatch.setattr(target, last, names[last])
    (found,) = checked(TorchCpuDevice(), check, monkeypatch, op).values()
    assert found.startswith("failed: with "), found


def test_long_operands_are_beside_the_others():
    assert len({case.id for case in LONG_CASES}) == len(LONG_CASES)
    assert not {case.id for case in LONG_CASES} & {case.id for case in CASES}
    for case in LONG_CASES:
        assert case.build(*case.tensors()).root.name == case.op, case.id
