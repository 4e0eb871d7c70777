"""The core's own checks for ``opweave doctor``, a hook ``opweave_doctor`` like those of plugins."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

from opweave.contract.device import Kind
from opweave.packages import pip_install
from opweave.registry import Diagnosis, State, hookimpl
from opweave.registry.measured import FOLDER, cache
from opweave.runtime.device import Device
from opweave.runtime.host.cache import FileCache
from opweave.runtime.host.cores import Cores, usable_cores
from opweave.runtime.stream import ARTEFACTS_KEPT

if TYPE_CHECKING:
    from opweave.registry import PluginRecord, Registry

__all__ = [
    "cache_diagnosis", "cores_diagnosis", "diagnose", "opweave_doctor", "threads_diagnosis", "tunables_diagnosis",
]  # fmt: skip

_STATUS: Final[dict[State, Literal["ok", "slow", "wrong"]]] = {
    State.BROKEN: "wrong",
    State.INCOMPATIBLE: "wrong",
    State.UNAVAILABLE: "slow",
}

_PROVIDED: Final = {
    "opweave_make_devices": "devices on request",
    "opweave_ops": "operations",
    "opweave_cli": "commands",
    "opweave_formats": "file formats",
    "opweave_placements": "placements",
    "opweave_rewrites": "rewrites of graphs",
    "opweave_program_built": "an observer of programs",
}
"""Hook -> what a plugin without devices provides that implements it."""


def diagnose(registry: Registry) -> list[tuple[str, Diagnosis]]:
    """The diagnoses of the core and of all plugins, each with the name of its plugin. Loads all plugins."""
    if not any(name == "opweave" for name, _ in registry.hooks.implementers("opweave_doctor")):
        registry.hooks.register(sys.modules[__name__], "opweave")
    return registry.diagnose()


@hookimpl(tryfirst=True)
def opweave_doctor(registry: Registry) -> Iterator[Diagnosis]:
    """Plugins and their devices, processors, the cache of what was measured of devices, variables."""
    for record in registry.plugins():
        yield from _plugin(record, registry)
    if all(device.kind is Kind.HOST for device in _usable(registry)):
        message = "no device but host, which runs the slow reference implementation of each operation"
        yield Diagnosis("devices", "slow", message, pip_install("opweave-cpu"))
    yield cores_diagnosis(usable_cores())
    yield cache_diagnosis("cache of profiles", cache(), FOLDER, "each process measures the devices again")
    for device in _usable(registry):
        if left := device.stream_class.uncancellable():
            message = f"futures are cancelled at once, but {left}, for which the next run waits"
            yield Diagnosis(f"cancelling on {device.name}", "ok", message)
        if device.tunables:
            yield tunables_diagnosis(device)
        if device.artefacts:
            message = f"{len(device.artefacts)} of at most {ARTEFACTS_KEPT} in memory, beside those of open programs"
            yield Diagnosis(f"what {device.name} compiled", "ok", message)
    for name, value in sorted(os.environ.items()):
        if name.startswith("OPWEAVE_") and name != "OPWEAVE_PLUGIN_CHILD":  # the command's own
            yield Diagnosis("variable", "ok", f"{name}={value} is set")


def _usable(registry: Registry) -> Sequence[Device]:
    return [device for backend in registry.plugins() for name in backend.devices for device in [registry.device(name)]]


def _plugin(record: PluginRecord, registry: Registry) -> Iterator[Diagnosis]:
    about = f"plugin {record.name}"
    status = _STATUS.get(record.state, "ok")
    if record.state is State.READY:
        by_hook = [what for hook, what in _PROVIDED.items()
                   if any(name == record.name for name, _ in registry.hooks.implementers(hook))]  # fmt: skip
        provided = ", ".join(record.devices or by_hook or ["no devices"])
        yield Diagnosis(about, "ok", f"{record.version}: {provided}".lstrip(": "))
        if record.error:
            yield Diagnosis(about, "slow", record.error, record.remedy)
    elif not record.unusable:
        yield Diagnosis(about, status, f"{record.state.value}: {record.error}", record.remedy if status != "ok" else "")
    for device in record.unusable:
        message = f"unusable{f' ({device.description})' if device.description else ''}: {device.error}"
        if device.replaced_by:
            message = f"{device.replaced_by} is used in place of this one, which is {message}"
        yield Diagnosis(f"device {device.name}", "ok" if device.replaced_by else "wrong", message, device.remedy)


def tunables_diagnosis(device: Device) -> Diagnosis:
    """The values of the tunables of a device, or that they have not been measured."""
    about, tunables = f"tunables of {device.name}", device.tunables
    if not device.tuned:
        remedy = f"opweave profile {device.name}, while the machine has nothing else to do"
        return Diagnosis(about, "ok", f"{len(tunables)} at their defaults, not measured on this machine", remedy)
    return Diagnosis(about, "ok", "measured: " + ", ".join(f"{t.name} {t.value}" for t in tunables))


def cores_diagnosis(cores: Cores) -> Diagnosis:
    """Whether a quota gives the process less than the processors that libraries count."""
    if cores.quota is not None and cores.quota < cores.affinity:
        n = cores.usable
        message = (
            f"a quota allows {cores.quota:g} of {cores.affinity} processors; most libraries start a thread for each"
        )
        remedy = f"export OMP_NUM_THREADS={n} OPENBLAS_NUM_THREADS={n} MKL_NUM_THREADS={n}, or raise the quota"
        return Diagnosis("processors", "slow", message, remedy)
    message = f"{cores.usable} of {cores.machine} may be used"
    return Diagnosis("processors", "ok", message)


def threads_diagnosis(about: str, threads: int, cores: Cores, variables: Sequence[str]) -> Diagnosis:
    """Whether a library uses as many threads as the process may use processors.

    Args:
        about: the library's name.
        threads: the number of threads it uses.
        variables: the environment variables that set this number.
    """
    chosen = [f"{name}={os.environ[name]}" for name in variables if os.environ.get(name)]
    where = f" ({', '.join(chosen)})" if chosen else ""
    if threads == cores.usable:
        return Diagnosis(about, "ok", f"{threads} threads, as many as processors{where}")
    message = f"{threads} threads on {cores.usable} processors{where}"
    names = " ".join(value.partition("=")[0] for value in chosen)
    if threads > cores.usable:
        return Diagnosis(about, "slow", f"{message}: too many", f"export {variables[0]}={cores.usable}")
    return Diagnosis(about, "slow", message, f"unset {names}" if names else f"export {variables[0]}={cores.usable}")


def cache_diagnosis(about: str, kept: FileCache, variable: str, else_: str) -> Diagnosis:
    """Whether a cache can be written.

    Args:
        variable: the environment variable that names its folder.
        else_: the consequence if it cannot.
    """
    why = kept.why_not_writable()
    if why is None:
        return Diagnosis(about, "ok", f"kept in {kept.folder}, at most {kept.limit >> 20:,} MiB")
    remedy = f"unset {variable}" if kept.folder is None else f"export {variable}=FOLDER, one that can be written"
    where = f"{kept.folder}: " if kept.folder is not None else ""
    return Diagnosis(about, "slow", f"{where}{why}: {else_}", remedy)
