"""`Scheduler`: runs one graph over several devices."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, overload

from opweave import registry
from opweave.collector import collector_paused
from opweave.contract.device import Kind
from opweave.errors import SchedulerError, UnsupportedOpError, not_pickled, simulated_error
from opweave.graph.graph import Graph
from opweave.graph.leaf import Placement
from opweave.graph.precision import Precision
from opweave.graph.tensor import Tensor
from opweave.leaf_memory import withdraw
from opweave.lifecycle import close_at_exit, close_or_give_up, exit_timeout, keep_forever, notify_after_fork
from opweave.runtime.device import Device
from opweave.runtime.memory import BufferType
from opweave.runtime.stream import Stream
from opweave.scheduler.compile.arena import Arena, Lease
from opweave.scheduler.place.annotated_graph import AnnotatedGraph
from opweave.scheduler.place.arguments import checked_options, checked_outputs, checked_pins, checked_placements
from opweave.scheduler.place.precision import checked_precision
from opweave.scheduler.place.target import (
    HostForEmpty,
    Repack,
    Target,
    Where,
    close_targets,
    equal_part,
    find_target,
    open_targets,
    reads_nothing,
)
from opweave.scheduler.program import Array, PlannedGraph, Program
from opweave.scheduler.run.executor import Executor
from opweave.tracing import TRACE

if TYPE_CHECKING:
    from opweave.runtime.host.threads import ThreadPool
    from opweave.scheduler.builder import Builder
    from opweave.scheduler.place.arguments import Outputs
    from opweave.scheduler.place.precision import Allowed
    from opweave.scheduler.plan.splits import Partition

__all__ = ["Scheduler", "Stats"]

Pins = Mapping[Tensor, Where] | None
Placements = Iterable[Placement]
Precisions = Precision | Mapping[str, Precision] | None

PROGRAMS_KEPT: Final = 64
"""How many programs a scheduler remembers, so that building the same outputs again costs nothing."""


class Stats(NamedTuple):
    """What a scheduler has done since it was made.

    Attributes:
        built, reused: programs that were built, and builds that returned an existing one.
        runs: runs that began.
        copied: bytes that they copied between memories.
        allocated: bytes taken for temporaries.
    """

    built: int
    reused: int
    runs: int
    copied: int
    allocated: int


class Scheduler:
    """Places each operation on a device that supports it, copies between devices, plans the memory, says why.

    Args:
        devices: devices, streams or names, earlier ones preferred. Streams that it opens itself are closed with it.
        parallel: let successive runs of a program overlap, each device working on another one (`Program.submit`).
            Every device gets a thread; inputs and transferred values get memory for several runs. ``True``: as many
            slots as there are devices (2 to 4), a number: that many.
        op_offload: a device may bring weights from host memory for operations that it runs much faster.
        buffer_types: device or its name -> the kind of memory for its temporaries, where not its ordinary one.
        placement: ``"priority"``: by the rules of `opweave.scheduler.place`, earlier devices preferred. Others are
            strategies that plugins offer (hook ``opweave_placements``). ``"cost"``, of ``opweave-cost``: as a run is
            predicted to take least time by the devices' profiles, which are measured at the first build where there
            are none.
        precision: how roughly products, attention and convolutions may be computed at most, for builds that say nothing
            else: ``"exact"``, ``"bf16"`` (operands and results rounded to bf16) or ``"int8"`` (activations quantized to
            8 bits in blocks, beside quantized weights), each of which allows the finer ones too; or a mapping of
            patterns of node names (`opweave.scope`) to these, of which the first match counts. Nodes for which their
            device has faster kernels of such a precision then run in it; `Program.explain` shows which nodes do,
            `opweave_conformance.compare` what it costs.
        memory_limit: bytes that the temporaries of a program may take, on all devices together. Where they would take
            more, values that are needed again much later, as the backward graph needs activations, are computed again
            instead of being kept: as few as are necessary, those first that cost least for what they save. Results stay
            the same. It comes with ``opweave-training``. ``None``: nothing is computed again.
        repack: whether devices may keep copies of weights in special memory that their kernels are faster with; a
            number: bytes that those may take, for each device and program; a mapping: either of these for the devices
            or names of devices in it, for others what ``None`` says. They take at most half of what a device has
            free, count as weights in `Program.memory`, and all programs share them. ``None``: as the environment
            variable ``OPWEAVE_<BACKEND>_CACHE_BYTES`` says, such as ``OPWEAVE_CPU_CACHE_BYTES``, or for all devices
            ``OPWEAVE_REPACK_BYTES`` (0: no copies), else yes.
        threads: for the streams that it opens on devices that compute in threads of this process (``cpu``,
            ``torch:cpu``, ``ort:cpu``): how many each uses, or the `opweave.ThreadPool` that they share. ``None``: as
            their backends say; with ``parallel``, where several of them compute at once, each an equal part of the
            processors.

    Raises:
        SchedulerError: no devices, one named twice, a buffer type that its device cannot reach or kernels cannot write,
            no such placement or number of slots, a precision that is neither a name nor a mapping, no number of bytes,
            a limit of copies for a device that is not among them.
        UnknownNameError, PluginError: a name that is no device or precision, or a device of a plugin that failed.
    """

    def __init__(
        self,
        devices: Where | Sequence[Where],
        *,
        parallel: bool | int = False,
        op_offload: bool = True,
        buffer_types: Mapping[Device | str, BufferType] | None = None,
        placement: str = "priority",
        precision: Precision | Mapping[str, Precision] = "exact",
        memory_limit: int | None = None,
        repack: Repack = None,
        threads: int | ThreadPool | None = None,
    ) -> None:
        self._allowed: Final = checked_precision(precision)
        resolved, kinds, self._strategy = checked_options(devices, parallel, buffer_types, placement, memory_limit)
        self.placement: Final = placement
        self.parallel: Final = bool(parallel)
        self.n_slots: Final = (
            1 if not parallel else min(max(len(resolved), 2), 4) if parallel is True else int(parallel)
        )
        self._options: Final[dict[str, Any]] = {  # those of a scheduler that goes on in place of this one, too
            "parallel": self.n_slots if parallel else False,
            "op_offload": op_offload,
            "buffer_types": dict(buffer_types or {}),
            "placement": placement,
            "precision": dict(self._allowed),
            "memory_limit": memory_limit,
            "repack": dict(repack) if isinstance(repack, Mapping) else repack,
            "threads": threads,
        }
        self._built = self._reused = 0
        self._pins: dict[Tensor, int] = {}
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._executor: Final = Executor(self.n_slots, parallel=self.parallel)
        self._targets: Final = open_targets(resolved, kinds, self.parallel, threads, repack, self._executor.ownership)
        self._executor.targets.extend(self._targets)
        self._arenas: Final = [Arena(target) for target in self._targets]
        self._reserved: Final[list[Lease]] = []
        notify_after_fork(self)
        close_at_exit(self, first=True)

    def __repr__(self) -> str:
        return f"<Scheduler over {', '.join(target.name for target in self._targets)}>"

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close. Where an exception leaves the block, runs are cancelled first, and closing waits for kernels at most
        as long as the end of the process does; then a `RuntimeWarning` names what has not ended."""
        if kind is None or self._executor.inherited:
            self.close()
            return
        self._executor.check_closer(whole=True)
        pending = self.describe_pending() or "work in flight"  # before cancelling, which skips the calls that are left
        self._executor.cancel()
        if not close_or_give_up(self, self.streams):
            warnings.warn(f"{self!r} was left by {kind.__name__}, and {pending} has not ended after "
                          f"{exit_timeout():g} s (OPWEAVE_EXIT_WAIT); it is not waited for any more",
                          RuntimeWarning, stacklevel=2)  # fmt: skip

    @property
    def targets(self) -> Sequence[Target]:
        """Its devices with their streams and what they support; for tools."""
        return self._targets

    @property
    def devices(self) -> tuple[Device, ...]:
        """In order of priority."""
        return tuple(target.device for target in self._targets)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """One for each device, in the same order."""
        return tuple(target.stream for target in self._targets)

    def buffer_type(self, device: Where) -> BufferType:
        """The kind of memory that temporaries of a device lie in; raises `SchedulerError` as `find`."""
        return find_target(self._targets, device).buffer_type

    def buffer_size(self, device: Where) -> int:
        """Bytes that are allocated for temporaries on a device; raises `SchedulerError` as `find`."""
        return self._arenas[find_target(self._targets, device).index].nbytes

    # --- building ---------------------------------------------------------------------------------------------------

    def pin(self, tensor: Tensor, device: Where | None) -> None:
        """Let a node run on one device from the next build on, an input be fed there, or a state without memory lie
        there; ``None`` lifts the pin."""
        with self._executor.lock:
            self._pins.pop(tensor, None)
            if device is not None:
                self._pins.update(checked_pins(self._targets, {tensor: device}))

    @overload
    def build(
        self, outputs: Tensor, pins: Pins = ..., placements: Placements = ..., *, precision: Precisions = ...
    ) -> Program[Array]: ...
    @overload
    def build(
        self,
        outputs: Mapping[str, Tensor],
        pins: Pins = ...,
        placements: Placements = ...,
        *,
        precision: Precisions = ...,
    ) -> Program[dict[str, Array]]: ...
    @overload
    def build(
        self, outputs: Sequence[Tensor], pins: Pins = ..., placements: Placements = ..., *, precision: Precisions = ...
    ) -> Program[tuple[Array, ...]]: ...
    @overload
    def build(
        self, outputs: Outputs, pins: Pins = ..., placements: Placements = ..., *, precision: Precisions = ...
    ) -> Program: ...
    def build(
        self, outputs: Outputs, pins: Pins = None, placements: Placements = (), *, precision: Precisions = None
    ) -> Program[Any]:
        """A program that computes ``outputs``: a tensor, a sequence or a mapping of tensors.

        Asking for the same outputs again gives the same program, unless leaves were placed elsewhere meanwhile or their
        buffers got another usage.

        Args:
            pins: computed tensor -> the device that must run it; input -> where it is fed; state that has no memory yet
                -> where it will lie.
            placements: memory for computed tensors that the caller decided (`opweave.storage`).
            precision: as of the scheduler, for this program; ``None``: that of the scheduler.

        Raises:
            UnknownNameError: no such precision, or a pattern of ``precision`` that matches no product here.
            UnsupportedOpError: a node that no device runs, with every device's reason.
            HazardError: reads and writes of one state that have no order.
            AllocationError: a device has no room.
            SchedulerError: pins to devices that are not here or of states that lie elsewhere, leaves without bytes, a
                simulated device.
        """
        with self._executor.lock:
            tensors, form = checked_outputs(outputs)
            pinned = {**self._pins, **checked_pins(self._targets, pins)} if pins else self._pins
            placed = checked_placements(placements) if placements else {}
            allowed = self._allowed if precision is None else checked_precision(precision)
            key = (form, tensors, tuple(pinned.items()), tuple(placed.values()), allowed)
            known = self._programs.get(key)
            if known is not None and known.is_current:
                self._programs.move_to_end(key)
                self._reused += 1
                return known
            self._executor.check_open()
            for target in self._targets:
                if target.device.simulated:
                    raise simulated_error(target.device.name)
            start = perf_counter_ns()
            with collector_paused():
                annotated = AnnotatedGraph(Graph(tensors), pinned, placed)
                builder, parts = self._partition(annotated, allowed)
                several = parts.annotated.sharded and len({split.target.index for split in parts.splits}) > 1
                if several and self._compute_at_once():
                    builder, parts = self._partition(annotated, allowed)
                program = builder.compile(parts, outputs, candidates=self._earlier(form, tensors))
            if TRACE.listening:
                TRACE.emit("build", repr(program), start, perf_counter_ns(), nodes=len(program.partition.graph.nodes))
            registry.program_built(program)
            self._programs[key] = program
            self._programs.move_to_end(key)
            self._built += 1
            while len(self._programs) > PROGRAMS_KEPT:
                self._programs.popitem(last=False)
            for arena in self._arenas:
                arena.reclaim()
            return program

    def _partition(self, annotated: AnnotatedGraph, allowed: Allowed) -> tuple[Builder, Partition]:
        """The graph placed and divided into splits, and the builder that compiles it: the one with the
        host where nodes read sources without elements, which no other device runs."""
        try:
            return self._builder, self._builder.partition(annotated, allowed)
        except UnsupportedOpError:
            if any(target.device.kind is Kind.HOST for target in self._targets) or not reads_nothing(annotated.graph):
                raise
        builder = self._builder_with_host
        return builder, builder.partition(annotated, allowed)

    def _earlier(self, form: Any, tensors: tuple[Tensor, ...]) -> Iterator[Program]:
        """The latest programs with outputs of the same operations, perhaps in other sizes."""
        ops = [tensor.op for tensor in tensors]
        for (known_form, known, *_), program in reversed([*self._programs.items()]):
            if known_form == form and program.is_current and [tensor.op for tensor in known] == ops:
                yield program

    def _compute_at_once(self) -> bool:
        """Give each synchronous device a thread, so that the parts of weights in shards are computed at once. Returns
        whether there is a new stream."""
        before = list(self._targets)
        if len(before) == 1:
            return False
        shared = self._options["threads"] or equal_part(sum(target.device.threaded for target in before))
        for index, target in enumerate(before):
            target = target.at_once(**({"threads": shared} if target.device.threaded else {}))
            self._targets[index] = self._executor.targets[index] = target
        return self._targets != before

    def rebuild(self, program: Program) -> Program:
        """The same program on the streams of this scheduler, which has the same devices in the same order: each node
        on its device, whatever placement would choose here. For tools that measure programs on streams of their own.

        Raises:
            AllocationError: a device has no room for it a second time.
        """
        with self._executor.lock:
            whole = len(program.partition.assignment.targets) == len(self._targets)
            return (self._builder if whole else self._builder_with_host).rebuild(program)

    def partition(self, outputs: Outputs, pins: Pins = None, *, precision: Precisions = None) -> PlannedGraph:
        """Place nodes and divide the graph into splits without allocating memory (but for weights that are rounded);
        leaves need no bytes. Arguments and errors as of `build`."""
        with self._executor.lock:
            self._executor.check_open()
            tensors, _ = checked_outputs(outputs)
            allowed = self._allowed if precision is None else checked_precision(precision)
            pinned = {**self._pins, **checked_pins(self._targets, pins or {})}
            return PlannedGraph(self._partition(AnnotatedGraph(Graph(tensors), pinned), allowed)[1], self.n_slots)

    def reserve(self, *outputs: Outputs, sizes: Mapping[Where, int] | None = None) -> dict[str, int]:
        """Take memory for the largest graphs that will come, so that later builds allocate nothing. Kept until `reset`.

        Args:
            sizes: device or its name -> bytes, where they are known (`PlannedGraph.memory`) and nothing is to be built.

        Returns:
            Bytes allocated for temporaries by device.

        Raises:
            AllocationError: a device has no room.
            SchedulerError: a size for a device that this scheduler does not have.
        """
        with self._executor.lock:
            self._executor.check_open()
            for where, size in (sizes or {}).items():
                self._reserved.append(self._arenas[find_target(self._targets, where).index].reserve(size))
        for output in outputs:
            self._reserved.extend(lease.again() for lease in self.build(output).internals.leases)
        return {target.name: arena.nbytes for target, arena in zip(self._targets, self._arenas, strict=False)}

    @cached_property
    def _builder(self) -> Builder:
        from opweave.scheduler.builder import Builder  # importing opweave must not pay for it

        forget = partial(_forget, self._programs)
        return Builder(
            self._targets, list(self._arenas), self._executor, self._strategy, self._options["op_offload"],
            self.parallel, self.n_slots, self._options["memory_limit"], forget,
        )  # fmt: skip

    @cached_property
    def _builder_with_host(self) -> Builder:
        """The builder with a target more, for nodes that read sources without elements."""
        stream = HostForEmpty().open(worker=self.parallel)
        plain, host = self._builder, Target(len(self._targets), stream, None, owned=True)
        if not self.parallel:
            stream.submission = self._executor.ownership
        self._executor.targets.append(host)
        self._arenas.append(Arena(host))
        return replace(plain, targets=self._executor.targets, arenas=self._arenas)

    def find(self, where: Where) -> Device:
        """The device of this scheduler that is meant; raises `SchedulerError` if there is none."""
        return find_target(self._targets, where).device

    def supports(self, device: Where, tensor: Tensor) -> bool:
        """Whether a device of this scheduler runs a node; raises `SchedulerError` as `find`."""
        from opweave.scheduler.place.capabilities import Capabilities  # importing opweave must not pay for it

        return Capabilities(self._targets, (), (tensor,)).supports(find_target(self._targets, device), tensor)

    # --- runs -------------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """What was built, run, allocated and copied so far."""
        executor, allocated = self._executor, sum(arena.allocated for arena in self._arenas)
        return Stats(self._built, self._reused, executor.begun, executor.copied, allocated)

    def synchronize(self) -> None:
        """Wait until all submitted runs have ended and all streams are done.

        Runs that failed raise from their futures and not here.
        """
        self._executor.synchronize()

    def cancel(self) -> None:
        """End all runs that have begun or were submitted, on all devices, from any thread: they raise `Cancelled`.

        Futures are done when this returns, also where a device cannot end its work early. That work goes on, and its
        results are dropped; later runs, and writing a state that it writes, wait for it. A thread in `Program.run` is
        told after the present step of its device. States that the runs write may be half written: they refuse to be
        read until they are written anew. A run that has ended keeps its result, one that is submitted later is not
        concerned. ``future.cancel()`` ends a single run.
        """
        self._executor.cancel()

    # --- end --------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Close all programs, lift pins, free memory; it can be used again. Raises `SchedulerError` within a run."""
        self._executor.check_closer()
        self._executor.when_idle(self._end_all)

    def _end_all(self) -> None:
        for state in self._executor.states:  # of programs too that are no longer remembered
            self._executor.end(state)
        self._programs.clear()
        self._pins.clear()
        self._reserved.clear()
        for arena in self._arenas:
            arena.free()

    def without(self, device: Where) -> Scheduler:
        """A scheduler over the other devices, for going on when one is lost. This one is closed.

        Leaves are withdrawn from the device: of weights the host arrays that they were made of remain, which new
        programs upload where they read them. States keep their values where the device can still be read; if
        not, they refuse reads until they are written anew. Graphs stay as they are: build their outputs again.

        Args:
            device: one of this scheduler, e.g. ``error.device`` of an `ExecutionError`.

        Raises:
            SchedulerError: not a device of this scheduler, or the only one; weights whose only copy is lost; called as
                `close` may not be.
        """
        self._executor.check_closer(whole=True)
        lost = find_target(self._targets, device)
        rest = [target for target in self._targets if target is not lost]
        if not rest:
            raise SchedulerError(f"{lost.name} is the only device of {self!r}")
        self._executor.when_idle(partial(self._withdraw_leaves, lost.device))
        with suppress(Exception):  # a lost device may refuse to be closed in order; nothing is left to save on it
            self.close()
        kept = {
            option: {k: v for k, v in value.items() if (k if isinstance(k, str) else k.name) != lost.name}
            for option in ("buffer_types", "repack") if isinstance(value := self._options[option], Mapping)
        }  # fmt: skip
        return Scheduler([target.given for target in rest], **{**self._options, **kept})

    def add(self, device: Where, *, first: bool = False) -> Scheduler:
        """A scheduler over one device more, for going on when one has come back. This one is closed.

        Leaves stay where they lie, graphs as they are: build their outputs again.

        Args:
            device: a device, a stream or a name that this scheduler does not have.
            first: preferred to the others; if not, the others are preferred to it.

        Raises:
            SchedulerError: a device of this scheduler; called as `close` may not be.
            UnknownNameError, PluginError: a name that is no device, or a device of a plugin that failed.
        """
        self._executor.check_closer(whole=True)
        checked_options([*self.devices, device], False, None, self.placement)
        self.close()
        here = [target.given for target in self._targets]
        return Scheduler([device, *here] if first else [*here, device], **self._options)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the caller has said where a tensor is computed."""
        return tensor in self._pins

    def alike(self, placement: str) -> Scheduler:
        """A scheduler over the same devices and streams, with the same options and pins, but its own placement."""
        made = Scheduler([target.given for target in self._targets], **{**self._options, "placement": placement})
        for tensor, at in self._pins.items():
            made.pin(tensor, self._targets[at].device)
        return made

    def _withdraw_leaves(self, device: Device) -> None:
        graphs = [state.partition for state in self._executor.states]
        for parts in graphs:
            if parts.annotated.sharded:
                from opweave.sharding.placing import keep_values  # weights of most programs are whole

                keep_values(parts.annotated.sharded, device)
        leaves = {t: None for parts in graphs for t in parts.leaves}
        for tensor in leaves:
            withdraw(tensor, device)

    def close(self) -> None:
        """Close programs and the streams that it opened, and free its memory, after submitted runs have ended.

        Closing twice does nothing.

        Raises:
            SchedulerError: called from within a run, or from a callback of one of its futures.
        """
        if self._executor.inherited:
            return
        self._executor.check_closer(whole=True)
        self._executor.close()
        with self._executor.lock:
            try:
                self.reset()
            finally:
                close_targets(self._executor.targets)

    def after_fork(self) -> None:
        if not all(target.device.survives_fork for target in self._targets):
            keep_forever([*self._programs.values(), *self._arenas])  # with objects of the driver in them

    def describe_pending(self) -> str:
        return self._executor.step_under_way()


def _forget(programs: dict[Any, Program], program: Program) -> None:
    """Remove a program that is closed from a scheduler's cache."""
    for key, known in list(programs.items()):
        if known is program:
            del programs[key]
