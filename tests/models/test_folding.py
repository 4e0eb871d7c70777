"""Windows put together again, and relative positions: against torch and plain loops."""

import numpy as np
import pytest
import torch

import opweave as ow
import opweave_models
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(17)


def value(tensor):
    return evaluate(tensor, {})


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 7])
@pytest.mark.parametrize("padding", [0, 1])
def test_col2im1d_is_torchs_fold(taps, stride, padding):
    x = RNG.standard_normal((2, 3 * taps, 4))
    length = 3 * stride + taps - 2 * padding
    want = torch.nn.functional.fold(
        torch.from_numpy(x), (1, length), (1, taps), stride=(1, stride), padding=(0, padding)
    )
    np.testing.assert_allclose(
        value(opweave_models.col2im1d(ow.constant(x), taps, stride, padding)), want[:, :, 0].numpy()
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_windows_put_together_are_the_image(size):
    x = RNG.standard_normal((2, 5, 7, 3))
    windows = opweave_models.window_partition(ow.constant(x), size)
    assert windows.shape == (2 * -(-5 // size) * -(-7 // size), size, size, 3)
    first = np.zeros((size, size, 3))
    corner = x[0, :size, :size]
    first[: corner.shape[0], : corner.shape[1]] = corner
    np.testing.assert_array_equal(value(windows)[0], first)
    np.testing.assert_array_equal(value(opweave_models.window_unpartition(windows, (5, 7))), x)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (2, 5), (5, 2)])
def test_relative_positions_are_rows_by_distance(queries, keys):
    table = RNG.standard_normal((queries + keys - 1, 4))
    got = value(opweave_models.relative_positions(ow.constant(table), queries, keys))
    for q in range(queries):
        for k in range(keys):
            np.testing.assert_array_equal(got[q, k], table[q - k + keys - 1])


def test_relative_positions_are_added_along_both_axes():
    scores, v, h = (RNG.standard_normal(s) for s in ((2, 6, 20), (2, 2, 3, 4), (2, 2, 3, 5)))
    got = value(opweave_models.add_relative_positions(*map(ow.constant, (scores, v, h))))
    want = scores.reshape(2, 2, 3, 4, 5) + v[..., None] + h[:, :, :, None]
    np.testing.assert_allclose(got, want.reshape(2, 6, 20))


def test_hyper_connections_mix_streams():
    x, streams = RNG.standard_normal((3, 5)), RNG.standard_normal((3, 4, 5))
    weights, mixing = RNG.standard_normal((3, 4)), RNG.standard_normal((3, 4, 4))
    pre = value(opweave_models.hyper_connection_pre(ow.constant(streams), ow.constant(weights)))
    np.testing.assert_allclose(pre, np.einsum("tne,tn->te", streams, weights))
    post = value(opweave_models.hyper_connection_post(*map(ow.constant, (x, streams, weights, mixing))))
    want = np.stack([
        [weights[t, d] * x[t] + sum(mixing[t, s, d] * streams[t, s] for s in range(4)) for d in range(4)]
        for t in range(3)
    ])  # fmt: skip
    np.testing.assert_allclose(post, want)


def test_what_does_not_fit_is_refused():
    x, image = ow.input("x", (2, 6, 4)), ow.input("i", (2, 5, 7, 3))
    with pytest.raises(ow.ShapeError, match="col2im1d: needs x"):
        opweave_models.col2im1d(x, 4)
    with pytest.raises(ow.ShapeError, match="leaves nothing"):
        opweave_models.col2im1d(x, 2, padding=3)
    with pytest.raises(ow.ShapeError, match="window_partition: needs x"):
        opweave_models.window_partition(x, 2)
    with pytest.raises(ow.ShapeError, match="window_unpartition: needs windows"):
        opweave_models.window_unpartition(image, (5, 7))
    with pytest.raises(ow.ShapeError, match="at least 9"):
        opweave_models.relative_positions(ow.input("t", (8, 4)), 5, 5)
    with pytest.raises(ow.ShapeError, match="add_relative_positions: needs scores"):
        opweave_models.add_relative_positions(x, image, image)
    with pytest.raises(ow.ShapeError, match="hyper_connection_pre: needs"):
        opweave_models.hyper_connection_pre(x, ow.input("w", (2, 4)))
    with pytest.raises(ow.ShapeError, match="hyper_connection_post: needs"):
        opweave_models.hyper_connection_post(ow.input("y", (2, 4)), x, ow.input("w", (2, 6)), ow.input("m", (2, 6, 5)))
