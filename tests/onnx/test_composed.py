"""Operators that are composed of operations that devices have: scattering, sampling, transforms, integer products. They
agree with ONNX Runtime on every device, and run there."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import opweave as ow
import opweave_onnx
from tests.support.onnx_models import model, node, value

F32, I64, I32 = np.float32, np.int64, np.int32
RNG = np.random.default_rng(5)


def agree(proto, feeds, placement, *, host=(), rtol=1e-4, atol=1e-5):
    """The results of ONNX Runtime; but for operations named in ``host`` nothing runs there."""
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    with opweave_onnx.load(proto, placement) as loaded:
        found = loaded.run(feeds)
        for name, want in zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True):
            assert found[name].dtype == want.dtype
            np.testing.assert_allclose(found[name], want, rtol=rtol, atol=atol)
        rows = loaded.program(feeds).explain().nodes
        assert {row.op for row in rows if row.device == "host"} <= set(host)


def made(operator, inputs, known=None, outputs=("y",), version=22, **attributes):
    names = " ".join([v.name if isinstance(v, onnx.ValueInfoProto) else v for v in inputs])
    given = [v for v in inputs if isinstance(v, onnx.ValueInfoProto)]
    return model([node(operator, names, " ".join(outputs), **attributes)], given, list(outputs), known or {},
                 version=version)  # fmt: skip


def floats(*shape):
    return RNG.standard_normal(shape).astype(F32)


@pytest.mark.parametrize("reduction", ["none", "add"])
@pytest.mark.parametrize(("known", "axis"), [(False, 0), (False, 1), (True, 2)])
def test_scatter_elements(placement, reduction, known, axis):
    ids = np.argsort(RNG.random((3, 4, 5)), axis)[:2, :2, :2].astype(I64)
    ids = np.minimum(ids, (3, 4, 5)[axis] - 1) - (3, 4, 5)[axis] * (RNG.random(ids.shape) < 0.5)
    if reduction == "none":  # of equal indices it is open which one stays
        ids = np.moveaxis(np.broadcast_to(np.arange(2), (2, 2, 2)), -1, axis).astype(I64) - (3, 4, 5)[axis]
    x, updates = value("x", F32, [3, 4, 5]), value("u", F32, [2, 2, 2])
    where = "ids" if known else value("ids", I64, [2, 2, 2])
    proto = made("ScatterElements", [x, where, updates], {"ids": ids} if known else None, axis=axis,
                 reduction=reduction)  # fmt: skip
    feeds = {"x": floats(3, 4, 5), "u": floats(2, 2, 2), **({} if known else {"ids": ids})}
    agree(proto, feeds, placement)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max"])
@pytest.mark.parametrize(("ids", "shape"), [([[0, 1], [-1, 2], [1, 0]], (3, 2)), ([[2], [-3]], (2, 3, 2))])
def test_scatter_nd(placement, reduction, ids, shape):
    proto = made("ScatterND", [value("x", F32, [3, 3, 2]), value("ids", I64, [len(ids), len(ids[0])]),
                               value("u", F32, shape)], reduction=reduction)  # fmt: skip
    feeds = {"x": floats(3, 3, 2), "ids": np.array(ids), "u": floats(*shape)}
    agree(proto, feeds, placement, host=("onnx.scatter_rows",) if reduction in ("mul", "max") else ())


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, F32, I64, np.float16])
def test_scattered_types(dtype):
    proto = made("ScatterND", [value("x", dtype, [4, 2]), value("ids", I64, [2, 1]), value("u", dtype, [2, 2])])
    feeds = {"x": (floats(4, 2) > 0).astype(dtype), "ids": np.array([[3], [0]]), "u": (floats(2, 2) > 0).astype(dtype)}
    agree(proto, feeds, ["cpu", "host"])


@pytest.mark.parametrize("operator", ["ScatterElements", "ScatterND", "GatherND"])
def test_indices_outside_are_named(operator):
    ids = np.array([[0], [7]])
    inputs = [value("x", F32, [4]), "ids", value("u", F32, [2, 1] if operator == "ScatterElements" else [2])]
    if operator == "ScatterElements":
        inputs[0], ids = value("x", F32, [4, 1]), np.array([[0], [7]])
    with (
        opweave_onnx.load(
            made(operator, inputs[: 2 if operator == "GatherND" else 3], {"ids": ids}), ["cpu"]
        ) as loaded,
        pytest.raises(ow.BoundsError, match=f"{operator}.*from 0 to 7 for an axis of length 4"),
    ):
        loaded.run(loaded.examples())
    inputs[1] = value("ids", I64, [2, 1])
    fed = made(operator, inputs[: 2 if operator == "GatherND" else 3])
    with opweave_onnx.load(fed, ["cpu"]) as loaded, pytest.raises(ow.ExecutionError, match="7"):
        loaded.run({**loaded.examples(), "ids": ids})


@pytest.mark.parametrize("known", [True, False], ids=["known", "fed"])
@pytest.mark.parametrize("ids", [[1], [-1, 2], [1, 2, 0]], ids=str)
@pytest.mark.parametrize("operator", ["ScatterND", "GatherND"])
def test_one_place_has_no_axis_of_its_own(operator, ids, known, placement):
    x, ids = floats(2, 3, 4), np.array(ids)
    inputs = [value("x", F32, [2, 3, 4]), "ids" if known else value("ids", I64, [len(ids)])]
    feeds = {"x": x} if known else {"x": x, "ids": ids}
    if operator == "ScatterND":
        inputs.append(value("u", F32, [2, 3, 4][len(ids) :]))
        feeds["u"] = floats(*[2, 3, 4][len(ids) :])
    agree(made(operator, inputs, {"ids": ids} if known else {}), feeds, placement)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [0, 1])
def test_grid_sample(mode, padding, corners):
    proto = made("GridSample", [value("x", F32, [2, 3, 5, 7]), value("g", F32, [2, 4, 6, 2])], mode=mode,
                 padding_mode=padding, align_corners=corners)  # fmt: skip
    grid = RNG.uniform(-1.6, 1.6, (2, 4, 6, 2)).astype(F32)
    agree(proto, {"x": floats(2, 3, 5, 7), "g": grid}, ["cpu", "host"])


def test_grid_sample_on_devices(placement):
    proto = made("GridSample", [value("x", F32, [2, 3, 5, 7]), value("g", F32, [2, 4, 6, 2])], mode="linear")
    agree(proto, {"x": floats(2, 3, 5, 7), "g": RNG.uniform(-1.6, 1.6, (2, 4, 6, 2)).astype(F32)}, placement)


def test_places_that_are_no_numbers_read_nothing_outside(placement):
    proto = made("GridSample", [value("x", F32, [1, 1, 3, 3]), value("g", F32, [1, 1, 5, 2])], mode="nearest")
    grid = np.array([np.nan, np.inf, -np.inf, 1e30, 0], F32).repeat(2).reshape(1, 1, 5, 2)
    with opweave_onnx.load(proto, placement) as loaded:
        got = loaded(x=np.full((1, 1, 3, 3), 2, F32), g=grid)
    np.testing.assert_array_equal(got.reshape(-1), [0, 0, 0, 0, 2])


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("transform", ["half_pixel", "output_half_pixel"])
def test_regions_of_images(placement, mode, transform):
    proto = made("RoiAlign", [value("x", F32, [2, 3, 9, 11]), value("r", F32, [4, 4]), value("b", I64, [4])], mode=mode,
                 output_height=3, output_width=2, sampling_ratio=2, spatial_scale=0.5,
                 coordinate_transformation_mode=transform, version=16)  # fmt: skip
    corner = RNG.uniform(-2, 12, (4, 2))
    rois = np.concatenate([corner, corner + RNG.uniform(0.5, 12, (4, 2))], 1).astype(F32)
    agree(proto, {"x": np.abs(floats(2, 3, 9, 11)), "r": rois, "b": np.array([0, 1, 1, 0])}, placement)


@pytest.mark.parametrize("onesided", [0, 1])
def test_transforms_of_frames(placement, onesided):
    proto = made("STFT", [value("x", F32, [2, 200, 1]), "step", "window"],
                 {"step": np.array(16), "window": np.hanning(64).astype(F32)}, onesided=onesided)  # fmt: skip
    agree(proto, {"x": floats(2, 200, 1)}, placement, atol=1e-3)


def test_sums_of_overlapping_blocks(placement):
    proto = made("Col2Im", [value("x", F32, [2, 12, 12]), "image", "block"],
                 {"image": np.array([5, 6]), "block": np.array([2, 3])}, pads=[0, 1, 1, 0],
                 strides=[1, 2], dilations=[2, 1])  # fmt: skip
    agree(proto, {"x": floats(2, 12, 12)}, placement)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("length", [7, 1000])
def test_products_of_quantized_integers_are_exact(placement, known, length):
    a = RNG.integers(200, 256, (3, length), np.uint8)
    b = RNG.integers(100, 128, (length, 5)).astype(np.int8)
    zeros = {"az": np.array(3, np.uint8), "bz": RNG.integers(-128, -100, 5).astype(np.int8)}
    inputs = [value("a", np.uint8, ["n", length]), "b" if known else value("b", np.int8, [length, 5]), "az", "bz"]
    proto = made("MatMulInteger", inputs, {**zeros, **({"b": b} if known else {})}, version=20)
    want = (a.astype(I64) - 3) @ (b.astype(I64) - zeros["bz"])
    assert length < 10 or want.max() > 1 << 24  # more than f32 holds
    with opweave_onnx.load(proto, placement) as loaded:
        feeds = {"a": a, **({} if known else {"b": b})}
        got = loaded.run(feeds)["y"]
        assert got.dtype == I32
        np.testing.assert_array_equal(got, want)
        rows = loaded.program(feeds).explain().nodes
        assert {row.device for row in rows} == {placement[0]}
        if known and length > 10:  # weights, which are no constants, are converted once for all shapes
            loaded.run({"a": a[:1]})
            assert len(loaded.session._derived) == 1


def test_elementary_functions_run_on_every_device(placement):
    names = ("Erf", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Atanh")
    proto = model([node(name, "x", name.lower()) for name in names], [value("x", F32, [64])],
                  [name.lower() for name in names])  # fmt: skip
    agree(proto, {"x": np.linspace(-0.95, 0.95, 64, dtype=F32)}, placement)


# --- resampling and transposed convolutions where the text leaves things open --------------------------------------

SCALES = (0.3, 1 / 3, 0.5, 0.6, 0.7, 0.9, 1.1, 1.5, 2.0, 2.5, 3.0)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("operator", "version"), [("Resize", 10), ("Upsample", 9), ("Upsample", 7)])
def test_resampling_before_version_11_is_that_of_onnx_runtime(placement, operator, version, mode):
    """The text names no rule of rounding: ONNX Runtime rounds up where it shrinks, down where it grows, in f32."""
    for n in (3, 5, 8, 10):
        for scale in SCALES:
            if (operator == "Upsample" and scale < 1) or (placement[0] != "cpu" and n != 8):
                continue
            given = {"scales": [1.0, 1.0, scale, 1.0]} if version == 7 else {}
            nodes = [node(operator, "x" if given else "x s", "r", mode=mode, **given), node("Neg", "r", "y")]
            known = {} if given else {"s": np.array([1, 1, scale, 1], F32)}
            proto = model(nodes, [value("x", F32, [1, 2, n, 2])], ["y"], known, version)
            agree(proto, {"x": floats(1, 2, n, 2)}, placement)


@pytest.mark.parametrize("nearest", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize("transform", ["half_pixel", "pytorch_half_pixel", "asymmetric"])
def test_scales_and_positions_of_nearest_elements_are_f32(transform, nearest):
    """1 / (1/3) is 3, and 10 · 0.7 is 7, in the f32 in which scales are given, and not in f64."""
    for n in (3, 5, 8, 10, 11):
        for scale in SCALES:
            if scale in (1.1, 0.9):  # where the length stays, ONNX Runtime copies
                continue
            proto = made("Resize", [value("x", F32, [1, 1, n, 1]), "-", "s"], {"s": np.array([1, 1, scale, 1], F32)},
                         version=19, coordinate_transformation_mode=transform, nearest_mode=nearest)  # fmt: skip
            agree(proto, {"x": floats(1, 1, n, 1)}, ["cpu", "host"])


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER", "NOTSET"])
@pytest.mark.parametrize("length", [5, 6, 7, 8, 9, 10])
def test_outputs_of_transposed_convolutions_longer_than_their_windows_end_in_zeros(placement, auto, length):
    """Two windows of 3 with a stride of 4 are 7 elements; longer outputs are what negative padding means."""
    w = {"w": floats(1, 2, 3)}
    proto = made(
        "ConvTranspose", [value("x", F32, [1, 1, 2]), "w"], w, strides=[4], auto_pad=auto, output_shape=[length]
    )
    agree(proto, {"x": floats(1, 1, 2)}, placement)


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 2), (2, 3), (3, 4), (1, 4), (3, 2), (4, 2)])
def test_same_padding_of_transposed_convolutions_makes_the_length_a_multiple(placement, auto, kernel, stride):
    """The standard wants the length times the stride; a kernel shorter than the stride leaves zeros at the end."""
    x, w = floats(1, 1, 3), floats(1, 1, kernel)
    whole = np.zeros(2 * stride + kernel)
    for i in range(3):
        whole[i * stride : i * stride + kernel] += x[0, 0, i].astype(np.float64) * w[0, 0]
    more = kernel - stride
    first = 0 if more < 0 else more // 2 if auto == "SAME_UPPER" else more - more // 2
    want = np.pad(whole[first:], (0, stride))[: 3 * stride]
    proto = made("ConvTranspose", [value("x", F32, [1, 1, 3]), "w"], {"w": w}, strides=[stride], auto_pad=auto)
    with opweave_onnx.load(proto, placement) as loaded:
        np.testing.assert_allclose(loaded(x=x)[0, 0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [12, 521, 1536])
def test_transforms_of_long_signals_run_on_devices(placement, n):
    x = RNG.standard_normal((2, n, 1)).astype(F32)
    half = np.fft.rfft(x[..., 0].astype(np.float64))
    z = np.stack([half.real, half.imag], -1).astype(F32)
    axis = {"axis": np.array(1)}
    forward = made("DFT", [value("x", F32, x.shape), "-", "axis"], axis, onesided=1)
    length = {**axis, "length": np.array(n)}
    back = made("DFT", [value("x", F32, z.shape), "length", "axis"], length, onesided=1, inverse=1)
    for proto, given, want in ((forward, x, z), (back, z, x)):
        with opweave_onnx.load(proto, placement) as loaded:
            np.testing.assert_allclose(loaded(x=given), want, rtol=0, atol=2e-5 * np.abs(want).max())
            assert {row.device for row in loaded.program({"x": given}).explain().nodes} == {
                ow.device(placement[0]).name
            }
