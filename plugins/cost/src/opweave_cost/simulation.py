"""`simulate`: a simulated device, to plan, explain and predict with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from opweave import registry
from opweave.contract import Device, Kind, MemorySpace, Usage
from opweave.contract.kernels import KernelTable
from opweave.errors import SchedulerError, UnknownNameError, simulated_error
from opweave.graph.dtypes import as_dtype
from opweave.graph.opdef import OPS
from opweave_cost.cost_model import ANY, LARGEST, Curve, OpCost, Profile
from opweave_cost.store import profile

if TYPE_CHECKING:
    from opweave.contract import Step

__all__ = ["Link", "SimulatedDevice", "simulate"]

Link = float | tuple[float, float]
"""Bytes per second, or seconds of latency and bytes per second."""

HOST_LINK: Final = 16e9
"""Default bandwidth to the host in bytes per second: PCI Express 3.0 x16."""

LATENCY: Final = 10e-6
"""Default latency of a transfer in seconds, for links that are given as a bandwidth only."""


class SimulatedDevice(Device):
    """Made by `simulate`. It has no memory: `Scheduler.partition` takes it, running refuses it."""

    simulated = True

    kind = Kind.GPU

    def __init__(self, name: str, like: Device | None, ops: Iterable[str] | None, memory: int, made: Any) -> None:
        self.name = name
        self.like: Final = like
        self.space = MemorySpace(name)
        self.description = f"simulated, like {like.name}" if like is not None else "simulated"
        self._ops = None if ops is None else frozenset(ops)
        self._memory: Final = memory
        self._made: Final = made
        self.same_speed: Device | None = None  # the device whose measured steps are those of this one
        self._declared: Profile | None = None
        if like is not None:
            self.kind, self.alignment, self.max_buffer_size = like.kind, like.alignment, like.max_buffer_size
            self.kernels = like.kernels
        else:
            self.kernels = KernelTable()

    def declared(self) -> Profile:
        """The declared figures; those that were not declared are of the device ``like``, which is measured first."""
        if self._declared is None:
            self._declared = self._made()
        return self._declared

    def renamed(self, name: str, profile: Profile, memory: int | None = None) -> SimulatedDevice:
        """A copy of this device with another name and profile, and with ``memory`` bytes if given."""
        size = self._memory if memory is None else memory
        made = type(self)(name, self.like, self._ops, size, lambda: profile)
        made.same_speed = self.same_speed
        return made

    def mem_info(self) -> tuple[int, int]:
        return self._memory, self._memory

    def _why_not(self, step: Step) -> str | None:
        if self._ops is not None and step.op not in self._ops:
            return f"no kernel for {step.op}"
        return self.like.why_not(step) if self.like is not None else None

    def _inplace(self, step: Step) -> bool:
        return self.like.inplace(step) if self.like is not None else bool(OPS[step.op].inplace)

    def _workspace(self, step: Step) -> int:
        return self.like._workspace(step) if self.like is not None else 0

    def _alloc(self, size: int, usage: Usage) -> Any:
        raise simulated_error(self.name)


def simulate(
    name: str,
    like: Device | str | None = None,
    *,
    flops: float | Mapping[str, float] | None = None,
    bandwidth: float | None = None,
    launch: float | None = None,
    memory: int = 0,
    link: Link | Mapping[str, Link] | None = None,
    ops: Iterable[str] | None = None,
) -> Device:
    """A simulated device: ``Scheduler([...]).partition(outputs)`` plans with it, explains and predicts; nothing runs.

    A step is predicted to take ``launch + max(bytes / bandwidth, operations / flops)`` seconds. Figures that are not
    given are those measured on the device ``like``.

    Args:
        name: its name in the scheduler and in reports.
        like: a device, or its name, that supports the same operations.
        flops: floating-point operations per second, for all dtypes or by dtype (``{"f32": 2e13, "f16": 1e14}``; other
            dtypes as f32, or as the slowest one given).
        bandwidth: bytes per second of its memory.
        launch: seconds that the smallest step takes; without ``like`` 0.
        memory: bytes; 0: unlimited.
        link: to the host, without ``like`` by default PCI Express 3.0 x16: bytes per second (latency: 10 µs) or
            ``(seconds, bytes per second)``; or by device, others too: ``{"host": 16e9, "other": (2e-6, 5e10)}``.
        ops: the operations that it supports; default: those of ``like``, or all.

    Raises:
        SchedulerError: neither ``like`` nor both of ``flops`` and ``bandwidth``; a figure that is no number, or not
            positive (``launch`` and ``memory`` may be 0); no name, or a ``like`` that is no device.
        UnknownNameError: no such device, operation or dtype.
    """
    if not isinstance(name, str) or not name:
        raise SchedulerError(f"a simulated device needs a name, a non-empty text, not {name!r}")
    model = registry.device(like) if isinstance(like, str) else like
    if model is not None and not isinstance(model, Device):
        raise SchedulerError(f"simulate({name!r}): like is a device or its name, not {type(model).__name__}")
    if isinstance(ops, str):
        raise SchedulerError(f"simulate({name!r}): ops is a list of names, not {ops!r}")
    known = None if ops is None else list(ops)
    for op in known or ():
        if op not in OPS:
            raise UnknownNameError("operation", op, OPS)
    if isinstance(flops, Mapping) and not flops:
        raise SchedulerError(f"simulate({name!r}): flops names no dtype")
    if model is None and (flops is None or bandwidth is None):
        raise SchedulerError(f"simulate({name!r}) needs like=, or flops= and bandwidth=")
    rates = dict(flops) if isinstance(flops, Mapping) else {} if flops is None else {ANY: flops}
    for dtype in rates if isinstance(flops, Mapping) else ():
        as_dtype(dtype)
    _check_figures(
        name, {"bandwidth": bandwidth, **{f"flops of {k}": v for k, v in rates.items()}},
        {"launch": launch, "memory": memory},
    )  # fmt: skip
    links = {str(k): line(v) for k, v in link.items()} if isinstance(link, Mapping) else (
        {} if link is None else {"host": line(link)}
    )  # fmt: skip

    def make() -> Profile:
        return _declare(name, model, rates, bandwidth, launch, dict(links))

    made = SimulatedDevice(name, model, known, int(memory), make)
    if not rates and bandwidth is None and launch is None:
        made.same_speed = model
    return made


def _check_figures(name: str, positive: Mapping[str, Any], not_negative: Mapping[str, Any]) -> None:
    """Refuse figures, of which some may be 0, that are no such numbers; raises `SchedulerError`."""
    for what, figure in positive.items():
        if figure is not None and not (_is_number(figure) and figure > 0):
            raise SchedulerError(f"simulate({name!r}): {what} is {figure!r}; it is a positive number")
    for what, figure in not_negative.items():
        if figure is not None and not (_is_number(figure) and 0 <= figure <= LARGEST):
            raise SchedulerError(f"simulate({name!r}): {what} is {figure!r}; it is a number that is not negative")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def line(link: Link) -> Curve:
    """The curve of a link: seconds by bytes."""
    try:
        latency, rate = (LATENCY, link) if isinstance(link, (int, float, Real)) else link
        right = _is_number(latency) and _is_number(rate) and 0 <= latency <= LARGEST and rate > 0
    except (TypeError, ValueError):
        right = False
    if not right:
        raise SchedulerError(f"a link is bytes per second, or (seconds, bytes per second), not {link!r}")
    return Curve.line(latency, rate)


def _declare(
    name: str,
    like: Device | None,
    rates: dict[str, float],
    bandwidth: float | None,
    launch: float | None,
    links: dict[str, Curve],
) -> Profile:
    host = links.pop("host", None)
    complete = bool(rates) and None not in (bandwidth, launch, host)
    base = (
        profile(like) if like is not None and not complete else Profile(name, 0.0, line(HOST_LINK), line(HOST_LINK), {})
    )
    costs: Mapping[str, Mapping[str, OpCost]] = base.costs
    if like is None or rates or bandwidth is not None or launch is not None:
        start = launch if launch is not None else base.launch if like is not None else 0.0
        wide = bandwidth if bandwidth is not None else base.bandwidth
        if rates:
            slowest = rates.get(ANY, rates.get("f32", min(rates.values())))
        else:
            rates, slowest = {}, base.flops("f32")
        by_bytes = Curve.line(start, wide)
        costs = {ANY: {dtype: OpCost(by_bytes, Curve.line(start, rate) if rate < inf else None)
                       for dtype, rate in {**rates, ANY: slowest}.items()}}  # fmt: skip
    switch, again, ahead = (0.0,) * 3 if host or like is None else (base.switch, base.again, base.ahead)
    return Profile(name, switch, host or base.upload, host or base.download, costs, links, again=again, ahead=ahead)
