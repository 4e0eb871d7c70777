"""`NcclCollectives`, with a stand-in for ``torch.cuda.nccl``: what it says it does, and in which order it queues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opweave.contract import Collectives, CollectiveSupport
from opweave.graph.dtypes import as_dtype
from opweave.runtime.host.operands import dense_arg, read, write
from opweave_torch import TorchBackend
from opweave_torch.accelerator import SeparateCpuDevice
from opweave_torch.collectives import NcclCollectives

SIZE = 12


class Queue:
    """Notes what is recorded and what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return self.name

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


class Nccl:
    """The functions of ``torch.cuda.nccl``, over tensors of the CPU."""

    def __init__(self, log: list[str], version: tuple[int, ...] = (2, 27, 3), available: bool = True) -> None:
        self.log, self._version, self._available = log, version, available

    def version(self) -> tuple[int, ...]:
        return self._version

    def is_available(self, tensors: Any) -> bool:
        return self._available

    def _note(self, kind: str, given: list[Any], results: list[Any], streams: Any) -> None:
        assert all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in (*given, *results))
        self.log.append(f"{kind} on {' '.join(queue.name for queue in streams)}")

    def all_reduce(self, given: Any, results: Any, streams: Any = None) -> None:
        self._note("all_reduce", given, results, streams)
        for result in results:
            result.copy_(sum(given))

    def all_gather(self, given: Any, results: Any, streams: Any = None) -> None:
        self._note("all_gather", given, results, streams)
        for result in results:
            result.copy_(torch.cat(given))

    def reduce_scatter(self, given: Any, results: Any, streams: Any = None) -> None:
        self._note("reduce_scatter", given, results, streams)
        for result, piece in zip(results, sum(given).chunk(len(results)), strict=True):
            result.copy_(piece)


@pytest.fixture
def log():
    return []


@pytest.fixture
def found(monkeypatch, log):
    nccl = Nccl(log)
    for name in ("version", "is_available", "all_reduce", "all_gather", "reduce_scatter"):
        monkeypatch.setattr(torch.cuda.nccl, name, getattr(nccl, name))
    monkeypatch.setattr(torch, "empty", lambda *size, device: device)
    return NcclCollectives()


class Card:
    def __init__(self, index: int) -> None:
        self.target = torch.device("cuda", index)


def cards(count: int) -> list[Any]:
    return [Card(i) for i in range(count)]


def test_the_backend_brings_it():
    assert isinstance(TorchBackend().extension(Collectives), NcclCollectives)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_cards_exchange_in_any_order_together(found, kind):
    for name in ("f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64"):
        assert found.collective_support(kind, cards(2), as_dtype(name), SIZE) == CollectiveSupport("any", together=True)
    assert found.collective_support(kind, cards(2), as_dtype("q8_0"), SIZE) is None
    assert found.collective_support(kind, cards(2), as_dtype("i16"), SIZE) is None


def test_other_devices_and_ranges_that_differ_are_left_to_the_core(found):
    assert found.collective_support("all_reduce", [SeparateCpuDevice()] * 2, as_dtype("f32"), 4) is None
    assert found.collective_support("reduce_scatter", cards(5), as_dtype("f32"), SIZE) is None


def test_old_versions_add_no_bf16(found, monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 9, 6))
    assert found.collective_support("all_reduce", cards(2), as_dtype("bf16"), SIZE) is None
    assert found.collective_support("all_reduce", cards(2), as_dtype("f16"), SIZE) is not None


def test_without_nccl_the_core_exchanges(found, monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "is_available", lambda tensors: False)
    assert found.collective_support("all_reduce", cards(2), as_dtype("f32"), SIZE) is None


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_the_call_is_work_of_the_first_stream(found, log, monkeypatch, kind):
    monkeypatch.undo()
    nccl = Nccl(log)
    monkeypatch.setattr(torch.cuda.nccl, kind, getattr(nccl, kind))
    devices: list[Any] = [SeparateCpuDevice() for _ in range(2)]
    for i, device in enumerate(devices):
        device.api = SimpleNamespace(Stream=lambda target, i=i: Queue(f"card {i}", log))
    rng = np.random.default_rng(0)
    values = [rng.integers(-9, 10, SIZE).astype(np.float32) for _ in devices]
    sizes = {"all_reduce": SIZE, "all_gather": 2 * SIZE, "reduce_scatter": SIZE // 2}
    f32 = as_dtype("f32")
    parts = [dense_arg(device.alloc(4 * SIZE), 0, f32, (3, 4)) for device in devices]
    outs = [dense_arg(device.alloc(4 * sizes[kind]), 0, f32, (sizes[kind],)) for device in devices]
    for arg, value in zip(parts, values, strict=True):
        write(arg, value.reshape(3, 4))
    stream: Any = SimpleNamespace(queue=Queue("leader", log))
    call = found.bind_collective(kind, stream, outs, parts)
    assert log == []
    call()
    assert log == [
        "leader records", "card 0 waits for leader", "card 1 waits for leader", f"{kind} on card 0 card 1",
        "card 0 records", "leader waits for card 0", "card 1 records", "leader waits for card 1",
    ]  # fmt: skip
    got = [read(out) for out in outs]
    total = values[0] + values[1]
    want = {
        "all_reduce": [total, total],
        "all_gather": [np.concatenate(values)] * 2,
        "reduce_scatter": [total[: SIZE // 2], total[SIZE // 2 :]],
    }[kind]
    for result, wanted in zip(got, want, strict=True):
        assert np.array_equal(result, wanted)
