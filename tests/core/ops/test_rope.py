"""Rotary position embedding against its definition by complex numbers, onnxruntime's and the formulas of YaRN."""

from math import log, pi

import numpy as np
import onnx
import onnxruntime
import pytest

import opweave as ow
from opweave.ops.rope import rope_frequencies
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(22)


def value(tensor):
    return evaluate(tensor, {})


def floats(*shape):
    return RNG.standard_normal(shape)


def turned(x, angles, pairing):
    """Pairs as complex numbers, times e^(i angle)."""
    if pairing == "adjacent":
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_pairs_rotate_as_complex_numbers(pairing, base):
    x, positions = floats(2, 3, 5, 8), np.array([0, 1, 7, 100, 3])
    got = value(ow.rope(ow.constant(x), ow.constant(positions), pairing=pairing, base=base))
    angles = positions[:, None] * base ** (-np.arange(4) / 4)
    np.testing.assert_allclose(got, turned(x, angles, pairing), rtol=1e-11, atol=1e-13)
    np.testing.assert_array_equal(got[:, :, 0], x[:, :, 0])


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_it_is_onnxruntimes(pairing):
    x, positions = floats(2, 3, 5, 8).astype(np.float32), np.array([4, 0, 2, 9, 6])
    angles = np.arange(10)[:, None] * 10000.0 ** (-np.arange(4) / 4)
    info = onnx.helper.make_tensor_value_info
    types = {"x": (1, x.shape), "cos": (1, (10, 4)), "sin": (1, (10, 4)), "at": (7, (2, 5))}
    node = onnx.helper.make_node(
        "RotaryEmbedding", ["x", "cos", "sin", "at"], ["y"], interleaved=int(pairing == "adjacent")
    )
    graph = onnx.helper.make_graph([node], "g", [info(n, *t) for n, t in types.items()], [info("y", 1, x.shape)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {
        "x": x,
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "at": np.stack([positions] * 2),
    }
    (want,) = session.run(None, feeds)
    got = value(ow.rope(ow.constant(x), ow.constant(positions), pairing=pairing))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_only_the_first_dims_turn():
    x, positions = floats(3, 10), np.array([1, 2, 3])
    for pairing in ("adjacent", "half"):
        got = value(ow.rope(ow.constant(x), ow.constant(positions), pairing=pairing, dims=6))
        np.testing.assert_array_equal(got[:, 6:], x[:, 6:])
        part = value(ow.rope(ow.constant(x[:, :6].copy()), ow.constant(positions), pairing=pairing))
        np.testing.assert_array_equal(got[:, :6], part)


def test_products_depend_on_the_distance_only():
    q, k = floats(1, 64), floats(1, 64)

    def product(i, j):
        a, b = (value(ow.rope(ow.constant(x), ow.constant([p]))) for x, p in ((q, i), (k, j)))
        return float((a * b).sum())

    assert product(3, 10) == pytest.approx(product(1003, 1010), rel=1e-9)


def test_each_batch_has_positions_of_its_own():
    x, positions = floats(2, 3, 4, 6), RNG.integers(0, 50, (2, 1, 4))
    got = value(ow.rope(ow.constant(x), ow.constant(positions)))
    for b in range(2):
        one = value(ow.rope(ow.constant(x[b]), ow.constant(positions[b, 0])))
        np.testing.assert_array_equal(got[b], one)


def test_sections_take_their_angles_from_rows_of_positions():
    x, positions = floats(2, 5, 16), RNG.integers(0, 50, (3, 5))
    got = value(ow.rope(ow.constant(x), ow.constant(positions), pairing="half", sections=(2, 3, 3)))
    rows = np.repeat(positions, (2, 3, 3), 0).T
    want = turned(x, rows * 10000.0 ** (-np.arange(8) / 8), "half")
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)
    equal = np.stack([positions[0]] * 3)
    plain = value(ow.rope(ow.constant(x), ow.constant(positions[0]), pairing="half"))
    np.testing.assert_array_equal(
        value(ow.rope(ow.constant(x), ow.constant(equal), pairing="half", sections=(2, 3, 3))), plain
    )


def test_factors_divide_and_scale_multiplies_the_angles():
    x, positions, factors = floats(4, 8), np.array([1, 5, 9, 2]), np.array([1.0, 2.0, 4.0, 8.0])
    got = value(ow.rope(ow.constant(x), ow.constant(positions), ow.constant(factors), scale=0.5, attn_factor=1.25))
    angles = positions[:, None] * 10000.0 ** (-np.arange(4) / 4) / factors * 0.5
    np.testing.assert_allclose(got, 1.25 * turned(x, angles, "adjacent"), rtol=1e-11, atol=1e-13)


def test_yarn_by_the_formulas_of_the_paper():
    # Section 3.2, equations 17 to 21: r(d) = L / wavelength, h(θ) = (1 - γ) θ/s + γ θ, and section 3.4 for lengths.
    # In code (the authors', and all others since) γ is linear in the number of the pair, between the rounded pairs at
    # which r is alpha and beta.
    dims, base, context, s = 64, 10000.0, 2048, 4.0
    theta = base ** (-2 * np.arange(32) / dims)
    turns = context * theta / (2 * pi)
    got, magnitude = rope_frequencies(dims, base=base, scale=1 / s, ext_factor=1.0, original_context=context)
    assert magnitude == pytest.approx(0.1 * log(s) + 1)
    fast, slow = np.flatnonzero(turns > 32)[-1], np.flatnonzero(turns < 1)[0]
    np.testing.assert_allclose(got[: fast + 1], theta[: fast + 1])
    np.testing.assert_allclose(got[slow:], theta[slow:] / s)
    gamma = (slow - np.arange(fast, slow + 1)) / (slow - fast)
    between = slice(fast, slow + 1)
    np.testing.assert_allclose(got[between], (1 - gamma) * theta[between] / s + gamma * theta[between])


def test_yarn_without_its_choice_is_interpolation():
    plain, magnitude = rope_frequencies(16, base=10000.0, scale=0.25)
    np.testing.assert_allclose(plain, 0.25 * 10000.0 ** (-np.arange(8) / 8))
    assert magnitude == 1.0


def test_rope_nodes_and_refusals():
    x, at = ow.input("x", (2, 5, 8)), ow.input("p", (5,), "i32")
    node = ow.rope(x, at)
    assert node is ow.rope(x, at, dims=8, pairing="adjacent", base=10000)
    assert [s.shape for s in node.srcs] == [(2, 5, 8), (2, 5)]
    assert ow.rope(ow.input("h", (5, 8), "f16"), at).dtype.name == "f16"
    with pytest.raises(ow.DTypeError, match="positions are i32 or i64"):
        ow.rope(x, ow.input("f", (5,)))
    with pytest.raises(ow.ShapeError, match="positions are broadcast to"):
        ow.rope(x, ow.input("p", (4,), "i32"))
    with pytest.raises(ow.ShapeError, match="one row for each of 2 sections"):
        ow.rope(x, ow.input("p", (3, 5), "i32"), sections=(2, 2))
    with pytest.raises(ow.ShapeError, match="do not add up to 4 pairs"):
        ow.rope(x, ow.input("p", (2, 5), "i32"), sections=(2, 3))
    with pytest.raises(ow.ShapeError, match="dims is even"):
        ow.rope(x, at, dims=5)
    with pytest.raises(ow.ShapeError, match="at least 10 elements"):
        ow.rope(x, at, dims=10)
    with pytest.raises(ow.ShapeError, match="no pairing 'odd'"):
        ow.rope(x, at, pairing="odd")  # type: ignore[arg-type]
    with pytest.raises(ow.ShapeError, match="original_context is an integer of at least 1"):
        ow.rope(x, at, ext_factor=1.0)
    with pytest.raises(ow.DTypeError, match="base is a positive number"):
        ow.rope(x, at, base=0)
    with pytest.raises(ow.DTypeError, match="base is a positive number, not nan"):
        ow.rope(x, at, base=float("nan"))
    with pytest.raises(ow.DTypeError, match="attn_factor is a finite number"):
        ow.rope(x, at, attn_factor=float("inf"))
    with pytest.raises(ow.DTypeError, match="with a base of 1 all pairs turn alike"):
        ow.rope(x, at, base=1, ext_factor=1, original_context=64)
    with pytest.raises(ow.ShapeError, match=r"sections are numbers of pairs, .* not 2"):
        ow.rope(x, at, sections=2)
    with pytest.raises(ow.ShapeError, match=r"needs \(4,\) frequency factors"):
        ow.rope(x, at, ow.input("f", (8,)))
    with pytest.raises(ow.ShapeError, match="needs x"):
        ow.rope(ow.input("v", (8,)), at)


@pytest.mark.parametrize("dim", [2, 7, 320])
def test_timestep_embedding_is_that_of_the_diffusion_models(dim):
    times = np.array([0.0, 1.0, 17.0, 999.0])
    got = value(ow.timestep_embedding(ow.constant(times), dim, max_period=5000))
    half = dim // 2
    frequencies = np.exp(-log(5000) * np.arange(half) / half)
    args = times[:, None] * frequencies
    np.testing.assert_allclose(got[:, :half], np.cos(args), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(got[:, half : 2 * half], np.sin(args), rtol=1e-9, atol=1e-11)
    assert not got[:, 2 * half :].any()
    assert got.shape == (4, dim)


def test_timestep_embedding_refuses():
    with pytest.raises(ow.ShapeError, match=r"needs timesteps \(n,\)"):
        ow.timestep_embedding(ow.input("t", (2, 2)), 8)
    with pytest.raises(ow.ShapeError, match="dim is an integer of at least 2"):
        ow.timestep_embedding(ow.input("t", (2,)), 1)
    with pytest.raises(ow.DTypeError, match="max_period is a number of at least 1"):
        ow.timestep_embedding(ow.input("t", (2,)), 8, 0.5)


# --- sections in turn, sections of their own frequencies, an offset ---------------------------------------------------


def angles_of(y, x):
    """By which angle each pair of halves was turned, modulo a turn."""
    half = x.shape[-1] // 2
    turned, before = y[..., :half] + 1j * y[..., half:], x[..., :half] + 1j * x[..., half:]
    return np.angle(turned / before)


def qwen3_frequencies(rows, sections, dims, base):
    """In the words of transformers' ``apply_interleaved_mrope``: (tokens, pairs)."""
    freqs = rows[:, :, None] * base ** (-np.arange(0, dims, 2) / dims)
    result = freqs[0].copy()
    for row, offset in enumerate((1, 2), start=1):
        part = slice(offset, sections[row] * 3, 3)
        result[:, part] = freqs[row][:, part]
    return result


@pytest.mark.parametrize("sections", [(24, 20, 20), (11, 11, 10), (4, 2, 2)])
def test_interleaved_sections_are_qwen3s(sections):
    dims = 2 * sum(sections)
    x, rows = RNG.standard_normal((5, dims)), RNG.integers(0, 3, (3, 5))
    y = ow.rope(ow.constant(x), ow.constant(rows), pairing="half", sections=sections, interleaved=True)
    want = qwen3_frequencies(rows, sections, dims, 10000.0)
    np.testing.assert_allclose(np.exp(1j * angles_of(evaluate(y, {}), x)), np.exp(1j * want), atol=1e-9)


def test_sections_may_restart_their_frequencies_as_vision_encoders_have_it():
    x, rows = RNG.standard_normal((5, 16)), RNG.integers(0, 3, (2, 5))
    y = ow.rope(ow.constant(x), ow.constant(rows), pairing="half", sections=(4, 4), restart=True)
    own = 10000.0 ** (-np.arange(0, 8, 2) / 8)  # Qwen2-VL's VisionRotaryEmbedding(head_dim // 2)
    want = np.concatenate([rows[0][:, None] * own, rows[1][:, None] * own], -1)
    np.testing.assert_allclose(np.exp(1j * angles_of(evaluate(y, {}), x)), np.exp(1j * want), atol=1e-9)


def test_what_lies_before_the_offset_stays():
    x, at = RNG.standard_normal((3, 12)), ow.arange(3)
    y = evaluate(ow.rope(ow.constant(x), at, offset=4, dims=6), {})
    np.testing.assert_array_equal(y[:, :4], x[:, :4])
    np.testing.assert_array_equal(y[:, 10:], x[:, 10:])
    np.testing.assert_array_equal(y[:, 4:10], evaluate(ow.rope(ow.constant(x[:, 4:10]), at), {}))


def test_layouts_of_sections_that_do_not_fit_are_refused():
    x = ow.input("x", (3, 12))
    with pytest.raises(ow.ShapeError, match="two ways to lay out sections"):
        ow.rope(x, ow.arange(3), interleaved=True)
    with pytest.raises(ow.ShapeError, match="two ways to lay out sections"):
        ow.rope(x, ow.input("p", (2, 3), "i32"), sections=(3, 3), interleaved=True, restart=True)
    with pytest.raises(ow.ShapeError, match="offset 13 does not lie"):
        ow.rope(x, ow.arange(3), offset=13)
