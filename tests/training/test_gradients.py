"""`ow.gradients`: against torch's autograd, kinks and ties, states, quantized weights, and what it refuses."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional

import opweave as ow
from opweave.graph.graph import Graph
from opweave.graph.opdef import OPS, OpDef
from opweave.graph.tensor import node
from tests.support.evaluate import evaluate

RNG = np.random.default_rng(5)


def grads_of(build, *arrays, grad=None):
    """Gradients of a function of tensors with respect to each array of floats, in f64 by the references."""
    leaves = [ow.input(f"x{i}", a.shape, str(a.dtype)[0] + str(a.dtype)[-2:]) for i, a in enumerate(arrays)]
    floats = [x for x in leaves if x.dtype.is_float]
    out = build(*leaves)
    made = ow.gradients(out, floats, None if grad is None else ow.constant(grad))
    values = dict(zip(leaves, arrays, strict=True))
    known: dict = {}
    return [evaluate(g, values, known) for g in made]


def torch_grads_of(build, *arrays, grad=None):
    leaves = [torch.tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
    out = build(*leaves)
    out.backward(None if grad is None else torch.tensor(grad))
    return [x.grad.numpy() for x in leaves if x.requires_grad]


def agree(ours, theirs, *arrays, atol=1e-9):
    """Both functions have the same gradients, for a random gradient of what they return."""
    leaves = [ow.input(f"x{i}", a.shape, str(a.dtype)[0] + str(a.dtype)[-2:]) for i, a in enumerate(arrays)]
    grad = RNG.standard_normal(ours(*leaves).shape)
    got, want = grads_of(ours, *arrays, grad=grad), torch_grads_of(theirs, *arrays, grad=grad)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-7, atol=atol)


def floats(*shape):
    return RNG.standard_normal(shape)


# --- kinks and ties -------------------------------------------------------------------------------------------------

TIES = np.array([-3.0, -2.0, -1.0, 0.0, 0.0, 1.0, 2.0, 3.0])
KINKS = {
    "relu": (ow.relu, functional.relu),
    "leaky_relu": (ow.leaky_relu, functional.leaky_relu),
    "elu": (ow.elu, functional.elu),
    "abs": (ow.abs, torch.abs),
    "sign": (ow.sign, torch.sign),
    "round": (ow.round, torch.round),
    "hardsigmoid": (ow.hardsigmoid, functional.hardsigmoid),
    "hardswish": (ow.hardswish, functional.hardswish),
    "clamp": (lambda x: ow.clamp(x, -1, 2), lambda x: torch.clamp(x, -1, 2)),
    "clamp below": (lambda x: ow.clamp(x, min=0), lambda x: torch.clamp(x, min=0)),
    "max": (ow.max, torch.amax),
    "min": (ow.min, torch.amin),
    "max of rows": (lambda x: ow.max(x.reshape(2, 4), 0), lambda x: torch.amax(x.reshape(2, 4), 0)),
    "prod": (ow.prod, torch.prod),
    "prod of rows": (lambda x: ow.prod(x.reshape(4, 2), 1), lambda x: torch.prod(x.reshape(4, 2), 1)),
    "power": (lambda x: ow.pow(x, 3.0), lambda x: x**3.0),
    "max_pool1d": (lambda x: ow.max_pool1d(ow.relu(x).reshape(1, 1, 8), 3, 1, 1),
                   lambda x: functional.max_pool1d(torch.relu(x).reshape(1, 1, 8), 3, 1, 1)),
    "l2_norm of nothing": (lambda x: ow.l2_norm(x * 0.0, eps=0.5),
                           lambda x: functional.normalize(x * 0.0, dim=-1, eps=0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", KINKS)
def test_kinks_and_ties_are_torchs(name):
    agree(*KINKS[name], TIES)


@pytest.mark.parametrize("device", ["host", "cpu", "torch:cpu", "opencl:0"])
def test_ties_of_bf16_in_pooling_are_torchs_whatever_the_values(device):
    """Values become equal when they are rounded to bf16: the first of the rounded ones gets the gradient."""
    rng = np.random.default_rng()
    values = (1 + rng.random((2, 3, 9, 8)) / 16).astype(ow.as_dtype("bf16").numpy)  # of eight different numbers
    x = ow.input("bf16_x", values.shape, "bf16")
    pooled = ow.max_pool2d(ow.relu(x), 3, 2, 1)
    given = rng.integers(1, 8, pooled.shape).astype(values.dtype)  # their sums are exact
    like = torch.tensor(values.astype(np.float32), dtype=torch.bfloat16, requires_grad=True)
    theirs = functional.max_pool2d(torch.relu(like), 3, 2, 1)
    theirs.backward(torch.tensor(given.astype(np.float32), dtype=torch.bfloat16))
    with ow.Scheduler(list(dict.fromkeys([device, "host"]))) as scheduler:
        got = scheduler.build(ow.gradients(pooled, x, ow.constant(given))).run(bf16_x=values)
    np.testing.assert_array_equal(got.astype(np.float32), like.grad.float().numpy())


@pytest.mark.parametrize("name", ["maximum", "minimum", "pow"])
def test_ties_of_two_operands_are_torchs(name):
    a, b = np.array([0.0, 0.0, 1.0, 2.0, 2.0]), np.array([0.0, 2.0, 1.0, 1.0, 3.0])
    agree(getattr(ow, name), getattr(torch, name), a, b)


# --- functions and networks -----------------------------------------------------------------------------------------

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_agree_with_torch_also_far_from_zero(name):
    x = np.concatenate([np.linspace(-12, 12, 97), [1e-3, -1e-3, 1e-5, 1e-12, -1e-12, 0.0]])
    agree(getattr(ow, name), ACTIVATIONS[name], x)


@pytest.mark.parametrize("overlapping", [False, True])
def test_relu_before_pooling_is_decided_window_by_window(overlapping):
    rng = np.random.default_rng(5)
    values = np.round(rng.standard_normal((2, 3, 8, 8)), 1)  # ties, and zeros
    x = ow.input("pooled_x", values.shape, "f64")
    stride = 1 if overlapping else 2
    loss = ow.sum(ow.square(ow.max_pool2d(ow.relu(x), 2, stride)))
    grad = ow.gradients(loss, x)
    (masks,) = [t.shape for t in Graph(grad).nodes if t.op is not None and t.op.name == "relu_backward"]
    assert masks == ((2, 3, 7, 7) if overlapping else (2, 3, 4, 4))
    given = torch.tensor(values, requires_grad=True)
    torch.nn.functional.max_pool2d(given.relu(), 2, stride).square().sum().backward()
    np.testing.assert_allclose(evaluate(grad, {x: values}, {}), given.grad, rtol=1e-12)


def test_gelu_keeps_its_digits_in_f32_near_zero():
    x = np.array([1e-30, 1e-7, 2.0**-16, 2.0**-15, 1e-3, -1e-5], np.float32)
    (got,) = grads_of(ow.gelu, x, grad=np.ones(6, np.float32))
    (want,) = torch_grads_of(functional.gelu, x.astype(np.float64), grad=np.ones(6))
    np.testing.assert_allclose(got, want, rtol=3e-7)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_agrees_with_torch(causal):
    q, k, v = floats(2, 4, 5, 6), floats(2, 2, 5, 6), floats(2, 2, 5, 3)

    def theirs(q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    agree(lambda q, k, v: ow.attention(q, k, v, causal=causal), theirs, q, k, v)


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "groups": 2}], ids=str)
def test_convolution_agrees_with_torch(options):
    x, w, b = floats(2, 4, 7, 9), floats(6, 4 // options.get("groups", 1), 3, 2), floats(6)
    agree(lambda *xs: ow.conv2d(*xs, **options), lambda *xs: functional.conv2d(*xs, **options), x, w, b)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolation_agrees_with_torch(mode, align):
    agree(
        lambda x: ow.interpolate(x, (7, 3), mode=mode, align_corners=align),
        lambda x: functional.interpolate(x, (7, 3), mode=mode, align_corners=align),
        floats(1, 2, 4, 5),
    )


def test_a_block_of_a_transformer_agrees_with_torch():
    """Every gradient of a network in which values are read several times, sliced, transposed and broadcast."""
    x, g, w, o, up, down = floats(2, 5, 8), floats(8), floats(24, 8), floats(8, 8), floats(32, 8), floats(8, 16)

    def heads(x):
        return x.reshape(2, 5, 2, 4).swapaxes(1, 2)

    def ours(x, g, w, o, up, down):
        h = ow.rms_norm(x, g)
        q, k, v = [heads(part) for part in ow.split(ow.linear(h, w), 3, 2)]
        a = ow.attention(q, k, v, causal=True).swapaxes(1, 2).reshape(2, 5, 8)
        x = x + ow.linear(a, o)
        h = ow.layer_norm(x)
        both = ow.linear(h, up)
        return ow.mean(ow.square(x + ow.linear(ow.swiglu(both[..., 16:], both[..., :16]), down)))

    def theirs(x, g, w, o, up, down):
        h = functional.rms_norm(x, (8,), g, 1e-6)
        q, k, v = [heads(part) for part in functional.linear(h, w).chunk(3, 2)]
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True).swapaxes(1, 2).reshape(2, 5, 8)
        x = x + functional.linear(a, o)
        h = functional.layer_norm(x, (8,))
        both = functional.linear(h, up)
        return torch.mean(torch.square(x + functional.linear(functional.silu(both[..., :16]) * both[..., 16:], down)))

    arrays = (x, g, w, o, up, down)
    for got, want in zip(grads_of(ours, *arrays), torch_grads_of(theirs, *arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("device", ["cpu", "opencl", "torch:cpu"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_devices_compute_the_backward_graph(device, dtype):
    """A convolutional network with pooling and normalization, and the loss of two classes."""
    limit = {"f32": 1e-5, "f16": 2e-2, "bf16": 1e-1}[dtype]
    x, w = ow.input("x", (3, 2, 8, 8), dtype), ow.input("w", (4, 2, 3, 3), dtype)
    v, s = ow.input("v", (5, 36), dtype), ow.input("s", (4,), dtype)
    h = ow.max_pool2d(ow.gelu(ow.group_norm(ow.conv2d(x, w), 2, s)), 2)
    loss = ow.mean(ow.log_softmax(ow.linear(h.reshape(3, 36), v))[:, 1])
    rng = np.random.default_rng(1)  # its own: where the softmax saturates, f32 has few digits of the gradient left
    arrays = {t: rng.standard_normal(t.shape).astype(t.dtype.numpy) for t in (x, w, v, s)}
    made = ow.gradients(loss, [x, w, v, s])
    with ow.Scheduler([device, "host"]) as scheduler:
        got = scheduler.build(made).run(arrays)
    exact = torch_network(*[torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays.values()])
    for g, want in zip(got, exact, strict=True):
        np.testing.assert_allclose(g.astype(np.float64), want, atol=limit * np.abs(want).max())


def torch_network(x, w, v, s):
    h = functional.conv2d(x, w)
    h = functional.max_pool2d(functional.gelu(functional.group_norm(h, 2, s)), 2)
    torch.mean(functional.log_softmax(functional.linear(h.reshape(3, 36), v), -1)[:, 1]).backward()
    return [t.grad.numpy() for t in (x, w, v, s)]


# --- what has gradients ---------------------------------------------------------------------------------------------


def test_the_forms_of_the_parameters_are_those_of_the_result():
    x, w = ow.input("x", (3,)), ow.input("w", (3,))
    loss = ow.sum(x * w)
    assert set(ow.gradients(loss, {"w": w})) == {"w"}
    assert ow.gradients(loss, w) is ow.gradients(loss, [x, w])[1]


def test_computed_tensors_may_be_parameters_besides_their_sources():
    x = ow.input("x", (2,), "f64")
    h = ow.square(x)
    dx, dh = ow.gradients(ow.sum(h * h), [x, h])
    known: dict = {}
    values = {x: np.array([2.0, 3.0])}
    assert evaluate(dh, values, known).tolist() == [8.0, 18.0]
    assert evaluate(dx, values, known).tolist() == [32.0, 108.0]


def test_the_gradient_of_the_loss_may_be_given():
    x = ow.input("x", (2,), "f64")
    assert evaluate(ow.gradients(x * 2.0, x, 3.0), {x: np.ones(2)}).tolist() == [6.0, 6.0]
    assert evaluate(ow.gradients(x * 2.0, x, ow.constant([1.0, 5.0], "f64")), {x: np.ones(2)}).tolist() == [2.0, 10.0]


def test_what_only_selects_has_zero_gradients():
    x = ow.input("x", (3,), "f64")
    loss = ow.sum(ow.cast(ow.argsort(x), "f64"))
    assert evaluate(ow.gradients(loss, x), {x: np.ones(3)}).tolist() == [0.0, 0.0, 0.0]


def test_a_state_that_is_no_parameter_stops_gradients():
    x, s = ow.input("x", (2,)), ow.state("s", (2,))
    loss = ow.sum(x * s)
    assert s in Graph(ow.gradients(loss, x)).leaves
    grad = ow.gradients(loss, s)
    assert Graph(grad).leaves == (x,)


def versions(write):
    """The gradients of the values, the state and the loss of what ``write`` makes of a state of 3 rows."""
    s, x = ow.state("s", (3, 2), "f64"), ow.input("x", (2, 2), "f64")
    after = write(s, x)
    weights = np.arange(1.0, 7.0).reshape(3, 2)
    made = ow.gradients(ow.sum(after * ow.constant(weights)), [s, x])
    values = {s: np.zeros((3, 2)), x: np.zeros((2, 2))}
    return [evaluate(g, values).tolist() for g in made]


def test_writes_give_gradients_to_what_they_write_and_none_to_what_they_overwrite():
    kept, lost = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [0.0, 0.0]
    assert versions(lambda s, x: ow.assign(s[1:], x)) == [[kept[0], lost, lost], kept[1:]]
    assert versions(lambda s, x: ow.assign(s[::2], x)) == [[lost, kept[1], lost], kept[::2]]
    assert versions(lambda s, x: ow.assign(s.T[:, 1:], x)) == [[kept[0], lost, lost], [[3.0, 5.0], [4.0, 6.0]]]
    assert versions(lambda s, x: ow.assign(s[1:].broadcast_to((1, 2, 2)), x)) == [[kept[0], lost, lost], kept[1:]]
    assert versions(lambda s, x: ow.accumulate(s[1:], x)) == [kept, kept[1:]]
    ids = ow.constant([2, 0], "i32")
    assert versions(lambda s, x: ow.index_copy(s, ids, x)) == [[lost, kept[1], lost], [kept[2], kept[0]]]
    assert versions(lambda s, x: ow.index_copy(s[1:], ow.constant([1, 0]), x)) == [[kept[0], lost, lost], kept[:0:-1]]


def test_a_version_that_is_overwritten_before_backward_reads_it_is_copied_first():
    s, w, x = ow.state("s", (2,)), ow.state("w", (2,)), ow.input("x", (2,))
    before = s * w  # its gradient of w reads this version of s
    after = ow.assign(s, before + x)
    loss = ow.sum(before * after)
    grad = ow.gradients(loss, w)
    ow.write(s, [2.0, 3.0])
    ow.write(w, [5.0, 7.0])
    with ow.Scheduler("cpu") as scheduler:
        program = scheduler.build([grad, loss])
        assert "s before it is overwritten" in str(program.explain())
        got, value = program.run(x=np.array([1.0, -1.0], np.float32))
    # (s w) (s w + x), of which the derivative by w is 2 s² w + s x.
    assert value == 10 * 11 + 21 * 20
    assert got.tolist() == [2 * 4 * 5 + 2, 2 * 9 * 7 - 3]


def test_parameters_are_updated_in_the_run_that_reads_them():
    w, x = ow.state("w", (2,), fill=1), ow.input("x", (2,))
    loss = ow.sum(ow.square(w * x))
    step = ow.assign(w, w - 0.25 * ow.gradients(loss, w))
    with ow.Scheduler("cpu") as scheduler:
        program = scheduler.build([step, loss])
        _, first = program.run(x=np.array([1.0, 1.0], np.float32))
        _, second = program.run(x=np.array([1.0, 1.0], np.float32))
    assert (float(first), float(second)) == (2.0, 0.5)
    assert ow.read(w).tolist() == [0.25, 0.25]


@pytest.mark.parametrize("dtype", ["q4_0", "q8_0"])
def test_quantized_weights_pass_gradients_to_their_inputs(dtype):
    kind = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}[dtype]
    blocks = gguf.quantize(floats(6, 64).astype(np.float32), kind)
    w = ow.weights({"w": ow.Blocks(blocks, (6, 64), dtype)})["w"]
    x = ow.input("x", (3, 64))
    y = ow.linear(x, w)
    upstream = floats(3, 6).astype(np.float32)
    with ow.Scheduler("cpu") as scheduler:
        got = scheduler.build(ow.gradients(y, x, ow.constant(upstream))).run()
    np.testing.assert_allclose(got, upstream @ gguf.dequantize(blocks, kind), rtol=1e-5, atol=1e-5)
    with pytest.raises(ow.DTypeError, match="float type"):
        ow.gradients(y, w, 1.0)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_an_operation_without_gradient_is_an_error_with_the_path():
    x = ow.input("x", (2,)).named("images")
    hidden = ow.exp(x).named("hidden")
    loss = ow.sum(ow.custom(np.cbrt, hidden, like=hidden).named("roots")).named("total")
    with pytest.raises(ow.GradientError, match="custom") as error:
        ow.gradients(loss, x)
    assert [text.partition("'")[2].partition("'")[0] for text in error.value.path] == [
        "total",
        "roots",
        "hidden",
        "images",
    ]
    assert all(text in str(error.value) for text in error.value.path)


@pytest.mark.parametrize("made", ["no tensor", (2.0,), [None, None]], ids=str)
def test_a_gradient_that_is_not_made_of_tensors_is_an_error_that_names_the_operation(made):
    op = OpDef("crooked", infer=lambda x: (x.shape, x.dtype), reference=np.cbrt, gradient=lambda grad, out, x: made)
    x = ow.input("x", (3,))
    with pytest.raises(ow.GradientError, match="the gradient of crooked"):
        ow.gradients(ow.sum(node(op, (x,), {})), x)


def test_an_operation_without_gradient_beside_the_path_does_not_matter():
    x, y = ow.input("x", (2,), "f64"), ow.input("y", (2,), "f64")
    loss = ow.sum(x * ow.custom(np.cbrt, y, like=y))
    assert evaluate(ow.gradients(loss, x), {x: np.ones(2), y: np.array([8.0, 27.0])}).tolist() == pytest.approx(
        [2.0, 3.0]
    )


def cbrt(monkeypatch, x, gradient):
    """A node of an operation that somebody else defines."""
    op = OpDef("cbrt", infer=lambda x: (x.shape, x.dtype), reference=np.cbrt, gradient=gradient)
    monkeypatch.setitem(OPS, op.name, op)
    return node(op, (x,), {})


def test_third_parties_bring_gradients_of_their_operations(monkeypatch):
    x = ow.input("x", (2,), "f64")
    grad = ow.gradients(ow.sum(cbrt(monkeypatch, x, lambda g, y, x: g / (3.0 * ow.square(y)))), x)
    np.testing.assert_allclose(evaluate(grad, {x: np.array([8.0, 27.0])}), [1 / 12, 1 / 27])


@pytest.mark.parametrize(
    ("gradient", "error", "words"),
    [
        (lambda g, y, x: ow.sum(g), ow.ShapeError, r"shape \(\)"),
        (lambda g, y, x: (g, g), ow.GradientError, "2 tensors for 1"),
    ],
    ids=["shape", "number"],
)
def test_wrong_gradients_of_third_parties_are_named(monkeypatch, gradient, error, words):
    x = ow.input("x", (2,))
    with pytest.raises(error, match=f"cbrt.*{words}"):
        ow.gradients(ow.sum(cbrt(monkeypatch, x, gradient)), x)


def test_what_cannot_have_gradients_is_refused():
    x, ids = ow.input("x", (2,)), ow.input("ids", (2,), "i32")
    with pytest.raises(ow.ShapeError, match="one number"):
        ow.gradients(x * 2.0, x)
    with pytest.raises(ow.ShapeError, match="broadcast"):
        ow.gradients(ow.sum(x), x, ow.constant([1.0, 2.0]))
    with pytest.raises(ow.DTypeError, match="parameter"):
        ow.gradients(ow.sum(ow.embedding(x, ids)), ids)
    with pytest.raises(ow.DTypeError, match="loss"):
        ow.gradients(ow.sum(ids), x)
    with pytest.raises(ow.GradientError, match="does not depend"):
        ow.gradients(ow.sum(x), ow.input("other", (2,)))
    with pytest.raises(ow.SchedulerError, match="tensor"):
        ow.gradients(ow.sum(x), ["x"])  # type: ignore[list-item]


def test_repeated_ids_of_index_copy_are_refused():
    s, x, ids = ow.state("s", (3, 2)), ow.input("x", (2, 2)), ow.input("ids", (2,), "i32")
    with pytest.raises(ow.HazardError, match="index 1 repeats"):
        ow.gradients(ow.sum(ow.index_copy(s, ow.constant([1, 1], "i32"), x)), x)
    with ow.Scheduler("cpu") as scheduler:
        program = scheduler.build(ow.gradients(ow.sum(ow.index_copy(s, ids, x)), x))
        feeds = {"ids": np.array([0, 2], "i4")}
        assert program.run(feeds).tolist() == [[1.0, 1.0], [1.0, 1.0]]
        with pytest.raises(ow.ExecutionError, match="index 2 repeats"):
            program.run({"ids": np.array([2, 2], "i4")})


def test_means_of_windows_that_do_not_overlap_are_repeated():
    build = lambda x: ow.avg_pool2d(x, (2, 3))  # noqa: E731
    x = floats(2, 3, 8, 9)
    agree(build, lambda x: functional.avg_pool2d(x, (2, 3)), x)
    given = ow.input("mean_x", x.shape, "f64")
    ops = {t.op.name for t in Graph(ow.gradients(ow.sum(build(given)), given)).nodes if t.op is not None}
    assert "avg_pool_backward" not in ops


@pytest.mark.parametrize("options", [
    {"kernel_size": 3, "stride": 3, "padding": 1},  # the last elements belong to no window
    {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
    {"kernel_size": (3, 2), "stride": (2, 1), "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "divisor_override": 5},
], ids=str)  # fmt: skip
def test_means_of_windows_spread_their_gradients_as_in_torch(options):
    agree(lambda x: ow.avg_pool2d(x, **options), lambda x: functional.avg_pool2d(x, **options), floats(2, 3, 6, 6))


def test_columns_are_added_up_where_their_windows_lie():
    options = {"kernel_size": (3, 2), "dilation": (1, 2), "padding": (1, 0), "stride": (2, 1)}
    agree(lambda x: ow.im2col(x, **options), lambda x: functional.unfold(x, **options), floats(2, 3, 6, 7))
    agree(lambda x: ow.col2im(x, (6, 7), **options), lambda x: functional.fold(x, (6, 7), **options), floats(2, 18, 15))
    x = ow.input("columns_x", (2, 3, 6, 7))
    assert ow.gradients(ow.im2col(x, **options), x, 1.0).op is OPS["col2im"]
