"""Work-items that share a row combine their results in sub-groups where the device has some that work, else in local
memory; both ways are right in every type. Processors run kernels in the form for graphics processors here."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
import pytest

import opweave as ow
from opweave_conformance import CASES, Case
from opweave_cost.tunables import _measured
from opweave_opencl import OpenCLDevice, health, probe, subgroups
from opweave_opencl.caching import BinaryCache
from opweave_opencl.hooks import opweave_doctor
from opweave_opencl.probe import TIMEOUT, WORKS, Trial
from opweave_opencl.program import source
from opweave_opencl.subgroups import HALVES, IN_SUBGROUPS, VARIABLE, Subgroups
from opweave_opencl.tuning import Tuning
from tests.support.kernels import assert_right, by_operation
from tests.support.opencl import anew, as_gpu

GROUPED = Tuning(vector=4, group=64, row_vector=1, row_group=64, tiled=True)


@pytest.fixture
def lists(device):
    """A device whose driver lists sub-groups."""
    if not device.subgroups.listed:
        pytest.skip("the driver lists no sub-groups")
    return device


@pytest.fixture(scope="module")
def ways(device) -> dict[str, OpenCLDevice]:
    """The device in the form for graphics processors, once for each way: streams share what a device has compiled."""
    return {wish: as_gpu(device, GROUPED) for wish in "10"}


@pytest.fixture(params=["1", "0"], ids=["subgroups", "halves"])
def shared(request, lists, ways, monkeypatch) -> OpenCLDevice:
    """A device whose work-items share rows, with sub-groups forced on and off."""
    monkeypatch.setenv(VARIABLE, request.param)
    found = ways[request.param]
    assert ("SUBGROUPS" in found.sharing()) == (request.param == "1")
    return found


def run(device, *tensors):
    with ow.Scheduler(device) as scheduler:
        return [np.array(scheduler.build(tensor).run()) for tensor in tensors]


# --- results ----------------------------------------------------------------------------------------------------------

COMBINING = {
    *("argmax", "attention", "attention_backward", "count_equal", "group_norm", "head_softmax", "l2_norm"),
    *("layer_norm", "layer_norm_backward", "linear", "log_softmax", "log_softmax_backward", "max", "mean", "min"),
    *("prod", "rms_norm", "rms_norm_backward", "softmax", "softmax_backward", "sum", "var"),
}
"""Operations whose work-items share rows."""


def largest_of_each_type() -> list[Case]:
    """Of each operation and type of its first operand the case with most elements; products also with weights of some
    types of blocks."""
    found: dict[Any, tuple[int, Case]] = {}
    for case in CASES:
        if case.op not in COMBINING:
            continue
        types = tuple(x.dtype for x in case.operands[: 2 if case.op == "linear" else 1])
        if case.op == "linear" and types[-1] not in (types[0], "q8_0", "q6_k"):
            continue
        size = prod(case.operands[0].shape)
        if (case.op, types) not in found or size >= found[case.op, types][0]:
            found[case.op, types] = size, case
    return [case for _, case in found.values()]


SAMPLE = largest_of_each_type()


def test_the_sample_has_every_operation():
    assert {case.op for case in SAMPLE} == COMBINING


@pytest.mark.parametrize("cases", by_operation(SAMPLE))
def test_both_ways_are_right_in_every_type(shared, cases):
    assert_right(shared, cases)


@pytest.mark.parametrize("group", [4, 64, 256])
def test_sub_groups_may_be_larger_than_the_group_or_parts_of_it(lists, monkeypatch, group):
    monkeypatch.setenv(VARIABLE, "1")
    found = as_gpu(lists, GROUPED._replace(row_group=group))
    for n in (1, 5, 300):
        x = np.random.default_rng(n).standard_normal((3, n), np.float32)
        node = ow.constant(x)
        total, most, best = run(found, ow.sum(node, 1), ow.max(node, 1), ow.argmax(node, 1))
        np.testing.assert_allclose(total, x.sum(1, dtype=np.float64), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(most, x.max(1))
        np.testing.assert_array_equal(best, x.argmax(1))


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_nan_and_infinities_reach_the_result_as_in_numpy(shared, dtype):
    if dtype == "f64" and not shared.has_f64:
        pytest.skip("the device has no double precision")
    name = ow.as_dtype(dtype).numpy
    x = np.random.default_rng(0).standard_normal((6, 200)).astype(name)
    x[0, 150], x[1, 3], x[2, 199], x[3, [0, 70]], x[4, [20, 180]] = np.nan, np.inf, -np.inf, [np.inf, -np.inf], np.nan
    node = ow.constant(x)
    with np.errstate(invalid="ignore"):
        want = x.max(1), x.min(1), x.astype(np.float64).sum(1), x.argmax(1)
        powers = np.exp(x - x.max(1, keepdims=True), dtype=np.float64)
    tensors = ow.max(node, 1), ow.min(node, 1), ow.sum(node, 1), ow.argmax(node, 1), ow.softmax(node)
    *got, soft = run(shared, *tensors)
    rough = 5e-3 if dtype == "f16" else 1e-5
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=rough, atol=rough)
    np.testing.assert_allclose(soft, powers / powers.sum(1, keepdims=True), rtol=10 * rough, atol=rough)


# --- whether they are used --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing is remembered, and drivers are tried in this process, where the tests change what is tried."""
    monkeypatch.setattr(health, "_KNOWN", {})
    monkeypatch.setattr(health, "SLOW", 0.0)
    monkeypatch.setenv(TIMEOUT, "0")
    monkeypatch.delenv(VARIABLE, raising=False)
    return BinaryCache(tmp_path / "cache")


