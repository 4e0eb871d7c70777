"""Distributions with backends, written to a folder as ``pip install --target`` leaves them."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

from opweave.registry import PluginRecord, Registry

BACKEND = """
    from opweave.contract import Backend, Device, Kind
    from opweave.errors import Unavailable
    from opweave.runtime.host.memory import HostMemory
    from opweave.contract.kernels import KernelTable
    from opweave.graph.opdef import OpDef
    from opweave.registry import hookimpl

    class Unit(HostMemory):
        kind = Kind.ACCEL
        kernels = KernelTable()

        def __init__(self, id=None, **attributes):
            self.id = id
            for name, value in attributes.items():
                setattr(self, name, value)
"""
"""What a plugin's module needs, and a device class."""


def backend(devices: str = "[Unit()]", *, body: str = "pass", attributes: str = "priority = 0", extra: str = "") -> str:
    """A module with one backend ``Acme`` whose ``devices()`` runs ``body`` and returns the expression ``devices``."""
    acme = f"""
        class Acme(Backend):
            {attributes}

            def devices(self):
                {body}
                return {devices}
    """
    return dedent(BACKEND) + dedent(acme) + dedent(extra)


PROBE = """
    def _probe(self):
        if self.kind is Kind.GPU:
            raise Unavailable("no kernel image for sm_30", remedy="install the build for it")
        if self.kind is Kind.IGPU:
            raise RuntimeError("driver said no")

    Unit._probe = _probe
"""

OLD = "Unit(kind=Kind.GPU, description='Old card')"
"""A device of `probed` that does not work."""


def probed(*devices: str) -> str:
    """A module with a backend of these devices, of which GPUs and IGPUs do not work."""
    return backend(f"[{', '.join(devices)}]", extra=PROBE)


def write_distribution(
    folder: Path,
    name: str,
    source: str | None = None,
    *,
    entry: str | None = None,
    value: str | None = None,
    version: str = "1.0",
    requires: tuple[str, ...] = ("opweave>=0.1,<0.2",),
    entry_points: str | None = None,
) -> None:
    """Write ``opweave-<name>`` with its module ``opweave_<name>``; the entry point is ``<name> = opweave_<name>:Acme``
    unless ``entry``, ``value`` or the whole text ``entry_points`` say otherwise."""
    module = f"opweave_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(dedent(backend() if source is None else source))
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: opweave-{name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires)]) + "\n")
    point = f"{entry or name} = {value or f'{module}:Acme'}"
    (info / "entry_points.txt").write_text(entry_points or f"[opweave.backends]\n{point}\n")


class PluginFolder:
    """A folder of distributions, and registries that see nothing else. Leaves no trace in ``sys``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> PluginFolder:
        self._before = list(sys.path), set(sys.modules)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.path[:] = self._before[0]
        for name in set(sys.modules) - self._before[1]:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(self.path):
                del sys.modules[name]

    def add(self, name: str, source: str | None = None, **options: object) -> None:
        write_distribution(self.path, name, source, **options)  # type: ignore[arg-type]

    def registry(self, **environ: str) -> Registry:
        return Registry(environ=environ, search=[str(self.path)])

    def imported(self) -> set[str]:
        return {name for name in sys.modules if name.startswith("opweave_")} - self._before[1]


def by_name(records: tuple[PluginRecord, ...]) -> dict[str, PluginRecord]:
    return {record.name: record for record in records}
