"""`connect`: the devices of all nodes of a Ray cluster; `Cluster`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from types import MappingProxyType
from typing import Any, Final

import opweave_remote
from opweave.errors import OpweaveError, Unavailable
from opweave.packages import pip_install
from opweave_ray.certificate import Authority
from opweave_ray.node import NodeServer
from opweave_ray.objects import ObjectStore
from opweave_remote import Connection, RemoteDevice

__all__ = ["Cluster", "connect"]

_PAUSE: Final = 0.5
"""Seconds within which a loss that Ray reports is noticed."""


def connect(
    address: str | None = "auto",
    *,
    devices: Sequence[str] = (),
    cpus: float = 0.0,
    gpus: bool = True,
    deadline: float = 10.0,
    start: float = 120.0,
    limits: Mapping[str, Any] = MappingProxyType({}),
) -> Cluster:
    """Have Ray start a server on every node, and use their devices; they are in `opweave.devices` from then on.

    Nodes that have no such devices, or no opweave-ray, are left out and named in `Cluster.problems`. The connections
    use TLS 1.3, with a token and a certificate that are made anew for each `Cluster` and reach the nodes through Ray:
    whoever may run something on the cluster decides who may use its devices, so the cluster needs Ray's token
    authentication (``RAY_AUTH_MODE=token``, from Ray 2.52 on) where others can reach it.

    Args:
        address: of the cluster, as for ``ray.init``; where Ray is connected already, as in a job, that is used.
        devices: names of devices that the nodes show; none: all that a node has.
        cpus: processors that Ray sets aside for each server, and gives to nobody else.
        gpus: whether each server takes all GPUs of its node, which Ray then gives to nobody else. A server without
            them sees none.
        deadline: seconds without a sign of life after which a node is lost, unless Ray reports it before.
        start: seconds that a server may take until it is ready.
        limits: what one client may take: fields of `opweave_remote.server.limits.Limits`.

    Raises:
        Unavailable: Ray is not installed, there is no such cluster, or no node has devices; says why for each.
    """
    return Cluster(_started(address), devices, cpus, gpus, deadline, start, limits)


def _started(address: str | None) -> Any:
    """The module of Ray, connected to a cluster."""
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise Unavailable(f"Ray is not installed: {error}", remedy=pip_install("opweave-ray")) from error
    if not ray.is_initialized():
        try:
            ray.init(address, log_to_driver=False)
        except Exception as error:  # Ray raises many kinds
            raise Unavailable(f"there is no Ray cluster at {address!r}: {error}",
                              remedy="ray start --head starts one here") from error  # fmt: skip
    return ray


class Cluster:
    """Servers on the nodes of a Ray cluster. Made by `connect`. Use it in a ``with`` block, or close it.

    Attributes:
        connections: id of a node, as Ray calls it -> the connection to its server.
        problems: id of a node -> why it has no server.
    """

    def __init__(
        self, ray: Any, devices: Sequence[str], cpus: float, gpus: bool, deadline: float, start: float,
        limits: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.connections: dict[str, Connection] = {}
        self.problems: dict[str, str] = {}
        self._ray: Final = ray
        self._devices, self._limits = list(devices), dict(limits)
        self._cpus, self._gpus, self._deadline, self._start = cpus, gpus, deadline, start
        self._folder: Final = TemporaryDirectory(prefix="opweave-ray-")
        self._token: Final = token_hex(32).encode()
        self._authority: Final = Authority()
        self._ca: Final = Path(self._folder.name) / "ca.pem"
        self._ca.write_bytes(self._authority.pem)
        self._lock: Final = Lock()
        self._actors: Final[dict[str, Any]] = {}
        self._ends: Final[dict[Any, Connection]] = {}  # by the pending result of `NodeServer.ended`
        self._closing: Final = Event()
        self.refresh()
        if not self.connections:
            self.close()
            why = "\n".join(f"{node[:8]}: {problem}" for node, problem in self.problems.items())
            raise Unavailable(f"no node of the Ray cluster has devices\n{why}",
                              remedy=f"on the nodes: {pip_install('opweave-ray')}, and a backend")  # fmt: skip
        Thread(target=_watch, args=(weakref.ref(self), self._closing), name="opweave ray", daemon=True).start()

    def __repr__(self) -> str:
        return f"<Cluster of {len(self.connections)} nodes: {', '.join(device.name for device in self.devices)}>"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._closing.set()

    @property
    def devices(self) -> tuple[RemoteDevice, ...]:
        """The devices of the nodes whose servers are alive."""
        return tuple([d for made in self.connections.values() if made.alive for d in made.devices])

    def refresh(self) -> tuple[RemoteDevice, ...]:
        """Start servers on nodes that have joined, and again where one has ended. Returns the new devices."""
        with self._lock:
            lost = [node for node, made in self.connections.items() if not made.alive]
            for node in lost:
                self._forget(node)
            nodes = {n["NodeID"]: n for n in self._ray.nodes() if n["Alive"] and n["NodeID"] not in self.connections}
            self.problems = {}
            asked = {}
            for node, about in nodes.items():
                self._actors[node] = self._place(node, about)
                asked[node] = self._actors[node].address.remote()
            found: list[RemoteDevice] = []
            for node, ref in asked.items():
                try:
                    where = self._ray.get(ref, timeout=self._start)
                    made = opweave_remote.connect(where, token=self._token, ca=str(self._ca), deadline=self._deadline)
                except Exception as error:  # of Ray, of the node's packages, or of the connection
                    self.problems[node] = _reason(error)
                    self._forget(node)
                    continue
                self.connections[node] = made
                made.carrier = ObjectStore(self._ray, self._actors[node], made)
                self._ends[self._actors[node].ended.remote()] = made
                found += made.devices
            return tuple(found)

    def _place(self, node: str, about: Mapping[str, Any]) -> Any:
        """The actor of a server that Ray starts on a node; does not wait for it."""
        strategies = import_module("ray.util.scheduling_strategies")
        options = {
            "num_cpus": self._cpus,
            "num_gpus": about["Resources"].get("GPU", 0) if self._gpus else 0,
            "max_concurrency": 4,  # `NodeServer.ended` waits in one thread while others answer
            "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor = self._ray.remote(NodeServer).options(**options)
        host = about["NodeManagerAddress"]
        secrets = (self._token, *self._authority.issue(host), self._authority.pem)
        return actor.remote(host, self._devices, *secrets, self._limits)

    def _forget(self, node: str) -> None:
        made = self.connections.pop(node, None)
        if made is not None:
            made.close()
            for ref in [ref for ref, of in self._ends.items() if of is made]:
                del self._ends[ref]
        actor = self._actors.pop(node, None)
        if actor is not None:
            with suppress(Exception):  # it is gone already
                self._ray.kill(actor)

    def look(self) -> None:
        """Lose the connections to servers that have ended, as far as Ray reports within `_PAUSE` seconds."""
        with self._lock:
            waiting = list(self._ends)
        if not waiting:
            self._closing.wait(_PAUSE)
            return
        ready, _ = self._ray.wait(waiting, num_returns=1, timeout=_PAUSE)
        for ref in ready:
            why = "its server has ended"
            try:
                self._ray.get(ref)
            except Exception as error:
                why = f"Ray says: {_reason(error)}"
            with self._lock:
                made = self._ends.pop(ref, None)
            if made is not None:
                made.fate.lose(why)

    def close(self) -> None:
        """End the connections and the servers. Ray stays connected. Closing twice does nothing."""
        self._closing.set()
        with self._lock:
            for made in self.connections.values():
                made.close()
            for actor in self._actors.values():
                with suppress(Exception):
                    self._ray.get(actor.stop.remote(), timeout=5)
            for node in list(self._actors):
                self._forget(node)
        self._folder.cleanup()


def _watch(cluster: weakref.ref[Cluster], closing: Event) -> None:
    while not closing.is_set():
        found = cluster()
        if found is None:
            return
        with suppress(Exception):  # Ray was shut down: then heartbeats find losses
            found.look()
        del found


def _reason(error: BaseException) -> str:
    if isinstance(error, OpweaveError):
        return str(error)
    cause = getattr(error, "cause", None) or error
    return str(cause).strip().rpartition(os.linesep)[2] or type(cause).__name__
