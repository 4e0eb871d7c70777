"""`measure_steps`: measures what the steps of a graph take on a device, inside a program, for predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf, prod
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opweave import registry
from opweave.errors import SchedulerError
from opweave.graph.blocks import Blocks
from opweave.graph.graph import Graph, rebuilt
from opweave.graph.opdef import SAMPLE_IDS
from opweave.graph.tensor import input as new_input
from opweave.leaves import state, weights
from opweave.ops import quantize
from opweave.scheduler import Program, Scheduler
from opweave.scheduler.place.arguments import checked_outputs
from opweave_cost.run_parts import step_times

if TYPE_CHECKING:
    from opweave.contract import Device
    from opweave.graph.tensor import Tensor
    from opweave.scheduler.place.support import Support
    from opweave.scheduler.place.target import Target

__all__ = ["StepTimes", "measure_nodes", "measure_steps", "note_steps"]

LEAVES: Final = 1 << 30
"""Default limit in bytes of the leaves of a measurement; those of steps of new kinds come on top of it."""
RUN_SECONDS: Final = 0.3
"""Further runs are made until so many seconds have passed: other load makes runs longer, never shorter."""
MOST_RUNS: Final = 1000
LEAST: Final = 0.1
"""The share of a run that counts for its steps at least, where predictions leave less beside the transfers."""

StepTimes = Sequence[tuple["Target", list["Tensor"], float]]
"""Of each step, or of what a device fuses: target, nodes, seconds."""


def measure_steps(
    outputs: Any, device: Device | str, /, *, runs: int = 10, limit: int = LEAVES, threads: int | None = None
) -> None:
    """Measure what the steps of a graph take on a device, inside a program: with its caches, its fused steps and its
    repacked weights. Profiles (`profile`) only know operations in some sizes, each by itself.

    The graph runs on the device with values that are made up where it has none: weights made of `opweave.Spec` or that
    lie elsewhere, and inputs. Where leaves are larger than ``limit``, as many steps from the beginning as fit are
    measured, and the first step of each kind (operation, attributes, shapes and dtypes) behind them. States of the
    graph are not written. Steps that the device does not support are left out.

    The steps' times stay with the process: ``Program.predicted``, ``placement="cost"`` and devices that are simulated
    like this one use them for steps of the same kind.

    Args:
        outputs: as of `Scheduler.build`.
        device: a device or its name.
        runs: how many runs are measured at least.
        limit: bytes of leaves (weights, states, inputs), see above.
        threads: as of `opweave.Scheduler`.

    Raises:
        SchedulerError: outputs that are no tensors, a simulated device, a number of runs or a limit below 1.
        UnknownNameError, PluginError: no such device, or its plugin failed.
        AllocationError: no memory for the weights and temporaries.
    """
    for what, number in {"runs": runs, "limit": limit}.items():
        if not isinstance(number, int) or number < 1:
            raise SchedulerError(f"{what} is a whole number, at least 1, not {number!r}")
    found = registry.device(device) if isinstance(device, str) else device
    if found.simulated:
        raise SchedulerError(f"{found.name} is simulated: give the device that it is like")
    graph = Graph(checked_outputs(outputs)[0])
    measure_nodes(graph.nodes, found, runs=runs, limit=limit, threads=threads)


def measure_nodes(
    nodes: Iterable[Tensor], device: Device, *, runs: int = 10, limit: int = LEAVES, threads: int | None = None
) -> None:
    """`measure_steps` for some nodes of a graph, in its order; those whose kinds are known already are not measured."""
    with Scheduler(device, threads=threads) as scheduler:
        target = scheduler.targets[0]
        chosen = _chosen([n for n in nodes if n.op is not None and n.base is None], target, limit)
        if not chosen:
            return
        outputs, feeds = _alone(chosen, device)
        program = scheduler.build(outputs)
        least = least_seconds(lambda: program.run(feeds), runs)
        times = step_times(program, runs, lambda other: other.run(feeds))
    note_steps(program, least, times)


def least_seconds(run: Callable[[], Any], runs: int) -> float:
    """The least seconds of at least ``runs`` runs, which follow one that may upload and compile."""
    run()
    least, count, end = inf, 0, perf_counter() + RUN_SECONDS
    while count < runs or (count < MOST_RUNS and perf_counter() < end):
        start = perf_counter()
        run()
        least, count = min(least, perf_counter() - start), count + 1
    return least


def note_steps(program: Program, seconds: float, steps: StepTimes) -> None:
    """Remember what each step takes, so that the steps of a run add up to what the run takes beyond transfers and the
    beginnings of splits. Equal steps may be fused with others in one place and stand alone in another: each is
    remembered with the mean. Where devices work at once, steps count as they were measured one by one."""
    predicted, capabilities = program.predicted, program.partition.assignment.capabilities
    starts = sum(predicted.busy.values()) - sum(predicted.nodes.values())
    total = sum(took for _, _, took in steps)
    at_once = predicted.seconds < (sum(predicted.busy.values()) + predicted.copies) * (1 - 1e-9)
    share = 1.0 if at_once or not total else max(seconds - predicted.copies - starts, seconds * LEAST) / total
    alike: dict[Support, list[float]] = {}
    for target, nodes, took in steps:
        parts = [max(predicted.nodes.get(node, 0.0), 1e-9) for node in nodes]
        for node, part in zip(nodes, parts, strict=True):
            support = capabilities.support(target, node)
            alike.setdefault(support, []).append(took * share * part / sum(parts))
    for support, each in alike.items():
        support.seconds = sum(each) / len(each)


def _chosen(nodes: Sequence[Tensor], target: Target, limit: int) -> list[Tensor]:
    """The nodes to measure: those whose leaves fit into ``limit``, the first of each kind; none if all are known."""
    known: set[Any] = set()
    leaves: set[Tensor] = set()
    size = 0
    chosen: list[Tensor] = []
    missing = False
    for node in nodes:
        signature = node.signature
        assert signature is not None
        support = target.support(signature)
        if support.reason is not None:
            continue
        read = {source.memory for source in node.srcs if source.memory.leaf is not None} - leaves
        more = sum([leaf.nbytes for leaf in read])
        if signature in known and size + more > limit:
            continue
        missing |= support.seconds is None
        known.add(signature)
        leaves |= read
        size += more
        chosen.append(node)
    return chosen if missing else []


def _alone(nodes: Sequence[Tensor], device: Device) -> tuple[tuple[Tensor, ...], dict[str, np.ndarray[Any, Any]]]:
    """The nodes as a graph of their own, with its feeds: what they read of others comes as inputs, weights without
    values on the device get some, and states are their own."""
    here, rng = set(nodes), np.random.default_rng(0)
    known: dict[Tensor, Tensor] = {}
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    read: set[Tensor] = set()
    for root in dict.fromkeys(source.root for node in nodes for source in node.srcs):
        read.add(root)
        leaf = root.memory.leaf
        if root in here:
            continue
        if leaf is None or leaf.kind == "input":
            known[root] = new_input(f"measured {len(feeds)}", root.shape, root.dtype)
            feeds[known[root].name] = _values(root, rng)
        elif leaf.kind == "state":
            memory = root.memory
            known.setdefault(memory, state(memory.name, memory.shape, memory.dtype))
            known.setdefault(root, known[memory])  # a version that a node outside of this graph wrote
        elif not _has_values(root, device):
            values = _values(root, rng)
            blocks = root.dtype.is_quantized
            known[root] = weights({root.name: Blocks(values, root.shape, root.dtype) if blocks else values})[root.name]
    ends = [node for node in nodes if node not in read or node.state is not None]
    return rebuilt(ends, known), feeds


def _has_values(tensor: Tensor, device: Device) -> bool:
    leaf = tensor.leaf
    assert leaf is not None
    if leaf.placement is not None:
        return device.reaches(leaf.placement.buffer.space)
    return leaf.data is not None


def _values(tensor: Tensor, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Values as kernels may meet them: numbers about 0, and ids of rows and experts that exist."""
    dtype, shape = tensor.dtype, tensor.shape
    if dtype.is_quantized:
        row = quantize(rng.standard_normal(shape[-1], np.float32), dtype).data  # one row serves for all
        return np.tile(row, prod(shape[:-1]))
    if dtype.is_float:
        return rng.standard_normal(shape, np.float32).astype(dtype.numpy)
    return (np.arange(prod(shape)) % SAMPLE_IDS).reshape(shape).astype(dtype.numpy)
