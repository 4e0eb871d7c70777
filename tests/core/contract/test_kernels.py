"""`KernelTable`: what a device supports follows from what its kernels were declared for, and so do the reasons."""

# mypy: no-check-untyped-defs

from __future__ import annotations

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Arg, Group, Limit, Step
from opweave.contract.kernels import KernelTable
from opweave.errors import LifetimeError, UnknownNameError, UnsupportedOpError
from opweave.graph.dtypes import as_dtype, f16, f32, i32, q4_0, u8
from opweave.graph.layout import dense_strides
from opweave.runtime.host.device import HostDevice
from opweave.runtime.host.memory import HostMemory
from tests.support.devices import Plain


def arg(dtype="f32", shape=(4, 8), strides=None) -> Arg:
    dtype = as_dtype(dtype)
    return Arg(None, 0, dtype, shape, strides or dense_strides(shape, dtype))


def step(op, out, *srcs, **attrs) -> Step:
    return Step(op, out, srcs, attrs)


def factory(*args, **kwargs):
    return lambda: (args, kwargs)


def table(*ops, **declared) -> KernelTable:
    kernels = KernelTable()
    kernels(*ops, **declared)(factory)
    return kernels


def test_an_op_without_a_kernel():
    kernels = table("add", "mul")
    assert kernels.ops() == {"add", "mul"}
    assert kernels.why_not(step("exp", arg(), arg())) == "no kernel for exp"
    assert kernels.find(step("exp", arg(), arg())) is None
    assert kernels.why_not(step("mul", arg(), arg(), arg())) is None


@pytest.mark.parametrize(
    ("dtypes", "out", "source", "why"),
    [
        ("f32", "f32", "f32", None),
        ("f32 f16", "f16", "f32", None),
        ("f32", "f16", "f32", "the output is f16, not f32"),
        ("f16 f32", "f32", "i32", "source 0 is i32, not f16 f32"),
        ([f32, i32], "f32", "i32", None),
        ("float32", "f32", "f32", None),
    ],
)
def test_dtypes(dtypes, out, source, why):
    assert table("cast", dtypes=dtypes).why_not(step("cast", arg(out), arg(source))) == why


def test_unknown_dtypes_are_refused_at_once():
    with pytest.raises(UnknownNameError, match="f32"):
        table("add", dtypes="f23")


def test_index_operands_have_types_of_their_own():
    kernels = table("embedding", "argmax", "index_copy", index="i32")
    ids = arg("i32", (3,))
    assert kernels.why_not(step("embedding", arg(shape=(3, 8)), arg(), ids)) is None
    assert kernels.why_not(step("embedding", arg(shape=(3, 8)), arg(), arg("i64", (3,)))) == "source 1 is i64, not i32"
    assert kernels.why_not(step("argmax", arg("i64", (4,)), arg(), axis=1)) == "the output is i64, not i32"
    assert kernels.why_not(step("argmax", arg("i32", (4,)), arg(), axis=1)) is None
    # The target of a writing op is its output and not repeated among the sources.
    assert kernels.why_not(step("index_copy", arg(), ids, arg(shape=(3, 8)))) is None
    assert kernels.why_not(step("index_copy", arg(), arg("i64", (3,)), arg(shape=(3, 8)))) == "source 0 is i64, not i32"
    assert table("embedding").why_not(step("embedding", arg(shape=(3, 8)), arg(), arg("i64", (3,)))) is None


@pytest.mark.parametrize(
    ("name", "shape", "strides", "dense", "rows"),
    [
        ("dense", (4, 8), (32, 4), None, None),
        ("rows apart", (4, 8), (64, 4), "source 0 is not dense", None),
        ("transposed", (4, 8), (4, 16), "source 0 is not dense", "the rows of source 0 have gaps"),
        ("repeated rows", (4, 8), (0, 4), "source 0 is not dense", None),
        ("repeated columns", (4, 8), (4, 0), "source 0 is not dense", "the rows of source 0 have gaps"),
        ("one column", (4, 1), (4, 400), None, None),
        ("a number", (), (), None, None),
    ],
)
def test_layouts(name, shape, strides, dense, rows):
    s = step("neg", arg(shape=shape), arg(shape=shape, strides=strides))
    assert table("neg", layout="dense").why_not(s) == dense
    assert table("neg", layout="rows").why_not(s) == rows
    assert table("neg", layout="strided").why_not(s) is None


def test_quantized_rows():
    w = Arg(None, 0, q4_0, (4, 64), (72, 18))
    kernels = table("linear", dtypes="f32 q4_0", layout="rows")
    assert kernels.why_not(step("linear", arg(shape=(2, 4)), arg(shape=(2, 64)), w)) is None
    assert table("linear", layout="rows").why_not(step("linear", arg(shape=(2, 4)), arg(shape=(2, 64)), w)) == (
        "source 1 is q4_0, not f32"
    )


