"""What only a GPU can show: queues, pinned memory, captured plans, and every kernel there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import opweave as ow
import opweave_cost
from opweave.contract import Arg, Kind
from opweave.graph.dtypes import as_dtype
from opweave_conformance import CASES
from opweave_torch.accelerator import CudaDevice
from opweave_torch.memory import tensor
from tests.support.kernels import assert_right_where_accepted, by_operation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here, or a torch without CUDA")

F32 = as_dtype("f32")


@pytest.fixture(scope="module")
def card() -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0))


@pytest.fixture
def stream(card: CudaDevice) -> Iterator[ow.Stream]:
    with card.open() as opened:
        yield opened


def test_what_is_known_about_it(card):
    assert card.kind in (Kind.GPU, Kind.IGPU)
    assert card.description == torch.cuda.get_device_name(0)
    free, total = card.mem_info()
    assert 0 < free <= total
    assert card.features()["capability"]
    assert card.hardware_id is None or len(card.hardware_id) == len("0000:01:00.0")


@pytest.mark.parametrize("cases", by_operation(CASES))
def test_kernels_of(card, cases):
    assert_right_where_accepted(card, cases)


def test_transfers_from_pinned_memory_are_queued(card, stream):
    pinned = card.host_buffer_type
    assert pinned is not None
    n = 1 << 20
    with pinned.alloc(4 * n) as host, card.alloc(4 * n) as buffer:
        assert tensor(Arg(host, 0, F32, (n,), (4,))).is_pinned()
        fed = host.view(0, F32, (n,), (4,))
        fed[:] = np.arange(n)
        got = np.zeros(n, np.float32)
        stream.upload(buffer, 0, fed)
        stream.download(buffer, 0, got)
        stream.synchronize()
        np.testing.assert_array_equal(got, np.arange(n, dtype=np.float32))


def chain(length: int) -> tuple[ow.Tensor, ow.Tensor]:
    x = ow.input("x", (256,))
    h = x
    for _ in range(length):
        h = ow.tanh(h + x)
    return x, h


def test_the_second_run_is_captured_and_later_ones_see_new_values(card):
    _, h = chain(20)
    with ow.Scheduler([card, ow.device("host")]) as scheduler:
        program = scheduler.build(h)
        assert "will be captured as a CUDA graph" in program.explain()
        for value in (1.0, 2.0, 3.0, 4.0):
            fed = np.full(256, value, np.float32)
            want = fed
            for _ in range(20):
                want = np.tanh(want + fed)
            np.testing.assert_allclose(program.run(x=fed), want, rtol=1e-5)
        assert "runs as a CUDA graph" in program.explain()


def test_a_plan_that_waits_for_the_host_is_not_captured(card):
    x = ow.input("x", (8,))
    y = ow.custom(lambda a: a + 1, x * 2, like=x) * 3
    with ow.Scheduler([card, ow.device("host")]) as scheduler:
        program = scheduler.build(y)
        for value in (1.0, 2.0, 3.0):
            got = program.run(x=np.full(8, value, np.float32))
            np.testing.assert_array_equal(got, np.full(8, (2 * value + 1) * 3, np.float32))
        assert "not a CUDA graph: custom" in program.explain()
    assert torch.randn(8, device="cuda:0").isfinite().all(), "torch's random generator is usable"


def test_others_capture_after_us_outside_of_inference_mode(card):
    _, h = chain(3)
    with ow.Scheduler([card, ow.device("host")]) as scheduler:
        program = scheduler.build(h)
        for _ in range(3):
            program.run(x=np.ones(256, np.float32))
        x, graph = torch.ones(4, device="cuda:0"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
        graph.replay()
        assert y.tolist() == [2, 2, 2, 2]


def test_a_captured_plan_has_workspaces_of_its_own(card):
    rng = np.random.default_rng(0)
    weight = ow.weights({"w": rng.standard_normal((512, 512), np.float32)}, device=card)["w"]
    x = ow.input("x", (64, 512))
    feed = rng.standard_normal((64, 512), np.float32)
    with ow.Scheduler([card, ow.device("host")]) as scheduler:
        program = scheduler.build(ow.linear(ow.linear(x, weight), weight))
        want = [program.run(x=feed) for _ in range(3)][-1]
        torch._C._cuda_clearCublasWorkspaces()  # as torch.compile(mode="reduce-overhead") does
        torch.cuda.empty_cache()
        np.testing.assert_array_equal(program.run(x=feed), want)


def test_without_graphs_there_is_a_call_for_each_step(card):
    _, h = chain(3)
    with card.open(graphs=False) as stream, ow.Scheduler(stream) as scheduler:
        assert "graph" not in scheduler.build(h).explain()


def test_a_profile_has_a_row_for_each_step_of_a_captured_plan(card):
    _, h = chain(3)
    with ow.Scheduler(card) as scheduler:
        program = scheduler.build(h)
        profile = opweave_cost.profile_run(program, x=np.ones(256, np.float32), runs=2, limits=False)
        assert [row.ops for row in profile.rows if row.kind == "step"] == [("add",), ("tanh",)] * 3
        assert "runs as a CUDA graph" in program.explain(), "the program itself is measured as it is"


def test_states_written_by_captured_plans(card):
    state, x = ow.state("sum", 4, device=card), ow.input("x", 4)
    with ow.Scheduler([card, ow.device("host")]) as scheduler:
        program = scheduler.build(ow.assign(state, state + x))
        for _ in range(5):
            program.run(x=np.ones(4, np.float32))
        np.testing.assert_array_equal(program.read(state), np.full(4, 5))


def test_tensors_of_torch_on_the_card_become_weights_there_and_states_are_seen_by_torch():
    theirs = torch.arange(6, device="cuda:0", dtype=torch.float32).reshape(2, 3)
    w = ow.from_dlpack(theirs)
    leaf: Any = w.leaf
    assert leaf.placement.buffer.address == theirs.data_ptr()
    np.testing.assert_array_equal(ow.read(w), theirs.cpu().numpy())
    state = ow.state("s", 3, fill=2, device="torch:cuda:0")
    shown = torch.from_dlpack(state)
    assert shown.device == torch.device("cuda", 0)
    assert shown.tolist() == [2, 2, 2]


def test_memory_that_is_not_there_is_refused_and_the_device_goes_on(card):
    with pytest.raises(ow.AllocationError):
        card.alloc(1 << 50)
    with card.alloc(64) as buffer:
        buffer.clear(3)
        assert set(buffer.read().tolist()) == {3}


def test_copies_between_cards(card):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    second = CudaDevice(torch.device("cuda", 1))
    with card.alloc(1024) as a, second.alloc(1024) as b, second.open() as stream:
        a.clear(9)
        assert stream.copy_from(b, 0, a, 0, 1024)
        stream.synchronize()
        assert set(b.read().tolist()) == {9}
