"""One graph, every placement: whichever device runs a node, the answers agree."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import opweave as ow
from opweave.contract import Device
from opweave.graph.graph import Graph
from opweave_torch.accelerator import SeparateCpuDevice
from opweave_torch.device import TorchCpuDevice

Array = np.ndarray[Any, Any]


def others() -> list[Device]:
    """The devices of the other backends that are installed here."""
    found = []
    for name in ("opencl", "cpu"):
        try:
            found.append(ow.device(name))
        except (ow.PluginError, ow.UnknownNameError):
            continue
    return found


@pytest.fixture(params=["shared", "separate"])
def devices(request: pytest.FixtureRequest) -> list[Device]:
    """torch in the memory of the process or in its own, and all other devices."""
    mine = TorchCpuDevice() if request.param == "shared" else SeparateCpuDevice()
    mine.name = "torch:cpu"
    return [mine, *others(), ow.device("host")]


def computed(outputs: Sequence[ow.Tensor]) -> list[ow.Tensor]:
    return [t for t in Graph(tuple(outputs)).nodes if t.base is None]


def able(scheduler: ow.Scheduler, outputs: list[ow.Tensor]) -> list[tuple[ow.Tensor, list[Device]]]:
    """Each node with the devices that run it."""
    result = []
    for node in computed(outputs):
        fit = []
        for device in scheduler.devices[:-1]:  # the host runs what no other device supports
            try:
                scheduler.build(outputs, pins={node: device}).close()
            except ow.UnsupportedOpError:
                continue
            fit.append(device)
        result.append((node, fit))
    return result


def agree(
    scheduler: ow.Scheduler, outputs: list[ow.Tensor], feeds: dict[str, Array], expected: Sequence[Array],
    placements: Iterator[dict[ow.Tensor, Device]], rtol: float,
) -> int:  # fmt: skip
    count = 0
    for pins in placements:
        program = scheduler.build(outputs, pins=pins)
        for node, device in pins.items():
            assert program.device_of(node) is device
        for got, want in zip(program.run(feeds), expected, strict=True):
            np.testing.assert_allclose(
                got, want, rtol=rtol, atol=rtol, err_msg=str({n.name: d for n, d in pins.items()})
            )
        program.close()
        count += 1
    return count


def test_every_placement_of_the_digits_agrees(devices, one_thread):
    """The network of ``examples/digits.py`` without its second hidden layer: every node on every device, which makes
    729 placements. Another layer adds no other neighbours, and nine times as many."""
    rng = np.random.default_rng(0)
    sizes = (64, 128, 32, 10)
    arrays = {}
    for i, (n, m) in enumerate(pairwise(sizes)):
        arrays[f"layer{i}.weight"] = (rng.standard_normal((m, n)) / np.sqrt(n)).astype("f4")
        arrays[f"layer{i}.bias"] = rng.standard_normal(m).astype("f4")
    weights = ow.weights(arrays)
    h = ow.input("images", (5, 64))
    for i in range(3):
        h = ow.linear(h, weights[f"layer{i}.weight"], weights[f"layer{i}.bias"]).named(f"layer{i}")
        if i < 2:
            h = ow.relu(h)
    outputs = [h, ow.argmax(h, axis=1)]
    feeds = {"images": rng.random((5, 64), np.float32)}
    with ow.Scheduler("host") as scheduler:
        expected = scheduler.build(outputs).run(feeds)
    with ow.Scheduler(devices) as scheduler:
        choices = able(scheduler, outputs)
        assert all(fit for _, fit in choices)
        nodes = [node for node, _ in choices]
        # While a program on each device is open, the weights stay there, and are not uploaded for each placement.
        for device in scheduler.devices[:-1]:
            scheduler.build(outputs, pins=dict.fromkeys(nodes, device))
        placements = (dict(zip(nodes, places, strict=True)) for places in product(*[fit for _, fit in choices]))
        count = agree(scheduler, outputs, feeds, expected, placements, 1e-4)
    assert count == np.prod([len(fit) for _, fit in choices])


def block(x: ow.Tensor, w: ow.Weights, heads: int) -> ow.Tensor:
    """Self-attention and a feed-forward part, of operations that most devices have."""
    tokens, width = x.shape
    size = width // heads
    h = ow.rms_norm(x, w["n1"])
    q, k, v = (ow.linear(h, w[n]).reshape(tokens, heads, size).transpose(1, 0, 2) for n in ("q", "k", "v"))
    scores = ow.softmax((q @ k.transpose(0, 2, 1)) * size**-0.5)
    mixed = (scores @ v).transpose(1, 0, 2).reshape(tokens, width)
    x = x + ow.linear(mixed, w["o"])
    h = ow.layer_norm(x, w["n2"])
    return x + ow.linear(ow.silu(ow.linear(h, w["up"])), w["down"])


def test_placements_of_a_transformer_block_agree(devices, one_thread):
    rng = np.random.default_rng(1)
    width, heads, tokens = 32, 4, 7
    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (4 * width, width), "down": (width, 4 * width)}
    arrays = {n: (rng.standard_normal(s) / np.sqrt(s[1])).astype("f4") for n, s in shapes.items()}
    weights = ow.weights(arrays | {"n1": np.ones(width, "f4"), "n2": np.ones(width, "f4")})
    outputs = [block(ow.input("x", (tokens, width)), weights, heads)]
    feeds = {"x": rng.standard_normal((tokens, width)).astype("f4")}
    with ow.Scheduler("host") as scheduler:
        expected = scheduler.build(outputs).run(feeds)
    with ow.Scheduler(devices) as scheduler:
        choices = able(scheduler, outputs)
        assert all(fit for _, fit in choices)
        chance = random.Random(2)

        def placements() -> Iterator[dict[ow.Tensor, Device]]:
            for device in devices[:-1]:  # each alone, as far as it goes
                yield {node: device for node, fit in choices if device in fit}
            for node, fit in choices:  # each node apart from the rest
                for device in fit:
                    yield {other: fit[0] for other, fit in choices} | {node: device}
            for _ in range(60):
                yield {node: chance.choice(fit) for node, fit in choices}

        assert agree(scheduler, outputs, feeds, expected, placements(), 1e-3) > 60
