"""`load` and `Model`: an ONNX model over any mix of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import Any, Final

import numpy as np

import opweave as ow
from opweave.errors import DTypeError, SchedulerError, ShapeError, UnknownNameError, UnsupportedOpError
from opweave.graph.arrays import host_array
from opweave.graph.dtypes import DType
from opweave.scheduler.program import PlannedGraph
from opweave_onnx.background import Background
from opweave_onnx.buckets import Buckets
from opweave_onnx.graphs import Value
from opweave_onnx.reading import Source, read_model
from opweave_onnx.session import PlanningSession, Session, missing_operators, weights_of
from opweave_onnx.stages import Runner, Stage
from opweave_onnx.tensors import Array, dtype_of

__all__ = ["Model", "load"]


class Model:
    """A loaded model. Call it with its inputs, by the names of the file: ``model(input_ids=ids)``.

    Threads may share it as they may share programs. `close`, or the end of a ``with`` block, frees its programs and
    memory.

    Attributes:
        source: the content of the file: graph, functions, versions of operators.
        metadata: producer, description, and the other metadata of the file.
        weights: the initializers that are weights, by name.
        scheduler: builds the programs, over the devices.
        session: what the runners of the model share.
    """

    def __init__(
        self, source: Source, scheduler: ow.Scheduler, weights: ow.Weights, max_programs: int, buckets: Buckets, *,
        owned: bool,
    ) -> None:  # fmt: skip
        self.source: Final = source
        self.metadata: Final = source.metadata
        self.weights: Final = weights
        self.scheduler: Final = scheduler
        shared = source.where, scheduler, weights, source.graph.initializers, source.functions, source.arrays
        self.session: Final = Session(*shared, max_programs)
        self._planning: Final = PlanningSession(*shared, 1)
        self._owned: Final = owned
        self._buckets: Final = buckets
        self._runner: Final = Runner(self.session, source.graph)
        self._inputs: Final = {value.name: value for value in source.graph.inputs}
        self._defaults: Final = {value.name: value for value in self.overridable_initializers}
        self._dtypes: Final[dict[int, DType]] = {}  # of numbers of element types, as far as they were asked for
        self._lock: Final = Lock()
        self._background: Background | None = None
        axes = {axis for value in source.graph.inputs for axis in value.shape or () if not isinstance(axis, int)}
        if buckets.lengths and axes == set(buckets.lengths):
            self._build_buckets(self.examples())

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self.scheduler.devices)
        return f"<Model {self.source.where}: {len(self.source.graph.nodes)} nodes over {devices}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs: name, element type and shape, in which a dynamic axis has its name or ``None`` as its length."""
        return self.source.graph.inputs

    @property
    def overridable_initializers(self) -> tuple[Value, ...]:
        """The initializers that are inputs too, which may be fed: a run that does not feed one uses its value in the
        file. There are none before version 4 of the format, which declares constants as inputs."""
        return self.source.graph.defaults

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs as the file declares them."""
        return self.source.graph.outputs

    def __call__(self, **feeds: Any) -> Any:
        """Run once: the output if there is one, else a dict. Arguments and errors as of `run`."""
        results = self.run(feeds)
        return next(iter(results.values())) if len(results) == 1 else results

    def run(self, feeds: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run once.

        Args:
            feeds: name of an input -> array of its type and shape; a list of arrays for a sequence. Those of
                `overridable_initializers` may be left out.

        Returns:
            Name of each output -> array, or list of arrays.

        Raises:
            UnknownNameError: an input that the model does not have.
            SchedulerError: an input is missing.
            ShapeError, DTypeError: feeds that do not fit.
            UnsupportedOpError: a node that opweave cannot express, or that no device runs.
            FormatError: a node that is not valid.
            ExecutionError: a node failed.
            OpweaveError: building a program for a bucket in the background failed; the first run after that raises the
                error.
        """
        given = self._checked(feeds or {})
        if not self._buckets.lengths:
            return self._runner.run(given)
        lengths = self._lengths(given)
        padded = self._buckets.pad(given, self.inputs, self._bucket(given, lengths))
        return self._buckets.cut(self._runner.run(padded), self.outputs, lengths)

    def _bucket(self, given: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, int]:
        """The lengths to pad to: the smallest possible ones; while their program is not built, larger ones whose
        program is."""
        if self._background is None:
            self._build_buckets(given)
        background = self._background
        assert background is not None
        background.check()
        best = self._buckets.next(lengths)
        if background.ended.is_set():
            return best
        known = (c for c in self._buckets.combinations(lengths) if self._runner.knows(self._shaped(given, c)))
        return next(known, best)

    def _shaped(self, given: Mapping[str, Any], chosen: Mapping[str, int]) -> dict[str, Any]:
        return self._buckets.shaped(given, self.inputs, chosen)

    def _build_buckets(self, given: Mapping[str, Any]) -> None:
        """Begin to build the programs for all buckets in the background; axes without buckets have the lengths of these
        feeds."""
        with self._lock:
            if self._background is None:
                jobs = [partial(self._runner.root, self._shaped(given, c)) for c in self._buckets.combinations()]
                self._background = Background(jobs)

    def prepare(self, **lengths: int) -> float:
        """Build the programs for all buckets now; returns the seconds it took.

        Args:
            lengths: name of a dynamic axis without buckets -> its length; 1 for others.
        """
        start = perf_counter()
        for chosen in self._buckets.combinations():
            self._runner.root(self.examples(**{**lengths, **chosen}))
        return perf_counter() - start

    def _lengths(self, feeds: Mapping[str, Any]) -> dict[str, int]:
        """Name of a dynamic axis -> its length in the feeds."""
        return {
            str(axis): n
            for value in self.inputs
            if value.shape is not None
            for axis, n in zip(value.shape, feeds[value.name].shape, strict=True)
            if isinstance(axis, str)
        }

    def program(self, feeds: Mapping[str, Any] | None = None) -> ow.Program[dict[str, Array]]:
        """The program for feeds of these shapes; the first one, if the host has to read values between programs.

        Args:
            feeds: as of `run`; only shapes matter. Without them dynamic axes have length 1.

        Raises:
            SchedulerError: all results are known without computing.
        """
        stage: Stage | None = self._runner.root(self._checked(feeds) if feeds is not None else self.examples())
        if stage is None or stage.program is None:
            raise SchedulerError(f"{self.source.where}: the host knows the results, no device computes")
        return stage.program

    def plan(self, feeds: Mapping[str, Any] | None = None) -> PlannedGraph:
        """The graph of `program`, assigned to devices and partitioned, without memory; weights are not read.

        Raises:
            SchedulerError: all results are known without computing.
        """
        given = self._checked(feeds) if feeds is not None else self.examples()
        stage: Stage = Runner(self._planning, self.source.graph).root(given)
        planned: Any = stage.program
        if planned is None:
            raise SchedulerError(f"{self.source.where}: the host knows the results, no device computes")
        return planned  # type: ignore[no-any-return]

    def explain(self, feeds: Mapping[str, Any] | None = None) -> Any:
        """Which node runs where and why, what is copied, and how much memory it takes: `Program.explain` of
        `program`."""
        return self.program(feeds).explain()

    def examples(self, **lengths: int) -> dict[str, Array]:
        """Zeros of the shapes of the inputs.

        Args:
            lengths: name of a dynamic axis -> its length; 1 for others.
        """
        feeds = {}
        for value in self.inputs:
            shape = [n if isinstance(n, int) else lengths.get(str(n), 1) for n in value.shape or ()]
            feeds[value.name] = np.zeros(shape, dtype_of(value.elem, f"input {value.name!r}").numpy)
        return feeds

    @property
    def traced(self) -> tuple[int, float]:
        """How often the graph was traced (at least once for each combination of shapes), and the seconds it took."""
        return self._runner.traced

    def close(self) -> None:
        """Close all programs, and the scheduler if `load` made it. A program for a bucket that is being built in the
        background is waited for; the others are not built any more."""
        if self._background is not None:
            self._background.close()
        self._runner.close()
        self.session.close()
        if self._owned:
            self.scheduler.close()

    def _checked(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        known = self._inputs
        for name in feeds:
            if name not in known:
                if name not in self._defaults:
                    raise UnknownNameError("input", str(name), {*known, *self._defaults}, f"(of {self.source.where})")
                known = {**known, name: self._defaults[name]}
        lengths: dict[str, int] = {}
        return {name: self._fit(value, feeds, lengths) for name, value in known.items()}

    def _what(self, value: Value) -> str:
        return f"{self.source.where}: input {value.name!r}"

    def _fit(self, value: Value, feeds: Mapping[str, Any], lengths: dict[str, int]) -> Any:
        if value.name not in feeds:
            if not value.elem:
                return None  # an optional one
            raise SchedulerError(
                f"{self._what(value)} is missing; the inputs are {', '.join(v.name for v in self.inputs)}"
            )
        given = feeds[value.name]
        if not value.elem:
            if isinstance(given, (list, tuple)):
                return [host_array(v, copy=False) for v in given]
            return None if given is None else host_array(given, copy=False)
        dtype = self._dtypes.get(value.elem)
        if dtype is None:
            dtype = self._dtypes[value.elem] = dtype_of(value.elem, self._what(value))
        is_array = isinstance(given, np.ndarray)
        if is_array and given.dtype != dtype.numpy:
            raise DTypeError(f"{self._what(value)} is {dtype}, not {given.dtype}; convert it with astype(...)")
        array = given if is_array and given.flags.c_contiguous else host_array(given, dtype, copy=False)
        if value.shape is not None:
            fits = len(value.shape) == array.ndim
            for want, n in zip(value.shape, array.shape, strict=False):
                fits = fits and (want is None or n == (want if isinstance(want, int) else lengths.setdefault(want, n)))
            if not fits:
                shown = ", ".join("?" if n is None else str(n) for n in value.shape)
                raise ShapeError(f"{self._what(value)} has the shape ({shown}), not {array.shape}"
                                 + (f", with {lengths}" if lengths else ""))  # fmt: skip
        return array


def load(
    source: Any,
    devices: Any = None,
    *,
    placement: str = "priority",
    weights: Any = None,
    precision: Any = "exact",
    max_programs: int = 64,
    buckets: Mapping[str, Sequence[int]] | None = None,
) -> Model:
    """Load an ONNX model.

    Args:
        source: a path, the bytes of a file, or an ``onnx.ModelProto``. External data lies in the folder of the file,
            and is mapped, not read.
        devices: devices, streams or names, earlier ones preferred; ``None``: all that `opweave.default_devices` gives.
            Or a scheduler to share, which decides placement and precision itself.
        placement: as of `opweave.Scheduler`: by priority of the devices, by predicted cost, or by a plugin's strategy.
        weights: where initializers lie: as ``device`` of `opweave.weights`, a device or a mapping of patterns of their
            names to devices. ``None``: they are brought to the devices that use them.
        precision: as of `opweave.Scheduler`.
        max_programs: for how many combinations of input shapes programs are kept.
        buckets: name of a dynamic axis -> lengths. Inputs are padded with zeros along it to the next of these lengths,
            and outputs cut, so that few programs serve all lengths. That is right where padding changes nothing: where
            the model has a mask for it, or computes each index along the axis by itself. Longer inputs are run as they
            are. Programs are built in the background: at once if all dynamic axes have buckets, else from the first run
            on, for the lengths of its other axes. Until then inputs may be padded to larger buckets that are ready.

    Raises:
        FormatError: no ONNX file, damaged, or not valid; the message names the node or the tensor.
        DTypeError: tensors of types that opweave does not have.
        UnsupportedOpError: operators that are not known; the message lists all of them.
        ShapeError: buckets that are no positive integers, or have more combinations than ``max_programs``; an output
            whose axes the file does not declare, with buckets.
        SchedulerError, UnknownNameError, PluginError: devices, placements or axes of buckets that do not exist.
    """
    checked = read_model(source)
    missing = missing_operators(checked.graph, checked.functions)
    if missing:
        listed = [f"{f'{domain}.' if domain else ''}{op} ({', '.join(n.name for n in nodes[:3])}"
                  f"{f' and {len(nodes) - 3} more' if len(nodes) > 3 else ''})"
                  for (domain, op), nodes in missing.items()]  # fmt: skip
        raise UnsupportedOpError(f"{checked.where} uses operators that are not known: {'; '.join(listed)}")
    padding = Buckets(buckets or {}, checked.graph, max_programs)
    group = ow.weights(weights_of(checked.graph.initializers), weights)
    if isinstance(devices, ow.Scheduler):
        return Model(checked, devices, group, max_programs, padding, owned=False)
    names: Sequence[Any] = list(ow.default_devices()) if devices is None else devices
    scheduler = ow.Scheduler(names, placement=placement, precision=precision)
    return Model(checked, scheduler, group, max_programs, padding, owned=True)
