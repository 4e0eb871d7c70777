"""The predicted time of steps and transfers: `Curve`, `Profile`, and `CostModel` for the targets of a scheduler.

Seconds of a step are ``max(bytes curve, flops curve)`` of its operation and dtype. A curve goes through measured points
(measured profiles), or is the line ``launch + work / rate`` (declared ones), so that the maximum is ``launch +
max(bytes / bandwidth, flops / throughput)``: the roofline model of Williams, Waterman and Patterson (2009).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from opweave.graph.layout import is_dense, nbytes
from opweave.graph.opdef import OPS
from opweave.graph.work import work

if TYPE_CHECKING:
    from opweave.contract import Device, MemorySpace
    from opweave.graph.dtypes import DType
    from opweave.graph.layout import Shape
    from opweave.graph.precision import Precision
    from opweave.graph.tensor import Signature, Tensor
    from opweave.scheduler.place.support import Support
    from opweave.scheduler.place.target import Target

__all__ = ["ANY", "LARGEST", "CostModel", "Curve", "OpCost", "Profile", "measured_type"]

ANY: Final = "*"
"""The key of the entry for all operations, or dtypes, without an entry of their own."""


LARGEST: Final = 1e24
"""The largest valid figure of a profile, in seconds, bytes or operations."""

CONTENDED: Final = 0.3
"""Threads that waited for a processor on average, from which on a profile is doubtful. Threads of this process that
wait for each other make up to 0.1 themselves (`cpu` on two processors), a program beside them on each about 1."""


class Curve(NamedTuple):
    """Seconds by work (bytes or flops), linear between points; beyond the last point with the slope from the first to
    the last, which a single disturbed measurement hardly changes."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def line(cls, start: float, rate: float) -> Curve:
        """``start + work / rate`` seconds."""
        return cls(((0.0, start), (rate, start + 1.0)) if rate < inf else ((0.0, start),))

    def __call__(self, amount: float) -> float:
        x0, y0 = self.points[0]
        if amount <= x0:
            return y0
        for x1, y1 in self.points[1:]:
            if amount <= x1:
                return y0 + (amount - x0) * (y1 - y0) / (x1 - x0)
            x0, y0 = x1, y1
        return y0 + (amount - x0) / self.rate

    @property
    def rate(self) -> float:
        """Work per second, for large amounts of work."""
        (x0, y0), (x1, y1) = self.points[0], self.points[-1]
        return (x1 - x0) / (y1 - y0) if y1 > y0 else inf

    @property
    def best(self) -> float:
        """The most work per second that was measured. A single disturbed measurement hardly lowers it."""
        return max(self.rate, *(amount / seconds for amount, seconds in self.points if seconds), 0.0)


class OpCost(NamedTuple):
    """Seconds of an operation's steps by bytes read and written, for products also by floating-point operations."""

    by_bytes: Curve
    by_flops: Curve | None = None

    def seconds(self, size: float, flops: float) -> float:
        least = self.by_bytes(size)
        return least if self.by_flops is None else max(least, self.by_flops(flops))


def measured_type(dtype: str, precision: Precision) -> str:
    """The type under which a profile keeps the cost of steps of a dtype that are computed in a precision."""
    return dtype if precision == "exact" else f"{dtype} in {precision}"


