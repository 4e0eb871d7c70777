"""Linear algebra: Hadamard matrices by hand, torch's triangular solver, doubly stochastic sums."""

import numpy as np
import pytest
import torch

import opweave as ow
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(11)


def value(tensor):
    return evaluate(tensor, {})


def test_the_transform_of_unit_vectors_is_sylvesters_matrix():
    got = value(ow.hadamard_transform(ow.constant(np.eye(4))))
    np.testing.assert_array_equal(got, [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])


@pytest.mark.parametrize("n", [1, 2, 8, 64, 512])
def test_the_scaled_transform_is_its_own_inverse(n):
    x = RNG.standard_normal((3, n))
    once = ow.hadamard_transform(ow.constant(x), n**-0.5)
    np.testing.assert_allclose(value(ow.hadamard_transform(once, n**-0.5)), x, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(np.linalg.norm(value(once), axis=1), np.linalg.norm(x, axis=1))


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("unitriangular", [False, True])
def test_triangular_systems_are_torchs(upper, unitriangular):
    a, b = RNG.standard_normal((2, 1, 6, 6)) + 6 * np.eye(6), RNG.standard_normal((3, 6, 4))
    got = value(ow.solve_triangular(ow.constant(a), ow.constant(b), upper=upper, unitriangular=unitriangular))
    want = torch.linalg.solve_triangular(
        torch.from_numpy(a), torch.from_numpy(b).expand(2, 3, 6, 4), upper=upper, unitriangular=unitriangular
    )
    assert got.shape == (2, 3, 6, 4)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-12, atol=1e-13)


def test_sinkhorn_makes_rows_and_columns_sum_to_one():
    m = value(ow.sinkhorn(ow.constant(RNG.standard_normal((5, 4, 4)))))
    assert (m > 0).all()
    np.testing.assert_allclose(m.sum(-1), 1, atol=1e-3)
    np.testing.assert_allclose(m.sum(-2), 1, atol=1e-5)


def test_sinkhorn_of_one_iteration_is_a_softmax_with_normalised_columns():
    x = torch.from_numpy(RNG.standard_normal((4, 4)))
    want = torch.softmax(x, -1) + 1e-3
    want = want / (want.sum(0) + 1e-3)
    np.testing.assert_allclose(value(ow.sinkhorn(ow.constant(x.numpy()), 1, 1e-3)), want.numpy(), rtol=1e-12)


def test_what_does_not_fit_is_refused():
    x = ow.input("x", (3, 6))
    with pytest.raises(ow.ShapeError, match="a power of two"):
        ow.hadamard_transform(x)
    with pytest.raises(ow.ShapeError, match=r"needs A \(\.\.\., n, n\)"):
        ow.solve_triangular(x, x)
    with pytest.raises(ow.ShapeError, match="do not broadcast"):
        ow.solve_triangular(ow.input("a", (2, 3, 3)), ow.input("b", (5, 3, 6)))
    with pytest.raises(ow.ShapeError, match="square matrices"):
        ow.sinkhorn(x)
    with pytest.raises(ow.DTypeError, match="iterations is at least 1"):
        ow.sinkhorn(ow.input("y", (3, 3)), 0)
