"""Convolutions, pools and resampling against torch.nn.functional."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import opweave as ow
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(23)


def value(tensor):
    return evaluate(tensor, {})


def floats(*shape):
    return RNG.standard_normal(shape)


def agree(name, *arrays, theirs=None, **options):
    """Our function and torch's of the same name give the same on arrays (``None`` stays)."""
    got = value(getattr(ow, name)(*[None if a is None else ow.constant(a) for a in arrays], **options))
    tensors = [None if a is None else torch.from_numpy(a) for a in arrays]
    want = getattr(functional, theirs or name)(*tensors, **options).numpy()
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"padding": 2},
        {"padding": "valid"},
        {"padding": "same"},
        {"padding": "same", "dilation": 3},
        {"stride": 3, "padding": 1, "dilation": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_convolutions_are_torchs(rank, options, groups):
    x, w, b = floats(2, 4, *(9, 8, 7)[:rank]), floats(8, 4 // groups, *(3, 2, 2)[:rank]), floats(8)
    agree(f"conv{rank}d", x, w, b, groups=groups, **options)
    agree(f"conv{rank}d", x[0], w, None, groups=groups, **options)


def test_conv2d_takes_a_number_for_each_axis():
    x, w = floats(1, 3, 9, 12), floats(5, 3, 2, 3)
    agree("conv2d", x, w, stride=(2, 3), padding=(1, 2), dilation=(2, 1))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 3},
        {"padding": 2},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"stride": 2, "dilation": 3, "output_padding": 2, "padding": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_are_torchs(rank, options, groups):
    x, w, b = floats(2, 4, *(5, 6)[:rank]), floats(4, 3, *(3, 4)[:rank]), floats(3 * groups)
    agree(f"conv_transpose{rank}d", x, w, b, groups=groups, **options)
    agree(f"conv_transpose{rank}d", x[0], w, None, groups=groups, **options)


def test_transposed_is_the_transpose_of_the_convolution():
    x, y, w = floats(1, 3, 8, 9), floats(1, 5, 4, 4), floats(5, 3, 2, 3)
    options = {"stride": 2}
    forward = value(ow.conv2d(ow.constant(x), ow.constant(w), **options))
    back = value(ow.conv_transpose2d(ow.constant(y), ow.constant(w), **options))
    assert (forward * y).sum() == pytest.approx((x * back).sum())


@pytest.mark.parametrize(
    "options", [{"kernel_size": 2}, {"kernel_size": (2, 3), "stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)}]
)
def test_im2col_is_torchs_unfold(options):
    x = floats(2, 3, 7, 8)
    agree("im2col", x, theirs="unfold", **options)
    if isinstance(options["kernel_size"], tuple):
        agree("im2col", x[0], theirs="unfold", **options)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_convolution_is_a_product_with_columns(rank):
    x, w = floats(2, 3, *(6, 5, 4)[:rank]), floats(4, 3, *(2, 3, 2)[:rank])
    columns = ow.im2col(ow.constant(x), w.shape[2:], padding=1)
    product = value(ow.matmul(ow.constant(w.reshape(4, -1)), columns))
    want = value(getattr(ow, f"conv{rank}d")(ow.constant(x), ow.constant(w), padding=1))
    np.testing.assert_allclose(product.reshape(want.shape), want, rtol=1e-11, atol=1e-12)


POOLS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 4, "stride": 3, "padding": 2, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
]


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("options", POOLS, ids=str)
@pytest.mark.parametrize("n", [7, 10])
def test_pools_are_torchs(rank, options, n):
    x = floats(2, 3, *(n, 11)[:rank])
    agree(f"max_pool{rank}d", x, **options)
    agree(f"max_pool{rank}d", x[0], **options)
    agree(f"avg_pool{rank}d", x, **options)
    agree(f"avg_pool{rank}d", x, count_include_pad=False, **options)


def test_more_of_pools():
    x = floats(1, 2, 9, 10)
    agree("max_pool2d", x, kernel_size=(2, 3), stride=(1, 2), padding=(1, 0), dilation=(3, 2))
    agree("avg_pool2d", x, kernel_size=(2, 3), stride=(1, 2), padding=(1, 0))
    agree("avg_pool2d", x, kernel_size=2, divisor_override=3)
    x[0, 0, 3, 3], x[0, 1, 0, 0] = np.nan, -np.inf
    agree("max_pool2d", x, kernel_size=3, padding=1)
    agree("max_pool2d", RNG.integers(-9, 9, (1, 2, 6, 6)), kernel_size=2, padding=1)


@pytest.mark.parametrize("size", [(10, 14), (5, 7), (3, 20), (1, 1), (11, 2)])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolate_to_a_size_is_torchs(size, mode):
    x = floats(2, 3, 5, 7)
    agree("interpolate", x, size=size, mode=mode)
    if mode != "nearest":
        agree("interpolate", x, size=size, mode=mode, align_corners=True)


@pytest.mark.parametrize("factor", [2, 0.5, 1.3, (1.7, 0.6)])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolate_by_a_factor_is_torchs(factor, mode):
    agree("interpolate", floats(1, 2, 9, 10), scale_factor=factor, mode=mode)
    if mode != "nearest":
        agree("interpolate", floats(1, 2, 9, 10), scale_factor=factor, mode=mode, align_corners=True)


def test_interpolate_in_one_and_three_axes_is_torchs():
    agree("interpolate", floats(2, 3, 9), size=13, mode="linear")
    agree("interpolate", floats(2, 3, 9), size=4)
    agree("interpolate", floats(1, 2, 3, 4, 5), size=(5, 3, 7), mode="trilinear")
    agree("interpolate", floats(1, 2, 3, 4, 5), scale_factor=2)


def test_nearest_hits_whole_places_exactly():
    x = np.arange(100)
    got = value(ow.interpolate(ow.constant(x.reshape(1, 1, -1)), size=4900))
    np.testing.assert_array_equal(got[0, 0], np.repeat(x, 49))


def test_dtypes():
    x, w = ow.input("x", (1, 2, 5, 5), "f16"), ow.input("w", (3, 2, 2, 2))
    assert ow.conv2d(x, w).dtype.name == "f32"
    assert ow.conv2d(ow.input("i", (1, 2, 5, 5), "u8"), w).dtype.name == "f32"
    assert ow.max_pool2d(ow.input("i", (1, 2, 5, 5), "u8"), 2).dtype.name == "u8"
    assert ow.avg_pool2d(ow.input("i", (1, 2, 5, 5), "u8"), 2).dtype.name == "f32"
    assert ow.interpolate(ow.input("i", (1, 2, 5, 5), "u8"), 2).dtype.name == "u8"
    assert ow.im2col(ow.input("i", (1, 2, 5, 5), "bool"), 2).dtype.name == "bool"


def test_nodes_are_normalised():
    x, w = ow.input("x", (1, 2, 5, 6)), ow.input("w", (3, 2, 3, 2))
    node = ow.conv2d(x, w, padding="same")
    assert node.attrs == {"stride": (1, 1), "padding": ((1, 1), (0, 1)), "dilation": (1, 1), "groups": 1}
    assert ow.conv2d(x, w, padding=1) is ow.conv2d(x, w, None, (1, 1), (1, 1), 1)
    assert ow.max_pool2d(x, 2) is ow.max_pool2d(x, (2, 2), 2)
    assert ow.avg_pool2d(x, 2).attrs["divisor"] == 0


def test_refusals():
    x, w = ow.input("x", (1, 4, 5, 6)), ow.input("w", (3, 4, 3, 2))
    with pytest.raises(ow.ShapeError, match=r"conv2d: 2 groups do not divide .* input 'x' f32\[1, 4, 5, 6\]"):
        ow.conv2d(x, w, groups=2)
    with pytest.raises(ow.ShapeError, match=r"conv2d: the bias must have shape \(3,\)"):
        ow.conv2d(x, w, ow.input("b", (4,)))
    with pytest.raises(ow.ShapeError, match="conv2d: no window fits"):
        ow.conv2d(x, w, dilation=3)
    with pytest.raises(ow.ShapeError, match="stride is an integer of at least 1, or 2 of them, not 0"):
        ow.conv2d(x, w, stride=0)
    with pytest.raises(ow.ShapeError, match="padding='same' needs a stride of 1"):
        ow.conv2d(x, w, stride=2, padding="same")
    with pytest.raises(ow.ShapeError, match="conv1d: needs weights"):
        ow.conv1d(x, w)
    with pytest.raises(ow.ShapeError, match="conv3d"):
        ow.conv3d(x, ow.input("w", (3, 4, 3, 2, 2, 2)))
    with pytest.raises(ow.DTypeError, match="conv1d does not take q8_0"):
        ow.conv1d(ow.input("x", (1, 4, 32), "q8_0"), ow.input("w", (3, 4, 3)))
    with pytest.raises(ow.ShapeError, match="output_padding 2 must be below stride 2"):
        ow.conv_transpose2d(x, ow.input("w", (4, 3, 2, 2)), stride=2, output_padding=2)
    with pytest.raises(ow.ShapeError, match="conv_transpose2d: needs x"):
        ow.conv_transpose2d(x, w)
    with pytest.raises(ow.ShapeError, match="nothing is left"):
        ow.conv_transpose2d(x, ow.input("w", (4, 3, 1, 1)), padding=4)
    with pytest.raises(ow.ShapeError, match="no window of"):
        ow.im2col(x, 7)
    with pytest.raises(ow.ShapeError, match=r"col2im: .*as \(4, 4\) windows fit"):
        ow.col2im(ow.input("c", (1, 8, 15)), (5, 5), 2)
    with pytest.raises(ow.ShapeError, match="no window"):
        ow.col2im(ow.input("c", (1, 8, 16)), (5, 5), 7)
    with pytest.raises(ow.ShapeError, match="one to three lengths"):
        ow.col2im(ow.input("c", (1, 8, 16)), (5, 5, 5, 5), 2)
    with pytest.raises(ow.ShapeError, match="padding 2 must be at most half"):
        ow.max_pool2d(x, 3, padding=2)
    with pytest.raises(ow.ShapeError, match="no window of"):
        ow.avg_pool2d(x, 9)
    with pytest.raises(ow.ShapeError, match="avg_pool1d: needs"):
        ow.avg_pool1d(x, 2)
    with pytest.raises(ow.ShapeError, match="either size or scale_factor"):
        ow.interpolate(x)
    with pytest.raises(ow.ShapeError, match="no mode 'sharp'"):
        ow.interpolate(x, 2, mode="sharp")  # type: ignore[arg-type]
    with pytest.raises(ow.ShapeError, match="align_corners is no option"):
        ow.interpolate(x, 2, align_corners=True)
    with pytest.raises(ow.ShapeError, match="bilinear needs"):
        ow.interpolate(ow.input("x", (1, 2, 3)), 2, mode="bilinear")
    with pytest.raises(ow.DTypeError, match="scale_factor is a positive number"):
        ow.interpolate(x, scale_factor=-1)
    with pytest.raises(ow.DTypeError, match="scale_factor is a positive number"):
        ow.interpolate(x, scale_factor=1e308)
    with pytest.raises(ow.ShapeError, match="no mode"):
        ow.interpolate(x, 2, mode=["nearest"])  # type: ignore[arg-type]
    with pytest.raises(ow.ShapeError, match="stride is an integer of at least 1"):
        ow.max_pool2d(x, 1, stride=1 << 63)
