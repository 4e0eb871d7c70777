"""The memory plan: no two live tensors overlap, and hardly a byte is wasted.

Whole programs are judged by ``benchmarks/memory_verifier.py``, which shares no code with the planner; that judge is
itself tested here, by plans with planted faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opweave as ow
from benchmarks.graphs import GRAPHS
from benchmarks.memory_verifier import judge, verify
from opweave.contract import Arg, Call, Group, MemorySpace, Step, Stream
from opweave.graph.opdef import OPS
from opweave.runtime.fusion import pointwise_groups
from opweave.runtime.host.device import HostDevice
from opweave.scheduler.plan.chunks import Block, ChunkPlan, plan_chunks
from opweave.scheduler.program import MemoryMap, Program, Region
from tests.support.evaluate import evaluate

MAX_SIZE = 20_000
Feeds = dict[ow.Tensor, np.ndarray[Any, Any]]


class Island(HostDevice):
    """Runs everything, in memory that nothing else reaches."""

    def __init__(self, name: str, *, alignment: int = 64, max_buffer_size: int | None = None) -> None:
        self.name = name
        self.space = MemorySpace(name)
        self.alignment = alignment
        self.max_buffer_size = max_buffer_size

    _import_host = ow.Device._import_host
    _map = ow.Device._map
    _unmap = ow.Device._unmap


class Fusing(Stream):
    """Runs consecutive pointwise steps over one shape as one group; values inside of it never touch memory."""

    def _fuse(self, steps: Sequence[Step]) -> list[Group]:
        runs = pointwise_groups(steps, lambda step: OPS[step.op].pointwise)
        return [Group(tuple(run), workspace=256) for run in runs]

    def _bind(self, group: Group) -> Call:
        assert group.scratch is not None
        scratch = group.scratch.view

        def call() -> None:
            scratch[:] = 0xFF
            inner: dict[int, np.ndarray[Any, Any]] = {}
            for step in group.steps:
                srcs = [a.view if a.buffer is not None else shown(inner[a.value], a) for a in step.srcs]
                result = OPS[step.op].reference(*srcs, **step.attrs).astype(step.out.dtype.numpy)
                inner[step.out.value] = result
                if step.out.buffer is not None:
                    np.copyto(step.out.view, result)

        return call


def shown(values: np.ndarray[Any, Any], arg: Arg) -> np.ndarray[Any, Any]:
    return np.ndarray(arg.shape, arg.dtype.numpy, np.ascontiguousarray(values), arg.offset, arg.strides)


class FusingIsland(Island):
    stream_class = Fusing

    def _open(self, **params: Any) -> Stream:
        return Fusing(self)


# --- blocks ---------------------------------------------------------------------------------------------------------

blocks = st.lists(
    st.builds(
        lambda size, birth, length: Block(size, birth, birth + length),
        st.integers(1, 5000),
        st.integers(0, 40),
        st.integers(0, 20),
    ),
    max_size=60,
)
alignments = st.sampled_from([1, 4, 64, 256])


def check_plan(wanted: list[Block], plan: ChunkPlan, alignment: int) -> None:
    """Every block is aligned, inside of its chunk, and alone there while it lives."""
    assert len(plan.chunks) == len(plan.offsets) == len(wanted)
    placed = list(zip(wanted, plan.chunks, plan.offsets, strict=True))
    for i, (a, chunk, offset) in enumerate(placed):
        assert offset % alignment == 0
        assert offset >= 0
        assert offset + a.size <= plan.sizes[chunk]
        for b, other_chunk, other in placed[:i]:
            at_once = a.birth <= b.death and b.birth <= a.death
            assert not at_once or chunk != other_chunk or offset + a.size <= other or other + b.size <= offset


@given(blocks, alignments)
def test_blocks_that_live_at_one_moment_do_not_overlap(wanted: list[Block], alignment: int) -> None:
    plan = plan_chunks(wanted, alignment)
    check_plan(wanted, plan, alignment)
    assert len(plan.sizes) <= 1


@given(blocks, alignments, st.lists(st.integers(1, 20_000), max_size=4))
def test_existing_chunks_keep_their_size_and_are_used_first(
    wanted: list[Block], alignment: int, capacities: list[int]
) -> None:
    plan = plan_chunks(wanted, alignment, capacities)
    check_plan(wanted, plan, alignment)
    assert plan.sizes[: len(capacities)] == capacities
    # What fitted once fits again, into the same bytes.
    again = plan_chunks(wanted, alignment, plan.sizes)
    check_plan(wanted, again, alignment)
    if not capacities:
        assert again == plan


@given(blocks, alignments, st.lists(st.integers(1, MAX_SIZE), max_size=3))
def test_no_chunk_exceeds_the_largest_size_possible(wanted: list[Block], alignment: int, capacities: list[int]) -> None:
    plan = plan_chunks(wanted, alignment, capacities, MAX_SIZE)
    check_plan(wanted, plan, alignment)
    assert all(size <= MAX_SIZE for size in plan.sizes)


def test_a_block_above_the_largest_size_gets_a_chunk_of_its_own() -> None:
    plan = plan_chunks([Block(100, 0, 9), Block(500, 0, 9), Block(100, 0, 9)], 1, max_size=200)
    check_plan([Block(100, 0, 9), Block(500, 0, 9), Block(100, 0, 9)], plan, 1)
    assert sorted(plan.sizes) == [100, 100, 500]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), alignments)
def test_blocks_that_never_meet_share_the_bytes_of_the_largest(sizes: list[int], alignment: int) -> None:
    plan = plan_chunks([Block(size, t, t) for t, size in enumerate(sizes)], alignment)
    assert plan.nbytes == -(-max(sizes) // alignment) * alignment


def test_the_better_of_two_plans_is_taken() -> None:
    # Walking through time leaves holes of 1 where 2 are wanted next; placing the largest first does not.
    wanted = [Block(1, 0, 0), Block(1, 0, 3), Block(1, 0, 0), Block(2, 1, 2)]
    assert plan_chunks(wanted, 1).nbytes == 3


# --- the judge ------------------------------------------------------------------------------------------------------


@pytest.fixture
def device() -> Island:
    return Island("island")


def three_steps(device: Island) -> tuple[ow.Scheduler, Program]:
    """``y = x @ x`` and ``z = y @ x``, then ``y @ z``: y and z live together, and nothing can be in place."""
    x = ow.input("x", (16, 16))
    y = x @ x
    scheduler = ow.Scheduler(device)
    return scheduler, scheduler.build(y @ (y @ x))


def place_of(program: Program, index: int) -> int:
    """The place that the index-th step writes."""
    return program.splits[0].steps[index].out.storage


def moved(where: MemoryMap, place: int, **changes: Any) -> MemoryMap:
    return where._replace(places={**where.places, place: where.places[place]._replace(**changes)})


def test_a_right_plan_has_no_faults(device: Island) -> None:
    scheduler, program = three_steps(device)
    judged = verify(program)
    assert judged.faults == []
    # x, y and z of 1 KiB live at once; the result may take x's bytes.
    assert judged.bound == {"island": 3 * 1024}
    assert judged.planned == {"island": scheduler.buffer_size(device)}
    assert program.memory["island"].temporaries == 3 * 1024


def test_a_tensor_over_one_that_is_still_read_is_found(device: Island) -> None:
    _scheduler, program = three_steps(device)
    where = program.memory_map()
    y, z = place_of(program, 0), place_of(program, 1)
    faults = judge(program.partition, moved(where, z, offset=where.places[y].offset)).faults
    assert any(f"lies over source place {y}" in fault for fault in faults)
    assert any(f"reads place {y}" in fault and "has taken" in fault for fault in faults)


def test_a_partial_overlap_of_one_unit_is_found(device: Island) -> None:
    _scheduler, program = three_steps(device)
    where = program.memory_map()
    low, high = sorted((place_of(program, 0), place_of(program, 1)), key=lambda p: where.places[p].offset)
    touching = where.places[high].offset - where.places[low].size
    assert judge(program.partition, moved(where, low, offset=touching)).faults == []
    assert judge(program.partition, moved(where, low, offset=touching + 64)).faults


def test_an_output_over_a_source_is_found_where_the_operation_does_not_allow_it(device: Island) -> None:
    x = ow.input("x", (16, 16))
    scheduler = ow.Scheduler(device)
    program = scheduler.build(ow.neg(x @ x) @ x)
    where = program.memory_map()
    first, negated, last = (place_of(program, i) for i in range(3))
    assert where.places[negated] == where.places[first]  # in place: neg allows it
    assert verify(program).faults == []
    faults = judge(program.partition, moved(where, last, offset=where.places[negated].offset)).faults
    assert any(f"lies over source place {negated}" in fault for fault in faults)


def test_an_overwritten_input_and_output_are_found(device: Island) -> None:
    x = ow.input("x", (16, 16))
    y = x @ x
    scheduler = ow.Scheduler(device)
    program = scheduler.build([y, y @ x])
    where = program.memory_map()
    (fed,) = program.partition.inputs.values()
    kept, last = place_of(program, 0), place_of(program, 1)
    faults = judge(program.partition, moved(where, kept, offset=where.places[fed].offset)).faults
    assert any(f"reads place {fed}" in fault for fault in faults)
    faults = judge(program.partition, moved(where, last, offset=where.places[kept].offset)).faults
    assert any("fetching reads" in fault for fault in faults)


def test_places_outside_of_buffers_or_not_aligned_are_found(device: Island) -> None:
    _scheduler, program = three_steps(device)
    where = program.memory_map()
    last = place_of(program, 2)
    assert any("not aligned" in f for f in judge(program.partition, moved(where, last, offset=4)).faults)
    end = where.places[last].buffer.size
    assert any("outside" in f for f in judge(program.partition, moved(where, last, offset=end)).faults)


def test_a_temporary_over_a_leaf_is_found(device: Island) -> None:
    x, w = ow.input("x", (16, 16)), ow.weights({"w": np.ones((16, 16), np.float32)}, device=device)["w"]
    scheduler = ow.Scheduler(device)
    program = scheduler.build(x @ w)
    assert verify(program).faults == []
    assert w.leaf is not None
    assert w.leaf.placement is not None
    where = program.memory_map()
    weight = Region(w.leaf.placement.buffer, w.leaf.placement.offset, w.nbytes)
    faults = judge(program.partition, moved(where, place_of(program, 0), **weight._asdict())).faults
    assert any("memory of a leaf" in fault for fault in faults)


def test_a_workspace_over_a_live_tensor_is_found(device: Island) -> None:
    _scheduler, program = three_steps(device)
    where = program.memory_map()
    y = where.places[place_of(program, 0)]
    faults = judge(program.partition, where._replace(workspaces={(0, 1): y})).faults
    assert any("the workspace lies over" in fault for fault in faults)
    assert any("a workspace has taken" in fault for fault in faults)


def test_the_bound_counts_an_output_over_its_source_once(device: Island) -> None:
    x = ow.input("x", (1024,))
    y = ow.neg(x)
    scheduler = ow.Scheduler(device)
    assert verify(scheduler.build(ow.exp(y))).bound == {"island": 2 * 4096}  # the input is not overwritten
    assert verify(scheduler.build([y, ow.exp(y)])).bound == {"island": 2 * 4096}  # x ends before the second result


# --- whole programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", GRAPHS)
@pytest.mark.parametrize("devices", [1, 3])
@settings(max_examples=8, deadline=None)
@given(nodes=st.integers(20, 150), rows=st.integers(64, 300), columns=st.sampled_from([128, 192, 320]))
def test_big_tensors_take_hardly_more_than_the_bound(
    shape: str, devices: int, nodes: int, rows: int, columns: int
) -> None:
    islands = [Island(f"island{i}") for i in range(devices)]
    place: Callable[[float], Any] = lambda share: islands[int(share * devices)]  # noqa: E731
    size = (rows * columns // 8, 64) if shape == "u" else (2 * rows, columns)
    with ow.Scheduler(islands) as scheduler:
        program = scheduler.build(GRAPHS[shape](nodes, *size, place=place).output)
        judged = verify(program)
        assert judged.faults == []
        assert judged.ratio <= 1.05
        assert judged.planned == {d.name: scheduler.buffer_size(d) for d in islands}


@st.composite
def random_graphs(draw: st.DrawFn) -> tuple[list[ow.Tensor], Feeds, dict[ow.Tensor, int]]:
    """Outputs, feeds, and pins to two devices: steps in place and not, views, several readers and outputs."""
    n = draw(st.integers(1, 3)) * 4
    values = [ow.input(f"in{k}", (n, n)) for k in range(draw(st.integers(1, 3)))]
    feeds = {x: np.linspace(-1, 1 + k, n * n, dtype=np.float32).reshape(n, n) for k, x in enumerate(values)}
    pins: dict[ow.Tensor, int] = {}
    for _ in range(draw(st.integers(1, 25))):
        a, b = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        made = draw(
            st.sampled_from(
                [
                    lambda a, b: a + b,
                    lambda a, b: a * b,
                    lambda a, b: ow.tanh(a),
                    lambda a, b: ow.tanh(a @ b),
                    lambda a, b: ow.softmax(a + b),
                    lambda a, b: ow.relu(a.T),
                    lambda a, b: a.T + b,
                    lambda a, b: a[: n // 2].sum(axis=0, keepdims=True) + b,
                    lambda a, b: ow.concat([a[::2], b[1::2]]),
                    lambda a, b: ow.tanh(a.reshape(-1)).reshape(n, n),
                ]
            )
        )(a, b)
        if draw(st.booleans()):
            pins[made.root] = draw(st.integers(0, 1))
        values.append(made)
    computed = [v for v in values if v.op is not None]
    outputs = [computed[-1], *draw(st.lists(st.sampled_from(computed), max_size=3))]
    return outputs, feeds, pins


@settings(max_examples=60, deadline=None)
@given(random_graphs(), st.sampled_from([4, 64]), st.sampled_from([None, 2048]))
def test_any_graph_over_two_memories_is_planned_without_overlaps(
    graph: tuple[list[ow.Tensor], Feeds, dict[ow.Tensor, int]],
    alignment: int,
    max_size: int | None,
) -> None:
    outputs, feeds, pins = graph
    islands = [Island(name, alignment=alignment, max_buffer_size=max_size) for name in ("a", "b")]
    with ow.Scheduler(islands) as scheduler:
        program = scheduler.build(outputs, pins={node: islands[where] for node, where in pins.items()})
        judged = verify(program)
        assert judged.faults == []
        assert judged.ratio >= 1
        inputs = program.partition.graph.leaves
        results = program.run({x: feeds[x] for x in inputs})
    for result, output in zip(results, outputs, strict=True):
        np.testing.assert_allclose(result, evaluate(output, feeds), rtol=1e-5, atol=1e-6)


def test_fused_groups_are_one_moment_and_what_lives_inside_takes_no_memory() -> None:
    x = ow.input("x", (64, 16))
    y = ow.tanh(x)
    z = ow.exp(ow.neg(y) * y) + y
    with ow.Scheduler(FusingIsland("island")) as scheduler:
        program = scheduler.build((z @ z.T).sum() + z)
        where = program.memory_map()
        assert where.groups == [[[0, 1, 2, 3, 4], [5], [6], [7]]]
        inner = [program.splits[0].steps[i].out.storage for i in range(4)]
        assert not any(place in where.places for place in inner)
        judged = verify(program)
        assert judged.faults == []
        assert judged.ratio == 1
        fed = np.linspace(-1, 1, 64 * 16, dtype=np.float32).reshape(64, 16)
        np.testing.assert_allclose(
            program.run({x: fed}), evaluate(program.partition.graph.outputs[0], {x: fed}), rtol=1e-4
        )


@settings(max_examples=40, deadline=None)
@given(random_graphs())
def test_any_graph_with_fused_groups_is_planned_without_overlaps(
    graph: tuple[list[ow.Tensor], Feeds, dict[ow.Tensor, int]],
) -> None:
    outputs, feeds, _ = graph
    with ow.Scheduler(FusingIsland("island")) as scheduler:
        program = scheduler.build(outputs)
        assert verify(program).faults == []
        results = program.run({x: feeds[x] for x in program.partition.graph.leaves})
    for result, output in zip(results, outputs, strict=True):
        np.testing.assert_allclose(result, evaluate(output, feeds), rtol=1e-5, atol=1e-6)


def test_successive_programs_share_memory_and_stay_right() -> None:
    """Chunks are appended and never moved: an earlier program's plan still holds after a larger one was built."""
    device = Island("island", max_buffer_size=1 << 16)
    with ow.Scheduler(device) as scheduler:
        programs = []
        for n in (16, 64, 128, 32):
            x = ow.input(f"x{n}", (n, n))
            programs.append((x, scheduler.build(ow.tanh(x @ x) @ x)))
        for x, program in programs:
            assert verify(program).faults == []
            fed = np.full(x.shape, 0.1, np.float32)
            right = np.tanh(fed @ fed) @ fed
            np.testing.assert_allclose(program.run({x: fed}), right, rtol=1e-5)
