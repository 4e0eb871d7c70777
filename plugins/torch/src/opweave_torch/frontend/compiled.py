"""``torch.compile(module, backend="opweave")``: graphs that torch captures, forward and backward, run by opweave.

torch finds `opweave` by the entry point ``opweave`` of its group ``torch_dynamo_backends``. Options are those of
`opweave_torch.import_program`: ``options={"devices": ["opencl:0", "cpu"], "placement": "cost"}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from threading import RLock
from typing import Any, Final
from warnings import catch_warnings, simplefilter
from weakref import WeakSet

import torch

import opweave as ow
from opweave.errors import SchedulerError, UnknownNameError
from opweave_torch.frontend.native import (
    by_autograd,
    called_with_a_list,
    core_decompositions,
    parameter_places,
    version_of,
)
from opweave_torch.frontend.operators import OPERATORS
from opweave_torch.frontend.runner import Runner
from opweave_torch.frontend.source import Source, check_operators

__all__ = ["opweave", "refresh"]

OPTIONS: Final = ("devices", "placement", "precision", "max_programs", "compared")


def opweave(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Compile a graph that torch captured. Called by torch.

    Without gradients, parameters stay where they are and are weights of opweave; when one of them was changed in the
    meantime, and devices have copies of it, programs are built anew. With gradients, forward and backward are
    graphs of opweave, and parameters are fed to both.

    Args:
        module: the graph.
        example_inputs: what it is called with.
        options: ``devices``, ``placement``, ``precision``, ``max_programs``, ``compared``, as of
            `opweave_torch.import_program`.

    Raises:
        UnknownNameError: an option that does not exist, or a device.
        UnsupportedOpError: operators that cannot be expressed, all of them with their places.
    """
    given = dict(options or {})
    for name in given:
        if name not in OPTIONS:
            raise UnknownNameError("option of the backend opweave", str(name), OPTIONS)
    devices = given.get("devices")
    if isinstance(devices, str) or not isinstance(devices, (Sequence, type(None), ow.Scheduler)):
        raise SchedulerError(f"devices is a list of devices or their names, or a scheduler, not {devices!r:.60}")
    limits: dict[str, int] = {name: given[name] for name in ("max_programs", "compared") if name in given}
    if isinstance(devices, ow.Scheduler):
        scheduler = devices
    else:
        names = None if devices is None else tuple(devices)
        scheduler = _scheduler(names, given.get("placement", "priority"), given.get("precision", "exact"))
    learning = partial(_compiled, scheduler=scheduler, limits=limits, fixed=False)
    inferring = partial(_compiled, scheduler=scheduler, limits=limits, fixed=True)
    compiler = by_autograd(
        fw_compiler=learning, bw_compiler=learning, inference_compiler=inferring, decompositions=_decompositions()
    )
    compiled: Callable[..., Any] = compiler(module, example_inputs)
    return compiled


@cache
def _scheduler(devices: tuple[Any, ...] | None, placement: Any, precision: Any) -> ow.Scheduler:
    """One for all graphs with the same options: they share memory for temporaries."""
    names: Sequence[Any] = list(ow.default_devices()) if devices is None else devices
    return ow.Scheduler(names, placement=placement, precision=precision)


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """How torch decomposes operators that opweave has no builder for."""
    with catch_warnings():
        simplefilter("ignore")
        table = core_decompositions()
    return {target: function for target, function in table.items() if target not in OPERATORS}


def _compiled(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], *, scheduler: ow.Scheduler, limits: Mapping[str, int],
    fixed: bool,
) -> Callable[..., Any]:  # fmt: skip
    fed = [node for node in module.graph.nodes if node.op == "placeholder"]
    results: Any = next(iter(reversed(module.graph.nodes))).args[0]
    outputs = results if isinstance(results, (list, tuple)) else [results]
    source = Source("the compiled module", module, {}, fed, outputs)
    check_operators(source)
    run = _Compiled(source, scheduler, limits, parameter_places() if fixed else ())
    _COMPILED.add(run)
    return called_with_a_list(run)


def refresh() -> None:
    """Let all modules that ``torch.compile`` compiled for opweave read their parameters again at the next call: after
    writes that torch does not count (``Tensor.data``, arrays of NumPy over the same memory) to few elements of many.
    Other writes are noticed without it."""
    for compiled in list(_COMPILED):
        compiled.refresh()


class _Compiled:
    """One graph, called with its arguments.

    Args:
        limits: ``max_programs`` and ``compared`` of `Runner`, where they are given.
        fixed: the places of arguments that are weights.
    """

    def __init__(
        self, source: Source, scheduler: ow.Scheduler, limits: Mapping[str, int], fixed: Sequence[int]
    ) -> None:
        self._source: Final = source
        self._scheduler: Final = scheduler
        self._limits: Final = limits
        self._fixed: Final = [i for i in fixed if isinstance(source.fed[i].meta.get("val"), torch.Tensor)]
        left = set(range(len(source.fed))) - set(self._fixed)
        self._free: Final = sorted(left)
        self._lock: Final = RLock()
        self._bound: tuple[Any, Runner] | None = None
        values = [n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in source.outputs]
        self._away: Final = any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in values)
        self._promised: Final = values

    def __call__(self, *args: Any) -> list[Any]:
        runner = self._runner(args)
        results = runner.run([_argument(args[i]) for i in self._free], on_device=self._away)
        return [_as_promised(result, value) for result, value in zip(results, self._promised, strict=True)]

    def refresh(self) -> None:
        """Read the parameters again at the next call."""
        with self._lock:
            self._bound = None

    def _runner(self, args: Sequence[Any]) -> Runner:
        """The runner with these parameters as weights: a new one, if they were changed since the last call."""
        state = tuple([(args[i].data_ptr(), version_of(args[i])) for i in self._fixed])
        bound = self._bound
        if bound is not None and bound[0] == state:
            return bound[1]
        with self._lock:
            if self._bound is not None:
                self._bound[1].close()
            fed = self._source.fed
            leaves = {fed[i].name: (fed[i].name, args[i].detach()) for i in self._fixed}
            source = Source(
                self._source.where, self._source.module, leaves, [fed[i] for i in self._free], self._source.outputs
            )
            self._bound = state, Runner(source, self._scheduler, None, **self._limits)
            return self._bound[1]


_COMPILED: Final[WeakSet[_Compiled]] = WeakSet()
"""Those that are still in use."""


def _argument(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _as_promised(result: Any, promised: Any) -> Any:
    """A result on the device and with the strides that torch expects; where it knows none, they stay as they are."""
    if not isinstance(result, torch.Tensor) or not isinstance(promised, torch.Tensor):
        return result
    if result.device != promised.device:
        result = result.to(promised.device)
    strides = promised.stride()
    if all(isinstance(s, int) for s in (*strides, *promised.shape)) and result.stride() != tuple(strides):
        laid = torch.empty_strided(tuple(result.shape), strides, dtype=result.dtype, device=result.device)
        return laid.copy_(result)
    return result
