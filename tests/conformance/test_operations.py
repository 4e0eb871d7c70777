"""The cases themselves: they cover every operation, the references pass them, and each planted fault is found."""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from opweave.contract import Stream
from opweave.contract.kernels import KernelTable
from opweave.graph.dtypes import as_dtype
from opweave.graph.opdef import OPS
from opweave.runtime.host.device import HostDevice
from opweave_conformance import CASES, cases_for, run_case
from opweave_conformance.cases.derived import defaults, is_default
from opweave_conformance.trial import the_node
from opweave_conformance.values import make_values


def test_every_operation_has_cases():
    covered = Counter(case.op for case in CASES)
    wanted = {name for name, op in OPS.items() if not op.is_view and op.family != "third-party"}
    assert set(covered) == wanted
    assert len({case.id for case in CASES}) == len(CASES)


def test_cases_are_named_after_the_node_that_they_try():
    for case in CASES[::7]:
        assert case.build(*case.tensors()).root.name == case.op, case.id


SECOND_HALF = """
import json
from opweave_conformance import CASES, run_case
from opweave.runtime.host.device import HostDevice

device = HostDevice()
print(json.dumps([(case.id, *run_case(device, case)[:2]) for case in CASES[1::2]]))
"""


def test_the_references_pass_all_cases():
    """One half of the cases is run in a process of its own at the same time."""
    with subprocess.Popen([sys.executable, "-c", SECOND_HALF], stdout=subprocess.PIPE, text=True) as child:
        device = HostDevice()
        verdicts = [(case.id, *run_case(device, case)[:2]) for case in CASES[::2]]
        told, _ = child.communicate()
    verdicts += [tuple(verdict) for verdict in json.loads(told)]
    assert sorted(name for name, *_ in verdicts) == sorted(case.id for case in CASES)
    assert [verdict for verdict in verdicts if verdict[1] != "passed"] == []


def test_the_seed_decides_the_values():
    operand = cases_for("exp")[3].operands[0]
    dtype = as_dtype(operand.dtype)
    first, again, other = [make_values(np.random.default_rng(s), operand, operand.shape, dtype) for s in (0, 0, 1)]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


# --- planted faults -------------------------------------------------------------------------------------------------


class FaultyStream(Stream):
    def __init__(self, device, fault):
        super().__init__(device)
        self.fault = fault

    def _bind(self, group):
        step = group.steps[0]
        fault, definition = self.fault, OPS[step.op]

        def call():
            arrays = [s.view for s in step.srcs]
            with np.errstate(all="ignore"):
                if definition.writes:
                    definition.reference(step.out.view, *arrays, **step.attrs)
                else:
                    np.copyto(step.out.view, definition.reference(*arrays, **step.attrs), casting="unsafe")
                fault(step)

        return call


class FaultyHost(HostDevice):
    """The references, and something wrong after each of them."""

    def __init__(self, fault):
        self.fault = fault

    def _open(self, **params):
        return FaultyStream(self, self.fault)


def judge(name, fault):
    (case,) = [c for c in CASES if c.id == name]
    return run_case(FaultyHost(fault), case)


def bytes_of(arg):
    return arg.buffer.handle


def one_element_off(step):
    step.out.view[..., -1] *= np.float32(1.001)


def one_too_many(step):
    step.out.view[3] += 1


def one_past_the_end(step):
    bytes_of(step.out)[step.out.offset + step.out.nbytes] = 0


def one_before_the_start(step):
    bytes_of(step.out)[step.out.offset - 1] = 0


def source_changed(step):
    view = step.srcs[0].view
    view[(0,) * view.ndim] += 1


def gap_of_the_source_changed(step):
    bytes_of(step.srcs[0])[step.srcs[0].offset + 4] ^= 1


def nan_becomes_zero(step):
    np.nan_to_num(step.out.view, copy=False, posinf=np.inf, neginf=-np.inf)


def infinity_becomes_the_largest(step):
    np.copyto(step.out.view, np.finfo(np.float32).max, where=np.isposinf(step.out.view))


def nothing(step):
    pass


def rounded_to_f16(step):
    step.out.view[...] = step.out.view.astype(np.float16)


def last_of_equals(step):
    x = step.srcs[0].view
    step.out.view[...] = x.shape[-1] - 1 - np.argmax(x[..., ::-1], -1)


def in_f64(step):
    step.out.view[...] = step.srcs[0].view.astype(np.float64).sum(step.attrs["axes"]).astype(np.int64)


def saturated(step):
    a, b = (s.view.astype(object) for s in step.srcs)
    info = np.iinfo(step.out.dtype.numpy)
    step.out.view[...] = np.clip(a + b, info.min, info.max).astype(step.out.dtype.numpy)


def last_comes_first(step):
    x, axis = step.srcs[0].view, step.attrs["axis"]
    backwards = np.argsort(np.flip(x, axis).astype(np.float64), axis, kind="stable")
    step.out.view[...] = x.shape[axis] - 1 - backwards


def largest_in_any_order(step):
    x, axis = step.srcs[0].view, step.attrs["axis"]
    order = np.argsort(x.astype(np.float64), axis, kind="stable")
    step.out.view[...] = np.take(np.flip(order, axis), range(step.attrs["k"]), axis)


