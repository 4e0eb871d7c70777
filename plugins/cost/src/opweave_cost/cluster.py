"""Reading a cluster of simulated devices from a TOML file.

::

    [[group]]
    name = "gpu"
    count = 1000
    flops = { f32 = 2e13, f16 = 2e14 }   # per second; or one number
    bandwidth = 2e12                     # bytes per second
    launch = 4e-6                        # seconds
    memory = "80 GiB"
    host = { latency = 1e-5, bandwidth = 2.5e10 }
    link = { latency = 2e-6, bandwidth = 2e11 }   # between two devices of the group
    combined = true                      # its devices work as one (`opweave_combined`): weights are split over them

    [[group]]
    name = "edge"
    like = "cpu"                         # a real device: its operations and its measured figures

    [[link]]
    between = ["gpu", "edge"]
    latency = 1e-4
    bandwidth = 1e9
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from opweave.errors import SchedulerError
from opweave_cost.cost_model import Curve, Profile
from opweave_cost.simulation import SimulatedDevice, line, simulate

__all__ = ["Cluster", "DeviceGroup", "read_cluster"]

KEYS: Final = frozenset(
    ("name", "count", "like", "flops", "bandwidth", "launch", "memory", "host", "link", "ops",
     "combined")
)  # fmt: skip
UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
                "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


@dataclass(frozen=True)
class DeviceGroup:
    """``count`` identical devices; ``device`` is one of them; ``combined``: weights are split over all of them."""

    name: str
    count: int
    device: SimulatedDevice
    combined: bool = False

    def member(self, number: int, profile: Profile) -> SimulatedDevice:
        """The device with the given number, named ``<group>:<number>``."""
        name = f"{self.name}:{number}" if self.count > 1 else self.name
        return self.device.renamed(name, profile._replace(device=name))


class Cluster(NamedTuple):
    """Groups of devices, and the direct links between groups (by the names of both), as `read_cluster` reads them."""

    groups: list[DeviceGroup]
    links: dict[tuple[str, str], Curve]

    def profile(self, group: DeviceGroup) -> Profile:
        """The profile of each device of a group, with its direct links to other groups and within the group."""
        peers = dict(group.device.declared().peers)
        for (a, b), curve in self.links.items():
            if group.name in (a, b):
                peers[b if a == group.name else a] = curve
        return group.device.declared()._replace(peers=peers, group=group.name)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a TOML file.

    Raises:
        SchedulerError: no such file, invalid TOML, or unknown keys and invalid values; the message names them.
        UnknownNameError: ``like`` names no device, ``ops`` no operation.
    """
    import tomllib

    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SchedulerError(f"cannot read the cluster file {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SchedulerError(f"{path}: {error}") from None
    _check(str(path), document, {"group", "link"})
    groups = [_group(f"{path}: group {i}", entry) for i, entry in enumerate(_tables(path, document, "group"), 1)]
    if not groups:
        raise SchedulerError(f"{path}: it describes no devices; add a [[group]]")
    names = [g.name for g in groups]
    if len(set(names)) < len(names):
        raise SchedulerError(f"{path}: two groups have the same name: {', '.join(names)}")
    links = {}
    for i, entry in enumerate(_tables(path, document, "link"), 1):
        where = f"{path}: link {i}"
        _check(where, entry, {"between", "latency", "bandwidth"})
        ends = entry.get("between")
        if not isinstance(ends, list) or len(ends) != 2 or not all(end in names for end in ends):
            raise SchedulerError(f"{where}: between names two groups of {', '.join(names)}, not {ends!r}")
        links[ends[0], ends[1]] = _link(where, {k: v for k, v in entry.items() if k != "between"})
    return Cluster(groups, links)


def _tables(path: str | Path, document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = document.get(key, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise SchedulerError(f"{path}: {key} has to be a list of tables, [[{key}]]")
    return found


def _check(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            raise SchedulerError(f"{where}: there is no key {key!r}; there are {', '.join(sorted(known))}")


def _group(where: str, entry: Mapping[str, Any]) -> DeviceGroup:
    _check(where, entry, KEYS)
    name, count = entry.get("name"), entry.get("count", 1)
    if not isinstance(name, str) or not name:
        raise SchedulerError(f"{where}: a group needs a name, a non-empty string")
    where = f"{where} ({name})"
    if type(count) is not int or count < 1:
        raise SchedulerError(f"{where}: count is a positive whole number, not {count!r}")
    flops, like, ops = entry.get("flops"), entry.get("like"), entry.get("ops")
    figures = {"bandwidth": entry.get("bandwidth"), "launch": entry.get("launch")}
    rates = flops.values() if isinstance(flops, dict) else [flops]
    for key, figure in [*figures.items(), *(("flops", rate) for rate in rates)]:
        if figure is not None and (isinstance(figure, bool) or not isinstance(figure, (int, float))):
            raise SchedulerError(f"{where}: {key} is a number, not {figure!r}")
    combined = entry.get("combined", False)
    if not isinstance(combined, bool):
        raise SchedulerError(f"{where}: combined is true or false, not {combined!r}")
    if like is not None and not isinstance(like, str):
        raise SchedulerError(f"{where}: like is the name of a device, not {like!r}")
    if ops is not None and not (isinstance(ops, list) and all(isinstance(op, str) for op in ops)):
        raise SchedulerError(f"{where}: ops is a list of names, not {ops!r}")
    links = {end: _pair(where, entry[key]) for key, end in (("host", "host"), ("link", name)) if key in entry}
    made = simulate(name, like, flops=flops, ops=ops, memory=_bytes(where, entry.get("memory", 0)), link=links or None,
                    **figures)  # fmt: skip
    assert isinstance(made, SimulatedDevice)
    return DeviceGroup(name, count, made, combined)


def _pair(where: str, value: Any) -> tuple[float, float] | float:
    if isinstance(value, dict):
        _check(where, value, {"latency", "bandwidth"})
        latency, rate = value.get("latency", 0.0), value.get("bandwidth")
        if all(isinstance(v, (int, float)) for v in (latency, rate)):
            return float(latency), float(rate)  # type: ignore[arg-type]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise SchedulerError(f"{where}: a link is bytes per second, or {{ latency = s, bandwidth = B/s }}, not {value!r}")


def _link(where: str, value: Any) -> Curve:
    return line(_pair(where, value))


def _bytes(where: str, value: Any) -> int:
    if isinstance(value, str):
        number, _, unit = value.strip().partition(" ")
        try:
            return int(float(number) * UNITS[unit.strip() or "B"])
        except (ValueError, KeyError, OverflowError):
            pass
    elif type(value) is int and value >= 0:
        return value
    raise SchedulerError(f"{where}: memory is a number of bytes or a text like '80 GiB', not {value!r}")
