"""Streams of torch bind groups by their steps: the core does not list operands for them, which takes as long as all
the rest of building a program again in another size."""

from __future__ import annotations

import pytest

from opweave_torch.accelerator import SeparateCpuDevice
from opweave_torch.device import TorchCpuDevice


@pytest.mark.parametrize("device", [TorchCpuDevice(), SeparateCpuDevice()], ids=["shared", "separate"])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_operands_are_listed(device: TorchCpuDevice | SeparateCpuDevice, compiled: bool) -> None:
    with device.open(compile=compiled) as stream:
        assert not stream.lists_operands