def minus_zero_is_smaller(step):
    x = step.srcs[0].view
    step.out.view[...] = np.lexsort((~np.signbit(x), x), -1)


def mask_left_out(step):
    x = step.srcs[0].view.astype(np.float64)
    raised = np.exp(x - x.max(-1, keepdims=True))
    step.out.view[...] = raised / raised.sum(-1, keepdims=True)


def raises(step):
    raise RuntimeError("the device fell over")


@pytest.mark.parametrize(
    ("name", "fault", "reason"),
    [
        ("exp-f32-1025", one_element_off, "largest error"),
        ("exp-f32-1025", one_past_the_end, "1 bytes outside of the output were written, the first at 4100"),
        ("exp-f32-1025", one_before_the_start, "bytes outside of the output were written, the first at -1"),
        ("add-f32-16x128,16x128", source_changed, "the source x0 was changed"),
        ("neg-f32-sliced-5x17", gap_of_the_source_changed, "the source x0 was changed"),
        ("exp-f32-67-special", nan_becomes_zero, "NaN or infinities differ"),
        ("exp-f32-67-special", infinity_becomes_the_largest, "NaN or infinities differ"),
        ("tanh-f32-1025", rounded_to_f16, "largest error"),
        ("argmax-f32-4x257-ties-axis1", last_of_equals, "elements differ: at "),
        ("argmax-f16-130-alike", last_of_equals, "elements differ: at "),
        ("argsort-u8-130-alike-ascending", last_comes_first, "elements differ: at "),
        ("argsort-bool-broadcast-1025x2-ascending", last_comes_first, "elements differ: at "),
        ("argsort-f32-130-alike-ascending", minus_zero_is_smaller, "elements differ: at "),
        ("top_k-bf16-2x4099-alike-k9", largest_in_any_order, "elements differ: at "),
        ("sum-i64-1025-ends-all", in_f64, "1 of 1 elements differ"),
        ("sum-i64-2x3x33-ends-axes02", in_f64, "3 of 3 elements differ"),
        ("add-i8-1025,1025-ends-to-i8", saturated, "of 1025 elements differ"),
        ("softmax-f32-3x5,3x5-mask-unscaled", mask_left_out, "largest error"),
        ("add-i32-64,64", one_too_many, "1 of 64 elements differ"),
        ("assign-f32-sliced+contiguous-5x17,5x17-region", gap_of_the_source_changed, "the source x1 was changed"),
        ("exp-f32-64", raises, "the device fell over"),
    ],
)
def test_a_planted_fault_is_found(name, fault, reason):
    verdict = judge(name, fault)
    assert verdict.status == "failed"
    assert not verdict
    assert reason in verdict.reason
    assert judge(name, nothing).status == "passed"


def test_a_kernel_that_cannot_work_in_place_is_found():
    def reads_again(step):
        # As a kernel does that writes before it has read everything.
        if (step.srcs[0].buffer, step.srcs[0].offset) == (step.out.buffer, step.out.offset):
            step.out.view[1:] = np.exp(step.out.view[:-1])

    verdict = judge("exp-f32-64", reads_again)
    assert verdict.status == "failed"
    assert verdict.reason.startswith("in place over source 0: ")


def test_writing_beside_the_region_of_a_state_is_found():
    def beside(step):
        bytes_of(step.out)[step.out.offset + 4] ^= 1  # between two elements of the region

    verdict = judge("assign-f32-sliced+contiguous-5x17,5x17-region", beside)
    assert verdict.status == "failed"
    assert "outside of the output" in verdict.reason


def test_what_a_device_does_not_run_is_refused_with_its_reason():
    class Small(HostDevice):
        def _why_not(self, step):
            return KernelTable("f32", "dense").why_not(step)

    verdict = run_case(Small(), CASES[0])
    assert (verdict.status, verdict.reason) == ("refused", "it has no kernels")
    assert verdict


def test_every_attribute_is_tried_at_its_default_and_beside_it_with_every_number_of_operands():
    seen: dict[tuple[str, str, int], set[bool]] = {}
    for case in CASES:
        node = the_node(case.build(*case.tensors()))
        assert node.op is not None
        for name, default in defaults(node.op.name).items():
            if name in node.attrs:
                key = node.op.name, name, len(node.srcs)
                seen.setdefault(key, set()).add(is_default(node.attrs[name], default))
    missing = {key for key, found in seen.items() if len(found) < 2}
    # Without a mask these take no other value.
    assert missing == {
        ("head_softmax", "max_bias", 2),
        ("attention", "max_bias", 3),
        ("attention_backward", "max_bias", 4),
    }
    assert {("softmax", "scale", 2), ("conv_transpose1d", "stride", 3), ("group_norm", "eps", 3)} <= seen.keys()


def test_every_type_of_integers_that_an_operation_takes_is_tried_to_its_ends():
    """But for operations that make integers of few ones, and writers of blocks, whose numbers are bits."""
    taken: set[tuple[str, str]] = set()
    tried: set[tuple[str, str]] = set()
    for case in CASES:
        for operand in case.operands:
            if operand.values != "ids" and operand.dtype in ("i64", "i32", "i16", "i8", "u8"):
                (tried if operand.values == "ends" else taken).add((case.op, operand.dtype))
    assert taken - tried == set()
