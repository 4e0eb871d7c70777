"""``opweave profile``: measures and prints the profiles of devices."""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import TimeRemainingColumn
from rich.text import Text

from opweave import registry
from opweave.cli.output import Row, print_json, print_rows, progress, quiet_stdout
from opweave.contract import Device
from opweave_cost.cost_model import Profile
from opweave_cost.store import cache_folder, profile, tune

__all__ = ["show_profiles"]

DTYPES = ("f32", "f16", "bf16", "f64", "q8_0", "q4_0", "q4_k")


def show_profiles(names: Sequence[str], *, refresh: bool, as_json: bool) -> None:
    """Measure the named devices (default: all) that have no profile yet, their tunables first, and print both.

    Raises:
        UnknownNameError, PluginError: a name is no device, or the device's plugin failed.
        AllocationError: a device has no memory for the arrays that it is measured with.
    """
    with quiet_stdout(), progress(TimeRemainingColumn(), quiet=as_json) as bar:
        registry.REGISTRY.make_devices(names)
        known = registry.REGISTRY
        devices = [known.device(name) for name in names] if names else list(known.devices())
        found = []
        for device in devices:
            task = bar.add_task(device.name, total=None)

            def report(what: str, done: int, total: int, name: str = device.name, task: object = task) -> None:
                bar.update(task, description=f"{name} {what}", completed=done, total=total)  # type: ignore[arg-type]

            tuned = tune(device, refresh=refresh, progress=report)
            found.append(profile(device, refresh=refresh or tuned, progress=report))
            bar.remove_task(task)
    folder = cache_folder()
    if as_json:
        print_json({"folder": folder and str(folder),
                    "profiles": [{**_figures(p), "tunables": _tunables(d), "profile": p.to_json()}
                                 for d, p in zip(devices, found, strict=True)]})  # fmt: skip
        return
    header = ["device", "per step", "per split", "memory", "to / from host", "f32 products"]
    print_rows(header, [_row(d, p) for d, p in zip(devices, found, strict=True)], indent=3)


def _figures(made: Profile) -> dict[str, object]:
    return {
        "device": made.device,
        "launch_seconds": made.launch,
        "switch_seconds": made.switch,
        "again_seconds": made.again,
        "contention": made.contention,
        "bytes_per_second": made.bandwidth,
        "upload_bytes_per_second": made.upload.rate,
        "download_bytes_per_second": made.download.rate,
        "flops": {dtype: made.flops(dtype) for dtype in _dtypes(made)},
    }


def _dtypes(made: Profile) -> list[str]:
    products = made.costs.get("linear", {})
    return [dtype for dtype in DTYPES if dtype in products]


def _tunables(device: Device) -> dict[str, int]:
    return {tunable.name: tunable.value for tunable in device.tunables}


def _row(device: Device, made: Profile) -> Row:
    others = [f"{dtype} {_rate(made.flops(dtype), 'flop/s')}" for dtype in _dtypes(made) if dtype != "f32"]
    cells = [
        Text(made.device, "bold cyan"),
        Text(f"{made.launch * 1e6:.3g} µs"),
        Text(f"{made.switch * 1e6:.3g} µs"),
        Text(_rate(made.bandwidth, "B/s")),
        Text(f"{_rate(made.upload.rate, 'B/s')} / {_rate(made.download.rate, 'B/s')}"),
        Text(_rate(made.flops("f32"), "flop/s")),
    ]
    below = [("products", Text(", ".join(others), "dim"))] if others else []
    tunables = [
        f"{t.name} {t.value}" + (f" (default {t.default})" if t.value != t.default else "") for t in device.tunables
    ]
    if tunables:
        below.append(("tunables", Text(", ".join(tunables), "dim")))
    if made.is_doubtful:
        remark = "other programs used the processors meanwhile; repeat it with --refresh when the machine is idle"
        below.append(("doubtful", Text(remark, "yellow")))
    return Row(cells, below)


def _rate(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