def in_form(device, answers=None):
    found = as_gpu(device, GROUPED)
    found.subgroups = Subgroups(device.cl_device, answers)
    return found


def test_they_are_used_as_the_tunable_says(lists, fresh):
    found = in_form(lists, fresh)
    (tunable,) = found.tunables
    assert (tunable.value, "SUBGROUPS" in found.sharing()) == (IN_SUBGROUPS, True)
    tunable.value = HALVES
    assert found.sharing() == {"GROUP": "64"}


def test_profiles_measure_both_ways_with_each_sample(lists, fresh):
    found = in_form(lists, fresh)
    (tunable,) = found.tunables
    with found.open() as stream:
        measured = _measured(found, stream, tunable)
    assert [set(seconds) for seconds in measured] == [{HALVES, IN_SUBGROUPS}] * len(tunable.samples())


def test_devices_whose_work_items_share_nothing_have_no_such_tunable(device):
    assert device.tuning.row_group > 1 or (device.tunables, device.sharing()) == ((), {"GROUP": "1"})


def test_they_are_tried_in_a_process_of_their_own(lists, monkeypatch):
    monkeypatch.setattr(subgroups, "in_process", lambda *args: pytest.fail("it was tried in this process"))
    assert probe.probe(lists.cl_device, Trial("opweave_opencl.subgroups:in_process", ("",))) == WORKS