def test_a_further_condition_gives_its_own_reason():
    kernels = table("softmax", when=lambda step: "only the last axis" if step.attrs["axis"] != 1 else None)
    assert kernels.why_not(step("softmax", arg(), arg(), axis=0)) == "only the last axis"
    assert kernels.why_not(step("softmax", arg(), arg(), axis=1)) is None
    # It is called only for steps whose types and layouts fit.
    assert kernels.why_not(step("softmax", arg("f16"), arg(), axis=0)) == "the output is f16, not f32"


def test_a_condition_that_is_no_reason_is_an_error_of_the_author():
    with pytest.raises(TypeError, match="reason for refusing neg, or None"):
        table("neg", when=lambda step: True).why_not(step("neg", arg(), arg()))


def test_the_first_kernel_that_takes_a_step_runs_it():
    kernels = KernelTable(layout="strided")
    kernels("neg", layout="dense", inplace=True)(lambda *a, **k: "fast")
    kernels("neg", dtypes="f32 f16")(lambda *a, **k: "slow")
    strided = arg(strides=(4, 16))
    for source, want, inplace in ((arg(), "fast", True), (strided, "slow", False)):
        found = kernels.find(step("neg", arg(), source))
        assert found.factory() == want
        assert found.inplace == inplace
    assert (
        kernels.why_not(step("neg", arg("i32"), arg("i32")))
        == "the output is i32, not f32; the output is i32, not f16 f32"
    )
    assert len(kernels.candidates("neg")) == 2


def test_equal_reasons_are_given_once():
    kernels = table("neg")
    kernels("neg")(factory)
    assert kernels.why_not(step("neg", arg("i32"), arg("i32"))) == "the output is i32, not f32"


def test_a_table_falls_back_on_its_parent():
    parent = table("add", "mul")
    kernels = KernelTable("f16", parent=parent)
    kernels("add", "exp")(factory)
    assert kernels.ops() == {"add", "mul", "exp"}
    assert kernels.why_not(step("add", arg("f16"), arg("f16"), arg("f16"))) is None
    assert kernels.why_not(step("add", arg(), arg(), arg())) is None
    assert parent.why_not(step("exp", arg(), arg())) == "no kernel for exp"


def test_registering_nothing_is_an_error():
    with pytest.raises(TypeError, match="at least one operation"):
        KernelTable()()


def test_workspace_is_asked_for_and_handed_over():
    kernels = table("neg", workspace=lambda step: step.out.nbytes * 2)
    s = step("neg", arg(), arg())
    assert kernels.workspace(s) == 256
    assert kernels.workspace(step("exp", arg(), arg())) == 0
    assert table("neg").workspace(s) == 0
    scratch = Arg(None, 0, u8, (256,), (1,))
    with HostDevice().open() as stream:
        (_, op, out, source), named = kernels.bind(stream, Group((s,), 256, scratch))()
    assert (op, out, source, named) == ("neg", s.out, s.srcs[0], {"workspace": scratch})


def test_the_workspace_of_a_signature_is_asked_for_once():
    asked = []

    class Asked(HostMemory):
        kernels = KernelTable("f32")

    @Asked.kernels("neg", workspace=lambda s: asked.append(s) or {"scores": ("f32", (3, 5))})
    def neg(stream, op, out, source, *, scores):
        return lambda: np.negative(source.view, out=out.view)

    with ow.Scheduler([Asked(), "host"]) as scheduler:
        program = scheduler.build(ow.neg(ow.input("asked_once", (2, 3, 4))))
        assert program.run(asked_once=np.ones((2, 3, 4), np.float32)).max() == -1
        scheduler.build(ow.neg(ow.input("asked_not_again", (2, 3, 4))))
    assert len(asked) == 1


def test_named_arrays_are_sized_and_sliced_by_the_core():
    def wanted(step):
        return {"scores": ("f32", (3, 5)), "order": ("i64", (7,)), "unused": ("f64", (0, 4))}

    kernels = table("neg", workspace=wanted)
    s = step("neg", arg(), arg())
    assert kernels.workspace(s) == 64 + 64, "each array begins at a multiple of 64 bytes"
    buffer = HostDevice().alloc(64 + 128)
    with HostDevice().open() as stream:
        _, named = kernels.bind(stream, Group((s,), 128, Arg(buffer, 64, u8, (128,), (1,))))()
        assert named == {
            "scores": Arg(buffer, 64, as_dtype("f32"), (3, 5), (20, 4)),
            "order": Arg(buffer, 128, as_dtype("i64"), (7,), (8,)),
        }
        with pytest.raises(LifetimeError, match="'scores' has no memory"):
            kernels.bind(stream, Group((s,)))


