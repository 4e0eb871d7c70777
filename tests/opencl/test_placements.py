"""Wherever the nodes of a graph are put, between an OpenCL device and ``cpu``, the results agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

import opweave as ow
from tests.support.evaluate import evaluate

Pair = tuple[str, str]
SAMPLES = 48
"""Placements of the transformer block beside those on one device and in two halves."""


@pytest.fixture(scope="module")
def pair(device) -> Pair:
    found = (f"opencl:{device.id}", "cpu")
    try:
        for name in found:
            ow.device(name)
    except (ow.PluginError, ow.UnknownNameError) as error:
        pytest.skip(str(error))
    return found


def computed(*outputs: ow.Tensor) -> list[ow.Tensor]:
    """The nodes that something has to compute, sources first."""
    found: dict[ow.Tensor, None] = {}

    def visit(tensor: ow.Tensor) -> None:
        if tensor in found or tensor.op is None:
            return
        for source in tensor.srcs:
            visit(source)
        found[tensor] = None

    for output in outputs:
        visit(output)
    return [t for t in found if not t.is_view]


def check(
    pair: Pair,
    outputs: Sequence[ow.Tensor],
    places: Sequence[str],
    feeds: dict[str, np.ndarray],
    want: list[np.ndarray],
):
    nodes = computed(*outputs)
    with ow.Scheduler(list(pair)) as scheduler:
        program = scheduler.build(list(outputs), pins=dict(zip(nodes, places, strict=True)))
        assert [program.device_of(node).name for node in nodes] == list(places)
        got = program.run(feeds)
    for result, expected in zip(got, want, strict=True):
        if expected.dtype.kind == "i":
            np.testing.assert_array_equal(result, expected)
        else:
            np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-5)


def truth(outputs: Sequence[ow.Tensor], inputs: dict[ow.Tensor, np.ndarray]) -> list[np.ndarray]:
    known: dict[ow.Tensor, np.ndarray] = {}
    return [evaluate(output, inputs, known) for output in outputs]


# --- the digits example -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    """The network of ``examples/digits.py`` on a part of its images: its outputs, what is fed, what comes out."""
    pytest.importorskip("sklearn")
    from examples.digits import logits, train

    network = train()
    images = network.images[:40]
    x = ow.input("images", images.shape)
    scores = logits(x, ow.weights(network.arrays), network.layers)
    outputs = [scores, ow.argmax(scores, axis=1)]
    want = truth(outputs, {x: images})
    assert (want[1] == network.expected[:40]).mean() > 0.97
    return outputs, {"images": images}, want


def test_every_placement_of_the_digits_example(pair, digits):
    outputs, feeds, want = digits
    nodes = computed(*outputs)
    assert len(nodes) == 8
    for places in product(pair, repeat=len(nodes)):
        check(pair, outputs, places, feeds, want)


# --- a transformer block ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def block():
    """A decoder layer: norms, attention over heads, a gated perceptron."""
    rows, columns, heads, hidden = 6, 32, 4, 48
    rng = np.random.default_rng(1)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    arrays = {name: weight(columns, columns) for name in ("q", "k", "v", "o")}
    arrays |= {"gate": weight(hidden, columns), "up": weight(hidden, columns), "down": weight(columns, hidden)}
    arrays |= {"norm1": 1 + weight(columns), "norm2": 1 + weight(columns)}
    w = ow.weights(arrays)
    x = ow.input("x", (rows, columns))

    def split(h: ow.Tensor) -> ow.Tensor:
        return h.reshape(rows, heads, columns // heads).transpose(1, 0, 2)

    y = ow.rms_norm(x, w["norm1"])
    q, k, v = (split(ow.linear(y, w[name])) for name in "qkv")
    scores = ow.softmax(q @ k.swapaxes(1, 2), scale=(columns // heads) ** -0.5)
    mixed = (scores @ v).transpose(1, 0, 2).contiguous().reshape(rows, columns)
    h = x + ow.linear(mixed, w["o"])
    y = ow.rms_norm(h, w["norm2"])
    h = h + ow.linear(ow.silu(ow.linear(y, w["gate"])) * ow.linear(y, w["up"]), w["down"])
    value = rng.standard_normal((rows, columns)).astype(np.float32)
    return [h], {"x": value}, truth([h], {x: value})


def placements(pair: Pair, count: int) -> list[tuple[str, ...]]:
    """All nodes on one device; a device boundary after each node, in both orders; alternating; at random."""
    first, second = pair
    found = [(first,) * count, (second,) * count, *[tuple(pair[i % 2] for i in range(k, count + k)) for k in (0, 1)]]
    for boundary in range(1, count):
        found += [
            (first,) * boundary + (second,) * (count - boundary),
            (second,) * boundary + (first,) * (count - boundary),
        ]
    rng = np.random.default_rng(2)
    found += [tuple(pair[i] for i in rng.integers(0, 2, count)) for _ in range(SAMPLES)]
    return found


def test_placements_of_a_transformer_block(pair, block):
    outputs, feeds, want = block
    nodes = computed(*outputs)
    assert len(nodes) == 17
    for places in placements(pair, len(nodes)):
        check(pair, outputs, places, feeds, want)