# One change each, as a driver might get it wrong, or not build it.
FAULTS = {
    "sums": ("#define IN_SUBGROUP_SUM(v) sub_group_reduce_add(v)", "#define IN_SUBGROUP_SUM(v) (v)"),
    "nan": ("(sub_group_any(v != v) ? sub_group_reduce_add(v) : sub_group_reduce_max(v))", "(sub_group_reduce_max(v))"),
    "building": ("sub_group_reduce_min(v)", "sub_group_reduce_least(v)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_driver_that_lists_them_and_fails_combines_in_local_memory(lists, fresh, monkeypatch, fault):
    right, wrong = FAULTS[fault]
    text = source("combining.cl")
    assert right in text
    changed = {"combining.cl": text.replace(right, wrong)}
    monkeypatch.setattr(subgroups, "source", lambda file: changed.get(file, source(file)))
    monkeypatch.setattr(subgroups, "tried", lambda device, given, *rest: probe.tried(
        device, given.replace('#include "combining.cl"', changed["combining.cl"]), *rest
    ))  # fmt: skip
    found = in_form(lists, fresh)
    if fault == "nan" and not found.subgroups.why_failing():
        pytest.skip("the largest of numbers with a NaN is a NaN with this driver")
    for wish in ("1", ""):
        monkeypatch.setenv(VARIABLE, wish)
        assert found.sharing() == {"GROUP": "64"}
    why = found.subgroups.why_failing()
    assert why.startswith("it builds no kernel: " if fault == "building" else "it computes wrong results: ")
    x = np.random.default_rng(0).standard_normal((3, 300), np.float32)
    np.testing.assert_allclose(run(found, ow.sum(ow.constant(x), 1))[0], x.sum(1, dtype=np.float64), rtol=1e-4)


def test_that_they_work_is_remembered(lists, fresh, monkeypatch):
    assert in_form(lists, fresh).subgroups.why_failing() == ""
    monkeypatch.setattr(health, "_KNOWN", {})
    monkeypatch.setattr(subgroups, "tried", lambda *args: pytest.fail("they were tried again"))
    assert in_form(lists, fresh).subgroups.why_failing() == ""


def test_options_are_tried_until_they_work(lists, fresh, monkeypatch):
    asked = []

    def why_failing(device, trial, *rest):
        asked.append(trial.arguments[0])
        return None if trial.arguments[0] == "-cl-std=CL2.0" else f"no {trial.arguments[0]}"

    monkeypatch.setattr(subgroups, "why_failing", why_failing)
    monkeypatch.setattr(subgroups, "_options", lambda device: ["", "-cl-std=CL3.0", "-cl-std=CL2.0"])
    found = in_form(lists, fresh)
    assert found.sharing()["SUBGROUPS"] == "-cl-std=CL2.0"
    assert asked == ["", "-cl-std=CL3.0", "-cl-std=CL2.0"]
    x = np.random.default_rng(0).standard_normal((3, 300), np.float32)
    (got,) = run(found, ow.sum(ow.constant(x), 1))  # built with the option
    np.testing.assert_allclose(got, x.sum(1, dtype=np.float64), rtol=1e-4)


@pytest.mark.parametrize(
    ("extensions", "version", "features", "name", "options"),
    [
        ("cl_khr_fp16", "OpenCL C 1.2", [], "", [""]),
        ("cl_khr_fp16 cl_intel_subgroups", "OpenCL C 1.2 ", [], "cl_intel_subgroups", [""]),
        ("cl_khr_subgroups", "OpenCL C 2.0 AMD", [], "cl_khr_subgroups", ["", "-cl-std=CL2.0"]),
        ("", "OpenCL C 3.0", ["__opencl_c_subgroups"], "__opencl_c_subgroups", ["", "-cl-std=CL3.0", "-cl-std=CL2.0"]),
        ("", "OpenCL C 3.0", ["__opencl_c_fp64"], "", ["", "-cl-std=CL3.0", "-cl-std=CL2.0"]),
    ],
)
def test_extensions_and_features_that_list_them(extensions, version, features, name, options):
    given = SimpleNamespace(extensions=extensions, opencl_c_version=version)
    given.opencl_c_features = [SimpleNamespace(name=feature) for feature in features]
    assert subgroups.listed(given) == name  # type: ignore[arg-type]
    assert subgroups._options(given) == options  # type: ignore[arg-type]


def test_drivers_that_know_no_features_list_none():
    class Old:
        extensions = ""

        @property
        def opencl_c_features(self):
            raise cl.LogicError("clGetDeviceInfo failed: INVALID_VALUE")

    assert subgroups.listed(Old()) == ""  # type: ignore[arg-type]


# --- what users see ---------------------------------------------------------------------------------------------------


def told(device):
    return [found for found in opweave_doctor(devices=[device]) if found.about.startswith("sub-groups")]


def test_doctor_says_whether_they_are_used(lists, fresh, monkeypatch):
    found = in_form(lists, fresh)
    (used,) = told(found)
    assert (used.about, used.status) == (f"sub-groups of {found.name}", "ok")
    assert used.message == f"used ({found.subgroups.listed})"
    found.subgroups.tunable.value = HALVES
    assert told(found)[0].message == "not used: local memory was measured to be faster"
    monkeypatch.setenv(VARIABLE, "0")
    assert told(found)[0].message == f"not used: {VARIABLE}=0"
    monkeypatch.setattr(subgroups, "why_failing", lambda *args: "it builds no kernel: X")
    monkeypatch.delenv(VARIABLE)
    (failing,) = told(in_form(lists, fresh))
    assert failing.status == "slow"
    assert failing.message == f"not used: {found.subgroups.listed} is listed, but it builds no kernel: X"
    assert told(anew(lists)) == []


def test_features_name_the_extension(device):
    assert device.features()["subgroups"] == (device.subgroups.listed or False)
