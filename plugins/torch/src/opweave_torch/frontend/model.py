"""`import_program` and `Model`: an exported module over any mix of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import opweave as ow
from opweave.errors import DTypeError, SchedulerError, ShapeError, UnknownNameError
from opweave_torch.frontend.contents import COMPARED
from opweave_torch.frontend.runner import Runner
from opweave_torch.frontend.source import read_program
from opweave_torch.frontend.values import dtype_of, shape_and_dtype

if TYPE_CHECKING:
    from opweave.scheduler import Explanation, Program
    from opweave.scheduler.program import PlannedGraph

__all__ = ["Model", "import_program"]


class Model:
    """An imported module. Call it as the module: with the same arguments, it returns the same structure of tensors.

    Thread-safe as programs are. Close it, or use it in a ``with`` block, to give up its programs and memory.

    Attributes:
        scheduler: over the devices.
        runner: the graph, its weights and programs.
    """

    def __init__(self, program: ExportedProgram, runner: Runner, *, owned: bool) -> None:
        self.runner: Final = runner
        self.scheduler: Final = runner.scheduler
        self._owned: Final = owned
        self._examples: Final = program.example_inputs
        self._ranges: Final = program.range_constraints
        self._in: Final = program.call_spec.in_spec
        self._out: Final = program.call_spec.out_spec

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self.scheduler.devices)
        return f"<Model of {len(self.runner.source.graph.nodes)} nodes over {devices}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def weights(self) -> ow.Weights:
        """Parameters and buffers that do not change, and what was computed of them, by name."""
        return self.runner.weights

    @property
    def states(self) -> Mapping[str, ow.Tensor]:
        """Buffers that the module changes, by name; they keep their values from call to call."""
        return self.runner.states

    @property
    def traced(self) -> tuple[int, float]:
        """How often the graph was traced, once for each combination of shapes, and the seconds that took."""
        return self.runner.traced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once, with the arguments of the module: tensors, or arrays in their place.

        Returns:
            What the module returns, with tensors in the memory of the host.

        Raises:
            SchedulerError: arguments of another structure than the module was exported with.
            ShapeError, DTypeError: arguments that do not fit.
            UnsupportedOpError: a node that no device runs.
            ExecutionError: a node failed.
        """
        return self.run(args, kwargs)

    def run(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, on_device: bool = False) -> Any:
        """Run once, and return what a call returns.

        Args:
            args, kwargs: of the module.
            on_device: leave results in the memory of the devices that computed them, as tensors of torch.

        Raises:
            UnsupportedOpError: ``on_device``, and torch does not take arrays of such a device. Others as a call.
        """
        results = self.runner.run(self._flat(args, kwargs), on_device)
        return pytree.tree_unflatten(results, self._out)

    def program(self, *args: Any, **kwargs: Any) -> Program[dict[str, np.ndarray[Any, Any]]]:
        """The program for arguments of these shapes; without arguments for those of the export.

        Raises:
            SchedulerError: all results are known without computing. Others as a call.
        """
        found = self.runner.built(self._given(args, kwargs)).program
        if found is None:
            raise SchedulerError("all results of this module are known without computing; no device computes")
        return found  # type: ignore[no-any-return]

    def plan(self, *args: Any, **kwargs: Any) -> PlannedGraph:
        """As `program`, placed and cut, but without memory."""
        found = self.runner.planned(self._given(args, kwargs))
        if found is None:
            raise SchedulerError("all results of this module are known without computing; no device computes")
        return found  # type: ignore[no-any-return]

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Which node runs where and why, what is copied, and what memory it takes: `Program.explain` of `program`."""
        return self.program(*args, **kwargs).explain()

    def read(self, name: str) -> torch.Tensor:
        """The present values of a buffer that the module changes. Raises `UnknownNameError` for others."""
        return self.runner.read(self._state(name))

    def write(self, name: str, values: Any) -> None:
        """Set such a buffer, between runs. Raises `UnknownNameError`, `ShapeError`, `DTypeError`."""
        state = self.states[self._state(name)]
        shape, dtype = shape_and_dtype(values if hasattr(values, "shape") else np.asarray(values))
        if shape != state.shape:
            raise ShapeError(f"buffer {name!r} has shape {state.shape}, not {shape}")
        if dtype is not state.dtype:
            raise DTypeError(f"buffer {name!r} is {state.dtype}, not {dtype}")
        self.runner.write(name, values)

    def refresh(self) -> None:
        """Read the parameters of the module again: after writes to few elements of many, past opweave, that a call does
        not notice. Programs are built anew; buffers that the module changes keep their values."""
        self.runner.refresh()

    def close(self) -> None:
        """Give up all programs, and the scheduler with its streams if `import_program` made it."""
        self.runner.close()
        if self._owned:
            self.scheduler.close()

    # --- arguments --------------------------------------------------------------------------------------------------

    def _state(self, name: str) -> str:
        if name not in self.states:
            raise UnknownNameError("buffer that the module changes", str(name), self.states)
        return name

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if not args and not kwargs and self._examples is not None:
            args, kwargs = self._examples
        return self._flat(args, kwargs)

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
        named = dict(kwargs or {})
        order = self._in.child(1).context if self._in is not None else []
        if set(order) == set(named):
            named = {name: named[name] for name in order}
        flat, spec = pytree.tree_flatten((tuple(args), named))
        if self._in is not None and spec != self._in:
            count = self._in.child(0).num_children
            raise SchedulerError(
                f"the module was exported for {count} arguments and the keywords {list(order)}, with "
                f"{self._in.num_leaves} tensors and values in all; it is called with {len(args)} and the keywords "
                f"{list(named)}, with {spec.num_leaves}"
            )
        lengths: dict[Any, int] = {}
        return [self._fit(i, value, lengths) for i, value in enumerate(flat)]

    def _fit(self, position: int, value: Any, lengths: dict[Any, int]) -> Any:
        node = self.runner.source.fed[position]
        wanted = node.meta.get("val")
        what = f"argument {node.name!r}"
        if not isinstance(wanted, torch.Tensor):
            if isinstance(wanted, (bool, int, float, str, type(None))) and value != wanted:
                raise SchedulerError(f"{what} is {wanted!r} in the exported program, not {value!r}; export it again")
            return value
        if not wanted.is_complex() and (not hasattr(value, "shape") or not hasattr(value, "dtype")):
            value = np.asarray(value, dtype_of(wanted.dtype, what).numpy)
        if wanted.is_complex():
            value = torch.as_tensor(value)
            if value.dtype is not wanted.dtype:
                raise DTypeError(f"{what} is {wanted.dtype}, not {value.dtype}")
            shape = tuple(value.shape)
        else:
            shape, dtype = shape_and_dtype(value)
            if dtype is not dtype_of(wanted.dtype, what):
                raise DTypeError(f"{what} is {dtype_of(wanted.dtype, what)}, not {dtype}")
        fits = len(shape) == wanted.ndim
        for n, length in zip(shape, wanted.shape, strict=False):
            fits = fits and self._is_length(n, length, lengths)
        if not fits:
            shown = ", ".join([str(n) for n in wanted.shape])
            known = ", ".join([f"{symbol} = {n}" for symbol, n in lengths.items()])
            raise ShapeError(f"{what} has the shape ({shown}), not {shape}" + (f", where {known}" if known else ""))
        return value

    def _is_length(self, n: int, length: Any, lengths: dict[Any, int]) -> bool:
        if isinstance(length, int):
            return n == length
        expression = length.node.expr
        if expression.is_Symbol:
            bounds = self._ranges.get(expression)
            # A lower bound of 2 is torch's own, which knows lengths of 0 and 1 as special; it does not enforce it.
            within = bounds is None or ((bounds.lower <= 2 or bounds.lower <= n) and n <= bounds.upper)
            return bool(within) and lengths.setdefault(expression, n) == n
        found = expression.subs(lengths)
        return not found.is_number or int(found) == n


def import_program(
    program: ExportedProgram,
    devices: Any = None,
    *,
    placement: str = "priority",
    weights: Any = None,
    precision: Any = "exact",
    max_programs: int = 64,
    compared: int = COMPARED,
) -> Model:
    """A module of torch, exported by ``torch.export.export(module, args)``, over any mix of devices.

    Parameters stay in the memory of the module, where devices use it in place. Of those of which devices keep copies,
    and of those that something was computed of beforehand, each call notices whether they were written
    (`Model.refresh`). Buffers that the module changes become states, which begin with the buffers' values; the
    module's own stay as they are.

    Args:
        program: what ``torch.export.export`` returned. Dynamic dimensions stay dynamic: each combination of shapes gets
            a program when it first appears.
        devices: devices, streams or names, earlier ones preferred; ``None``: all that `opweave.default_devices` gives.
            Or a scheduler to share, which decides placement and precision itself.
        placement: as of `opweave.Scheduler`: by priority of the devices, by predicted cost, or by a plugin's strategy.
        weights: where parameters lie: as ``device`` of `opweave.weights`, a device or a mapping of patterns of their
            names to devices. ``None``: they are brought to the devices that use them.
        precision: as of `opweave.Scheduler`.
        max_programs: for how many combinations of shapes programs are kept.
        compared: bytes of parameters of which there are copies up to which each call compares all of them with what
            they were; of more, 64 Ki bytes evenly spread, which a warning says.

    Operators that opweave has no operation for are computed by torch on the host, as custom nodes.

    Raises:
        UnsupportedOpError: operators that cannot be expressed, all of them with their places in the module: where the
            shape of a result depends on values, or control flow does.
        DTypeError: no exported program, or tensors of types that opweave does not have.
        SchedulerError, UnknownNameError, PluginError: devices or placements that are not there.
    """
    if not isinstance(program, ExportedProgram):
        raise DTypeError(f"import_program takes what torch.export.export returns, not {type(program).__name__}")
    source = read_program(program)
    if isinstance(devices, ow.Scheduler):
        return Model(program, Runner(source, devices, weights, max_programs, compared), owned=False)
    names: Sequence[Any] = list(ow.default_devices()) if devices is None else devices
    scheduler = ow.Scheduler(names, placement=placement, precision=precision)
    try:
        return Model(program, Runner(source, scheduler, weights, max_programs, compared), owned=True)
    except BaseException:
        scheduler.close()
        raise