def test_a_step_may_need_none_of_the_arrays():
    kernels = table("neg", workspace=lambda step: {})
    s = step("neg", arg(), arg())
    assert kernels.workspace(s) == 0
    with HostDevice().open() as stream:
        assert kernels.bind(stream, Group((s,)))()[1] == {}


@pytest.mark.parametrize("wanted", [{"a": "f32"}, {"a": ("f33", (3,))}, {"a": ("f32", 3)}, {"a": ("f32", (-1,))}])
def test_arrays_without_dtype_and_shape_are_an_error_of_the_author(wanted):
    with pytest.raises(TypeError, match="workspace= of neg must return name"):
        table("neg", workspace=lambda step: wanted).workspace(step("neg", arg(), arg()))


@pytest.mark.parametrize("size", [-1, "much", None])
def test_a_workspace_that_is_no_size_is_an_error_of_the_author(size):
    with pytest.raises(TypeError, match="number of bytes"):
        table("neg", workspace=lambda step: size).workspace(step("neg", arg(), arg()))


def test_a_factory_gets_stream_op_operands_and_attributes():
    kernels = table("softmax")
    s = step("softmax", arg(), arg(), axis=1, scale=0.5)
    with HostDevice().open() as stream:
        args, named = kernels.bind(stream, Group((s,)))()
        assert args == (stream, "softmax", s.out, s.srcs[0])
        assert named == {"axis": 1, "scale": 0.5}
        with pytest.raises(UnsupportedOpError, match="hostdevice does not run exp") as caught:
            kernels.bind(stream, Group((step("exp", arg(), arg()),)))
        assert caught.value.reasons == {"hostdevice": "no kernel for exp"}
        with pytest.raises(UnsupportedOpError, match="overrides _bind"):
            kernels.bind(stream, Group((s, s)))


def test_a_table_takes_arrays_of_f16_where_it_says_so():
    assert np.dtype(np.float16) == f16.numpy
    assert table("neg", dtypes=[f16]).why_not(step("neg", arg("f16"), arg("f16"))) is None


def test_a_step_that_is_taken_is_looked_up_once():
    asked = []

    def when(s):
        asked.append(s)

    kernels = table("neg", when=when, workspace=lambda s: 24)
    s = step("neg", arg(), arg())
    assert kernels.why_not(s) is None
    found = kernels.find(s)
    assert found is not None
    assert (kernels.workspace(s), kernels.find(s), len(asked)) == (24, found, 1)
    assert kernels.find(step("neg", arg(), arg())) is found
    assert len(asked) == 2
    kernels("exp")(found.factory)
    assert kernels.find(s) is found
    assert len(asked) == 3
    assert kernels.why_not(s) is None
    assert len(asked) == 4


# --- precision ------------------------------------------------------------------------------------------------------


def test_kernels_of_the_roughest_allowed_precision_come_first():
    kernels = KernelTable()
    made = {}
    for precision in ("exact", "int8", "bf16"):
        kernels("linear", precision=precision)(factory)
        made[precision] = kernels.candidates("linear")[-1]
        assert made[precision].precision == precision
    plain = step("linear", arg(), arg(), arg())
    for allowed, kernel in made.items():
        assert kernels.find(plain._replace(precision=allowed)) is kernel


def test_a_kernel_that_refuses_leaves_the_step_to_a_finer_one():
    kernels = table("linear")
    kernels("linear", precision="int8", when=lambda s: "not this one")(factory)
    found = kernels.find(step("linear", arg(), arg(), arg())._replace(precision="int8"))
    assert found is not None
    assert found.precision == "exact"


def test_what_is_not_allowed_is_the_reason():
    kernels = table("linear", precision="bf16")
    plain = step("linear", arg(), arg(), arg())
    assert kernels.why_not(plain) == "its kernel computes in bf16, and exact is asked for"
    assert kernels.why_not(plain._replace(precision="int8")) is None
    kernels("linear")(factory)
    assert kernels.why_not(step("linear", arg("i32"), arg())) == "the output is i32, not f32"


def test_a_precision_that_does_not_exist():
    with pytest.raises(UnknownNameError, match="no precision named 'fp8'"):
        KernelTable()("linear", precision="fp8")


def test_devices_are_asked_anew_after_a_limit_was_set():
    rows = Limit("rows", 8, 1, 64)

    def few_rows(step: Step) -> str | None:
        return None if step.out.shape[0] < rows.value else "too many rows"

    device = Plain()
    device.kernels = table("neg", when=few_rows)
    y = ow.neg(ow.input("x", (16, 2)))
    assert not ow.Scheduler(device).supports(device, y)
    with rows.at(32):
        assert ow.Scheduler(device).supports(device, y)
    assert not ow.Scheduler(device).supports(device, y)
