"""`compile`: turns a Python function over tensors, or output tensors, into a `Function` that is called with arrays."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, NoReturn, Protocol, TypedDict, Unpack, overload

import numpy as np

from opweave import registry
from opweave.errors import SchedulerError, ShapeError, not_pickled
from opweave.graph.arrays import host_array
from opweave.graph.dtypes import as_dtype, f32
from opweave.graph.foreign import detached, dlpack_device, host_view, is_foreign, is_on_host
from opweave.graph.graph import Graph
from opweave.graph.layout import check_shape
from opweave.graph.leaf import Spec
from opweave.graph.tensor import Tensor, constant, input
from opweave.progress import shown
from opweave.runtime.host.operands import Adopted
from opweave.scheduler import Program, Scheduler
from opweave.scheduler.place.arguments import Outputs
from opweave.scheduler.place.precision import checked_precision
from opweave.scheduler.place.target import Where
from opweave.scheduler.program import Array, R_co
from opweave.warning import warn_of_f64

if TYPE_CHECKING:
    from opweave.graph.precision import Precision
    from opweave.scheduler import Explanation

__all__ = ["Function", "compile"]

TRACES_KEPT: Final = 64
"""A function keeps at most this many programs; beyond that it drops the least recently called one."""


class Function(Generic[R_co]):
    """A compiled function. Made by `compile`. Called with arrays it returns arrays.

    The first call with new shapes and dtypes traces the Python function and builds a program. All programs share the
    memory of the scheduler.

    Attributes:
        scheduler: the scheduler that builds and runs the programs.
    """

    def __init__(
        self,
        target: Callable[..., Any] | Outputs,
        devices: Where | Sequence[Where] | Scheduler | None,
        max_shapes: Mapping[str, Sequence[int]] | None,
        precision: Precision | Mapping[str, Precision] | None = None,
        on_device: bool = False,
    ) -> None:
        if not isinstance(max_shapes, (Mapping, type(None))):
            raise SchedulerError(f"max_shapes are a mapping of parameters to shapes, not {max_shapes!r:.60}")
        self._precision: Final = precision
        self._on_device: Final = bool(on_device)
        if precision is not None:
            checked_precision(precision)
        self._target: Final = target
        self.scheduler: Final = (
            devices
            if isinstance(devices, Scheduler)
            else Scheduler(list(registry.default_devices()) if devices is None else devices)
        )
        self._max_shapes: Final = {k: check_shape(v, f32) for k, v in (max_shapes or {}).items()}
        self._reserved: Program | None = None  # the program for `max_shapes`, which keeps its memory allocated
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._latest: Program | None = None  # the latest that was called, which is last in `_programs`
        self._signature: Any = None
        if callable(target):
            self._signature = inspect.signature(target)
            self.__doc__ = target.__doc__
            self.__wrapped__ = target
            unknown = set(self._max_shapes) - set(self._signature.parameters)
            self.__name__ = getattr(target, "__name__", "function")
        else:
            tensors = tuple(target.values()) if isinstance(target, Mapping) else target
            leaves = Graph(tensors).leaves
            self._inputs = [t.key for t in leaves if t.leaf is not None and t.leaf.kind == "input"]
            unknown = set(self._max_shapes)
            self.__name__ = "outputs"
        if unknown:
            raise SchedulerError(f"max_shapes names {', '.join(sorted(unknown))}, which are not parameters to trace")

    def __repr__(self) -> str:
        return f"<Function {self.__name__} on {', '.join(d.name for d in self.scheduler.devices)}>"

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self)

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        """Run with arrays and return arrays, in the form in which the function returns tensors.

        Lists and NumPy scalars are converted to arrays, arrays of other libraries are used by DLPack, where they lie
        in host memory or in that of a device of the scheduler. Other arguments are passed to the Python function when
        it is traced, and must be hashable.

        Raises:
            SchedulerError: arguments that cannot be hashed, or too many arrays.
            ShapeError, DTypeError: an array that does not fit its input, or lies in the memory of another device.
            UnsupportedOpError: made with ``on_device``, and a device exports no arrays of its memory.
            ExecutionError: the run failed.
        """
        program, feeds = self.prepare(args, kwargs)
        return program.run(feeds, on_device=self._on_device)

    def program(self, *args: Any, **kwargs: Any) -> Program[R_co]:
        """The program that a call with these arguments runs; builds it if necessary."""
        return self.prepare(args, kwargs)[0]

    def warm(self, shapes: Iterable[Sequence[Any] | Mapping[str, Any]]) -> None:
        """Build the programs of calls to come, and have devices compile for them (`Program.warm`), with a bar of
        progress, so that none of these calls waits for one::

            step.warm([(ow.Spec((n, 1), "i64"), 64) for n in (1, 2, 4)])

        Args:
            shapes: the arguments of each call, in a sequence or by name. A `Spec` stands for an array of its shape and
                dtype.

        Raises:
            SchedulerError: more than are kept, which is 64 programs; otherwise as a call.
        """
        calls = list(shapes)
        if len(calls) > TRACES_KEPT:
            raise SchedulerError(f"{self!r} keeps {TRACES_KEPT} programs; it cannot be warmed for {len(calls)} calls")
        programs = []
        for given in shown(calls, "building"):
            if isinstance(given, Mapping):
                programs.append(self.program(**{name: _stand_in(value) for name, value in given.items()}))
            else:
                programs.append(self.program(*map(_stand_in, given)))
        for program in programs:
            program.warm()

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """`Program.explain` of the program that a call with these arguments runs."""
        return self.program(*args, **kwargs).explain()

    def close(self) -> None:
        """Close the scheduler and all its programs; the function can no longer be called."""
        self._programs.clear()
        self._latest = None
        self.scheduler.close()

    # --- preparing --------------------------------------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Program[R_co], dict[str, Any]]:
        """The program that a call with these arguments runs, built if necessary, and what it is fed."""
        if self._signature is None:
            return self._prepare_outputs(args, kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arrays: dict[str, Any] = {}
        key = []
        for name, value in bound.arguments.items():
            array = self._as_array(value)
            if array is None:
                key.append((name, value))
            else:
                arrays[name] = array
                key.append((name, (array.shape, array.dtype)))
        if self._max_shapes and (self._reserved is None or self._reserved.closed):
            self._reserve(bound, arrays)
        signature = tuple(key)
        try:
            program = self._programs.get(signature)
        except TypeError:
            raise SchedulerError(f"{self!r}: arguments that are not arrays must be hashable") from None
        if program is None or not program.is_current:
            shapes = {name: (a.shape, a.dtype) for name, a in arrays.items()}
            program = self._programs[signature] = self._trace(bound, shapes)
        if program is not self._latest:
            self._latest = program
            self._programs.move_to_end(signature)
            while len(self._programs) > TRACES_KEPT:
                self._programs.popitem(last=False)
        return program, {n: a.adopted if type(a := arrays[n]) is DeviceArray else a for n in program.inputs}

    def _prepare_outputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Program[R_co], dict[str, Any]]:
        if len(args) > len(self._inputs):
            names = ", ".join(self._inputs)
            raise SchedulerError(f"{self!r} takes {len(self._inputs)} arrays ({names}), not {len(args)}")
        program = self._programs.get(None)
        if program is None or not program.is_current:
            program = self._programs[None] = self._build(self._target)  # type: ignore[arg-type]
        return program, {**dict(zip(self._inputs, args, strict=False)), **kwargs}

    def _trace(self, bound: Any, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> Program:
        arguments = dict(bound.arguments)
        for name, (_, dtype) in shapes.items():
            if dtype == np.float64:
                warn_of_f64(f"the array for {name!r} of {self!r}")
        for name, (shape, dtype) in shapes.items():
            arguments[name] = input(name, shape, as_dtype(dtype))
        traced = type(bound)(self._signature, arguments)
        result = self._target(*traced.args, **traced.kwargs)  # type: ignore[operator]
        return self._build(_outputs(result, self))

    def _build(self, outputs: Outputs) -> Program:
        return self.scheduler.build(outputs, precision=self._precision)

    def _as_array(self, value: Any) -> Any:
        """The array for an argument, or ``None`` if it is none: arrays of any library, lists and NumPy scalars have
        one."""
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, (list, np.generic)):
            return host_array(value, copy=False)
        if not is_foreign(value):
            return None
        value = detached(value)
        where = dlpack_device(value)
        for device in () if is_on_host(where) else self.scheduler.devices:
            if device.dlpack_device == where:
                buffer, dtype, shape = device.import_dlpack(value)
                return DeviceArray(Adopted(buffer), shape, dtype.numpy)
        return host_view(value)

    def _reserve(self, bound: Any, arrays: Mapping[str, Any]) -> None:
        """Build a program for the largest shapes, so that later programs fit into the memory allocated for it."""
        shapes = {}
        for name, array in arrays.items():
            most = self._max_shapes.get(name, array.shape)
            if len(most) != array.ndim:
                raise ShapeError(f"max_shapes[{name!r}] has {len(most)} axes, the array {array.ndim}")
            shapes[name] = (most, array.dtype)
        self._reserved = self._trace(bound, shapes)


def _stand_in(value: Any) -> Any:
    """An array that takes no memory, for a `Spec`; anything else as it is."""
    if not isinstance(value, Spec):
        return value
    dtype = as_dtype(value.dtype)
    return np.broadcast_to(np.zeros((), dtype.numpy), check_shape(value.shape, dtype))


class DeviceArray(NamedTuple):
    """An array of another library in a device's memory, imported to be fed, with what a trace needs to know of it."""

    adopted: Adopted
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _outputs(result: Any, function: Function) -> Outputs:
    def check(value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, (int, float, np.ndarray, np.generic)) and not is_foreign(value):
            raise SchedulerError(f"{function!r} must return tensors, not {type(value).__name__}")
        return constant(value)

    if isinstance(result, Mapping):
        return {str(k): check(v) for k, v in result.items()}
    if isinstance(result, (tuple, list)):
        return tuple(check(v) for v in result)
    return check(result)


