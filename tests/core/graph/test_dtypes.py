"""Element types: names, sizes, promotion."""

import pickle

import ml_dtypes
import numpy as np
import pytest

import opweave as ow
from opweave.graph.dtypes import DTYPES, STORED, as_dtype, promote

PLAIN = [t for t in DTYPES.values() if not t.is_quantized]
QUANTIZED = [t for t in DTYPES.values() if t.is_quantized]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=repr)
def test_there_is_one_object_for_each_type(dtype):
    assert as_dtype(dtype) is dtype
    assert as_dtype(dtype.name) is dtype
    assert as_dtype(dtype.name.upper()) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert repr(dtype) == str(dtype) == dtype.name


@pytest.mark.parametrize("dtype", PLAIN, ids=repr)
def test_plain_types_are_numpys(dtype):
    assert as_dtype(dtype.numpy) is dtype
    assert as_dtype(dtype.numpy.type) is dtype
    assert as_dtype(str(dtype.numpy)) is dtype
    assert dtype.itemsize == dtype.numpy.itemsize
    assert dtype.block == 1
    assert dtype.row_bytes(6) == 6 * dtype.itemsize


@pytest.mark.parametrize("dtype", QUANTIZED, ids=repr)
def test_quantized_types_are_bytes_in_blocks(dtype):
    assert dtype.numpy == np.uint8
    assert dtype.row_bytes(3 * dtype.block) == 3 * dtype.itemsize
    assert not dtype.is_float
    assert not dtype.is_integer


def test_kinds():
    eighths = {"f8_e4m3", "f8_e4m3fnuz", "f8_e5m2", "f8_e5m2fnuz", "f8_e8m0", "f4_e2m1"}
    assert {t.name for t in PLAIN if t.is_float} == {"f64", "f32", "f16", "bf16"} | eighths
    assert {t.name for t in PLAIN if t.is_half} == {"f16", "bf16"}
    assert {t.name for t in PLAIN if t.is_integer} == {
        "i64", "i32", "i16", "i8", "u8", "u64", "u32", "u16", "i4", "u4", "i2", "u2",
    }  # fmt: skip
    assert as_dtype(ml_dtypes.bfloat16).name == "bf16"
    assert as_dtype(float).name == "f64"
    assert as_dtype(bool).name == "bool"


@pytest.mark.parametrize("like", [np.complex64, "U3", object, np.datetime64, 3, None.__class__, ow.input("x", (2,))])
def test_types_that_do_not_exist_here(like):
    with pytest.raises((ow.DTypeError, ow.UnknownNameError)):
        as_dtype(like)


def test_names_that_do_not_exist_get_suggestions():
    with pytest.raises(ow.UnknownNameError, match="no dtype named 'bf61'; did you mean 'bf16'"):
        as_dtype("bf61")


@pytest.mark.parametrize("a", PLAIN, ids=repr)
@pytest.mark.parametrize("b", PLAIN, ids=repr)
def test_promotion_is_commutative_and_idempotent(a, b):
    if {a.kind, b.kind} == {"i", "u"} and as_dtype("u64") in (a, b):
        with pytest.raises(ow.DTypeError, match="no integer type holds both"):
            promote(a, b)
        return
    common = promote(a, b)
    assert promote(b, a) is common
    assert promote(common, a) is common
    assert promote(common, b) is common


INTEGERS = [t for t in PLAIN if t.is_integer and t.numpy.kind in "iu"]


@pytest.mark.parametrize("a", INTEGERS, ids=repr)
@pytest.mark.parametrize("b", INTEGERS, ids=repr)
def test_integers_promote_as_numpys(a, b):
    common = np.promote_types(a.numpy, b.numpy)
    if common.kind != "f":
        assert promote(a, b) is as_dtype(common)


@pytest.mark.parametrize("dtype", STORED.split())
def test_the_host_computes_in_types_that_are_only_stored_elsewhere(dtype):
    kind = DTYPES[dtype].numpy
    x = np.array([1, 2, 1], np.float32).astype(kind)
    with ow.Scheduler(["cpu", "host"]) as scheduler:
        a, b = ow.input("a", (3,), dtype), ow.constant(x)
        outputs = {
            "copy": a[1:].contiguous(),
            "f32": a.astype("f32"),
            "back": ow.constant([1.0, 2.0, 1.0]).astype(dtype),
            "equal": ow.equal(a, b),
            "pick": ow.where(ow.constant([True, False, True]), a, b),
        }
        results = scheduler.build(outputs).run(a=x)
    assert results["copy"].dtype == results["back"].dtype == results["pick"].dtype == kind
    np.testing.assert_array_equal(results["copy"], x[1:])
    np.testing.assert_array_equal(results["f32"], x.astype(np.float32))
    np.testing.assert_array_equal(results["back"], x)
    np.testing.assert_array_equal(results["pick"], x)
    assert results["equal"].all()


@pytest.mark.parametrize("dtype", QUANTIZED, ids=repr)
def test_quantized_types_do_not_promote(dtype):
    with pytest.raises(ow.DTypeError, match="quantized types only enter linear"):
        promote(dtype, as_dtype("f32"))
    with pytest.raises(ow.DTypeError):
        promote(as_dtype("i8"), dtype)


@pytest.mark.parametrize("name", ["q8_1", "Q8_K", "q1_0"])
def test_errors_name_block_types_that_are_not_decoded(name):
    with pytest.raises(ow.UnknownNameError, match="block type that is not supported; there are q4_0, ") as caught:
        as_dtype(name)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("no_type", [None, 5, (), ("f4", 2), object(), "f32 ", [1]])
def test_what_names_no_type_is_refused(no_type):
    with pytest.raises((ow.DTypeError, ow.UnknownNameError), match="no dtype"):
        as_dtype(no_type)