class Profile(NamedTuple):
    """The measured or declared speed of a device; all times in seconds.

    Attributes:
        device: the device's name.
        switch: time to start a split on the device and to wait for its end, beyond the steps, when the device was idle
            while others worked.
        upload, download: time by bytes from and to the host; of uploads without waiting for their end, where runs take
            them along.
        costs: operation (`ANY`: all others) -> dtype (`ANY`: all others) -> cost of a step; of products that are
            computed less than exactly under `measured_type`.
        peers: name of another device, or of its group -> time by bytes of the direct link; without one, transfers go
            through the host.
        group: name of the group of identical devices that it belongs to, or ``""``.
        again: as ``switch``, when the device has just worked: in runs that follow one another on one device.
        ahead: by how much fetching a result is shorter than ``download``, as it comes with the end of its run, which is
            waited for anyway: a round trip to devices of other processes, 0 for those where results are read once the
            run has ended.
        contention: how many threads of this process waited for a processor on average while the device was measured,
            since others used it; 0 where the system does not say. From `CONTENDED` on the figures are doubtful.
    """

    device: str
    switch: float
    upload: Curve
    download: Curve
    costs: Mapping[str, Mapping[str, OpCost]]
    peers: Mapping[str, Curve] = MappingProxyType({})
    group: str = ""
    again: float = 0.0
    ahead: float = 0.0
    contention: float = 0.0

    @property
    def is_doubtful(self) -> bool:
        """Whether other programs used the processors while the device was measured."""
        return self.contention >= CONTENDED

    def link(self, other: Profile) -> Curve | None:
        """The direct link to another device, or ``None``."""
        here, there = self.peers, other.peers
        return (
            here.get(other.device) or there.get(self.device) or here.get(other.group) or there.get(self.group)
        )  # fmt: skip

    @property
    def launch(self) -> float:
        """Seconds of the smallest step."""
        return self._of("add", "f32").seconds(0, 0)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that large elementwise steps read and write."""
        return self._of("add", "f32").by_bytes.rate

    def flops(self, dtype: str) -> float:
        """Floating-point operations per second in large products."""
        curve = self._of("linear", dtype).by_flops
        return curve.rate if curve is not None else inf

    def peak_flops(self, dtype: str, precision: Precision = "exact") -> float:
        """The most floating-point operations per second in products that may be computed in a precision: of the type
        itself, or, as narrower ones may be computed with its values, of f32."""
        types = {measured_type(dtype, precision), dtype, dtype if dtype == "f64" else "f32"}
        curves = [self._of("linear", each).by_flops for each in types]
        return max(inf if curve is None else curve.best for curve in curves)

    @property
    def peak_bandwidth(self) -> tuple[float, float]:
        """The most bytes per second that additions read and write, and the bytes of the largest one measured: caches
        that hold less may be faster."""
        curve = self._of("add", "f32").by_bytes
        return curve.best, curve.points[-1][0]

    def step(self, op: str, dtype: str, size: float, flops: float, precision: Precision = "exact") -> float:
        """Seconds of a step that reads and writes ``size`` bytes and makes ``flops`` floating-point operations.

        For a dtype that was not measured for the operation, the time of f32 is scaled by the ratio of additions; for a
        precision that was not measured, it is that of the exact step.
        """
        by_dtype = self._by_dtype(op)
        if measured_type(dtype, precision) in by_dtype:
            dtype = measured_type(dtype, precision)
        seconds = self._of(op, dtype).seconds(size, flops)
        if dtype in by_dtype or ANY in by_dtype:
            return seconds
        adds = self.costs.get("add", {})
        if dtype in adds and "f32" in adds:
            seconds *= adds[dtype].by_bytes(size) / max(adds["f32"].by_bytes(size), 1e-12)
        return seconds

    def _by_dtype(self, op: str) -> Mapping[str, OpCost]:
        """The costs of an operation, or of the first measured one along its `OpDef.runs_like`."""
        costs, asked = self.costs, set[str]()
        while op not in costs and op in OPS and op not in asked:
            asked.add(op)
            op = OPS[op].runs_like
        return costs.get(op) or costs.get("add") or costs[ANY]

    def _of(self, op: str, dtype: str) -> OpCost:
        by_dtype = self._by_dtype(op)
        found = by_dtype.get(dtype) or by_dtype.get(ANY) or by_dtype.get("f32")
        return found or next(iter(by_dtype.values()))

    def to_json(self) -> dict[str, Any]:
        """Nested lists and dicts."""
        return {**self._asdict(), "peers": dict(self.peers)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Profile:
        """The inverse of `to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for any other document, also
        if figures are negative or not finite."""

        def figure(value: Any) -> float:
            if type(value) not in (int, float) or not 0 <= value <= LARGEST:  # a bool is no figure
                raise ValueError(f"{value!r} is no number of seconds, bytes or operations")
            return float(value)

        def text(value: Any) -> str:
            if not isinstance(value, str):
                raise TypeError(f"{value!r} is no name of a device or group")
            return value

        def curve(value: Any) -> Curve:
            points = tuple((figure(x), figure(y)) for x, y in value[0])
            if not points or any(b <= a for (a, _), (b, _) in pairwise(points)):
                raise ValueError("a curve needs points in order")
            return Curve(points)

        def cost(value: Any) -> OpCost:
            by_bytes, by_flops = value
            return OpCost(curve(by_bytes), None if by_flops is None else curve(by_flops))

        costs = {op: {dtype: cost(v) for dtype, v in by.items()} for op, by in document["costs"].items()}
        if "add" not in costs and ANY not in costs:
            raise ValueError("a profile needs the cost of add")
        return cls(
            text(document["device"]), figure(document["switch"]), curve(document["upload"]),
            curve(document["download"]), costs, {name: curve(v) for name, v in document["peers"].items()},
            text(document["group"]), figure(document["again"]),
            figure(document["ahead"]), figure(document["contention"]),
        )  # fmt: skip


class CostModel:
    """Seconds of nodes and transfers on the targets of a scheduler; nodes with equal signatures are computed once.

    Args:
        targets: the scheduler's targets.
        profiles: their profiles, in the same order.
    """

    def __init__(self, targets: Sequence[Target], profiles: Sequence[Profile]) -> None:
        self.targets: Final = targets
        self.profiles: Final = profiles
        self._steps: dict[tuple[Any, int], float] = {}
        self._tables: dict[int, list[list[float]]] = {}
        self._profile_of: Final = {target.device.name: p for target, p in zip(targets, profiles, strict=True)}

    def step(self, node: Tensor, signature: Signature, at: int) -> float:
        """Seconds of a node on target ``at``, ``inf`` if the target does not support it."""
        key = (signature, at)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._step(node, signature, at)
        return known

    def _step(self, node: Tensor, signature: Signature, at: int) -> float:
        support = self.targets[at].support(signature)
        if support.reason is not None:
            return inf
        if 0 in node.shape:
            return 0.0
        known = self._measured(signature, at, support)
        size, flops = work(node)
        seconds = known if known is not None else self.profiles[at].step(
            signature.op.name, decisive_dtype(signature), size, flops, support.precision
        )  # fmt: skip
        if support.packed:
            for dtype, shape, strides in signature.srcs:
                if not is_dense(shape, strides, dtype):
                    seconds += self.pack(at, dtype, shape)
        return seconds

    def _measured(self, signature: Signature, at: int, support: Support) -> float | None:
        """What such a step took when it was measured inside a program: on the target, or on the device whose figures a
        simulated target has."""
        device = self.targets[at].device
        if not device.simulated:
            return support.seconds
        same = getattr(device, "same_speed", None)
        # When it was measured, the step may have read its weights in other memory, which makes another signature.
        for alike in (signature, *signature.variants):
            there = alike.support.get(same)
            if there is not None and there.seconds is not None:
                return float(there.seconds)
        return None

    def pack(self, at: int, dtype: DType, shape: Shape) -> float:
        """Seconds of making a contiguous copy on a target."""
        return self.profiles[at].step("copy", dtype.name, 2 * nbytes(shape, dtype), 0)

    def feed(self, at: int, size: int) -> float:
        """Seconds of copying an input from the host to a target."""
        return self.profiles[at].upload(size)

    def fetch(self, device: Device | None, size: int) -> float:
        """Seconds of copying a result from a device to the host."""
        profile = self._profile_of.get(device.name) if device is not None else None
        found = profile or self.profiles[-1]
        return max(found.download(size) - found.ahead, 0.0)

    def move(self, device: Device | None, space: MemorySpace, at: int, size: int) -> float:
        """Seconds of copying ``size`` bytes from ``space``, memory of ``device``, to a target; 0 if it reaches them."""
        target, profile = self.targets[at], self.profiles[at]
        if target.device.reaches(space):
            return 0.0
        return self._copy(device, space, at, size) + profile.switch

    def _copy(self, device: Device | None, space: MemorySpace, at: int, size: int) -> float:
        target, profile = self.targets[at], self.profiles[at]
        other = self._profile_of.get(device.name) if device is not None else None
        if other is not None:
            direct = profile.link(other)
            if direct is not None:
                return direct(size)
        down = 0.0 if space.host or other is None else other.download(size)
        up = 0.0 if target.space.host and down else profile.upload(size)
        return down + up

    def table(self, size: int) -> list[list[float]]:
        """``table[a][b]``: seconds of copying ``size`` bytes from target ``a`` to ``b``, and of starting ``b``."""
        known = self._tables.get(size)
        if known is None:
            known = self._tables[size] = [
                [
                    self.move(a.device, a.space, b.index, size) + self.profiles[b.index].switch if a is not b else 0.0
                    for b in self.targets
                ]
                for a in self.targets
            ]
        return known


def decisive_dtype(signature: Signature) -> str:
    """The dtype that decides which kernel runs: for products that of the weights, else that of the first source."""
    windows = signature.srcs
    if not windows:
        return signature.out[0].name
    return windows[1 if signature.op.product and len(windows) > 1 else 0][0].name
