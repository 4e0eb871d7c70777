"""More groups along the second or the third axis than a device takes in one launch: 65,535."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

import opweave as ow
from opweave_opencl.stream import _parts
from opweave_opencl.tuning import GROUPS

MANY: Final = (1 << 16) + 3


def given(*shape: int) -> ow.Tensor:
    return ow.input("x" + "_".join(map(str, shape)), shape, "f32")


CASES: Final[dict[str, Callable[[int], ow.Tensor]]] = {
    "avg_pool": lambda n: ow.avg_pool2d(given(n, 1, 2, 2), 2),
    "max_pool": lambda n: ow.max_pool2d(given(1, n, 2, 2), 2),
    "interpolate": lambda n: ow.interpolate(given(n, 1, 2, 2), size=(3, 3), mode="bilinear"),
    "conv": lambda n: ow.conv2d(given(n, 1, 2, 2), given(1, 1, 1, 2)),
    "depthwise": lambda n: ow.conv2d(given(1, n, 2, 2), given(n, 1, 1, 2), groups=n),
    "matmul": lambda n: given(n, 2, 3) @ given(n, 3, 2),
    "linear_attention": lambda n: ow.linear_attention(given(n, 1, 2, 4), given(n, 1, 2, 4), given(n, 1, 2, 4)),
    "causal_conv1d": lambda n: ow.causal_conv1d(given(n, 3, 2), given(3, 2)),
    "softmax": lambda n: ow.softmax(given(n, 3), -1),
    "transpose": lambda n: ow.contiguous(given(n, 2, 3).transpose(0, 2, 1)),
}


@pytest.mark.parametrize("largest", [3, 65535])
@pytest.mark.parametrize("op", CASES)
def test_results_are_those_of_the_host(device, monkeypatch, op, largest):
    """In parts of three groups, which every driver here shows to be right, and with as many as all devices take."""
    count = 70 if largest == 3 else MANY
    monkeypatch.setattr(GROUPS, "largest", largest)
    out = CASES[op](count)
    rng = np.random.default_rng(0)
    feeds = {leaf.name: rng.standard_normal(leaf.shape, np.float32) for leaf in ow.Graph([out]).leaves}
    found, truth = (ow.compile(out, devices=[each])(**feeds) for each in (device, "host"))
    np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-5)


def test_a_range_is_cut_into_parts_that_devices_take():
    parts = _parts((64, 8 * 70000, 5), (64, 8, 1))
    assert parts == [((0, 0, 0), (64, 8 * 65535, 5)), ((0, 8 * 65535, 0), (64, 8 * 4465, 5))]
    assert _parts((1 << 20, 4), (1, 1)) == [((0,), (1 << 20, 4))]