class Options(TypedDict, total=False):
    """The arguments of `compile` behind its first one."""

    devices: Where | Sequence[Where] | Scheduler | None
    max_shapes: Mapping[str, Sequence[int]] | None
    precision: Precision | Mapping[str, Precision] | None
    on_device: bool


class Decorator(Protocol):
    """What `compile` returns where it is called without a function."""

    @overload
    def __call__(self, function: Callable[..., Tensor], /) -> Function[Array]: ...
    @overload
    def __call__(self, function: Callable[..., Mapping[str, Tensor]], /) -> Function[dict[str, Array]]: ...
    @overload
    def __call__(self, function: Callable[..., Sequence[Tensor]], /) -> Function[tuple[Array, ...]]: ...
    @overload
    def __call__(self, function: Callable[..., Any], /) -> Function: ...


@overload
def compile(target: Tensor | Callable[..., Tensor], **options: Unpack[Options]) -> Function[Array]: ...
@overload
def compile(
    target: Mapping[str, Tensor] | Callable[..., Mapping[str, Tensor]], **options: Unpack[Options]
) -> Function[dict[str, Array]]: ...
@overload
def compile(
    target: Sequence[Tensor] | Callable[..., Sequence[Tensor]], **options: Unpack[Options]
) -> Function[tuple[Array, ...]]: ...
@overload
def compile(target: Callable[..., Any] | Outputs, **options: Unpack[Options]) -> Function: ...
@overload
def compile(**options: Unpack[Options]) -> Decorator: ...
def compile(
    target: Any = None,
    *,
    devices: Where | Sequence[Where] | Scheduler | None = None,
    max_shapes: Mapping[str, Sequence[int]] | None = None,
    precision: Precision | Mapping[str, Precision] | None = None,
    on_device: bool = False,
) -> Any:
    """Make a function over tensors, or output tensors, callable with arrays. Also a decorator.

    Args:
        target: a function that takes tensors and returns a tensor, a tuple or a dict of them; or such outputs
            themselves; the result is then called with arrays in the order of their inputs, or by name.
        devices: the devices to use, earlier ones preferred; or a scheduler to share. ``None``: `default_devices`.
        max_shapes: parameter -> the largest shape to expect. Memory for it is allocated at the first call; calls with
            smaller shapes then allocate nothing.
        precision: how roughly products, attention and convolutions may be computed at most, ``"exact"``, ``"bf16"`` or
            ``"int8"``, or a mapping of patterns of node names to these, as of `Scheduler`; ``None``: as the scheduler
            says, ``"exact"`` if it is made here. `opweave_conformance.compare` measures the error.
        on_device: leave results in the memory of the devices that computed them, as ``Program.run(on_device=True)``:
            objects with ``__dlpack__``, for ``torch.from_dlpack(...)`` and the like, and to call the function with.

    A function is traced once for each combination of input shapes, dtypes and other arguments.

    Returns:
        A `Function`; without ``target`` a decorator that makes one.

    Raises:
        SchedulerError, UnknownNameError: devices, parameters or precisions that do not exist.
    """
    if target is None:
        return lambda function: Function(function, devices, max_shapes, precision, on_device)
    return Function(target, devices, max_shapes, precision, on_device)
