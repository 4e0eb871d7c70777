"""``opweave bench``: how fast the operations of a device are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TimeRemainingColumn

from opweave import registry
from opweave.cli.options import Html, Json
from opweave.cli.output import plain, print_json, progress, quiet_stdout
from opweave.contract import Kind
from opweave_conformance.wrong_call import wrong_call

if TYPE_CHECKING:
    from opweave.contract import Device

__all__ = ["bench", "second_device"]


@wrong_call()
def bench(
    name: Annotated[str, typer.Argument(help="A device, or a backend: its first device.", metavar="NAME")],
    beside: Annotated[
        str | None, typer.Option("--beside", metavar="DEVICE", help="What to compare with. Default: cpu, else host.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PATTERN", help="Only these operations; repeatable.")
    ] = None,
    dtypes: Annotated[
        list[str] | None, typer.Option("--dtype", metavar="TYPE", help="Only these types; repeatable.")
    ] = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Measure GB/s and GFLOP/s of every operation that a device runs, beside a second device and its own limits."""
    from opweave_conformance.report import environment
    from opweave_conformance.throughput import throughput

    with quiet_stdout(), progress(TimeRemainingColumn(), quiet=as_json) as bar:
        registry.REGISTRY.make_devices((name, beside or ""))
        device = registry.REGISTRY.device(name)
        second = registry.REGISTRY.device(beside) if beside else second_device(device)
        task = bar.add_task(device.name, total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{device.name} {what}", completed=done, total=total)

        found = throughput(device, second, only or (), dtypes or (), report)
    about = environment([device] if second is None else [device, second])
    if html is not None:
        html.write_text(found.html(**about), encoding="utf-8")
    if as_json:
        limits = {"bytes_per_second": found.bandwidth, "flops_per_second": found.peaks}
        print_json({"device": found.device, "beside": found.second, "environment": about, "limits": limits,
                    "rows": found.dicts()})  # fmt: skip
    else:
        print(plain(str(found)))


def second_device(device: Device) -> Device | None:
    """The processors of the host, as the fastest backend that is here uses them; ``None`` where they are measured."""
    kinds = [Kind.CPU, Kind.HOST] if device.kind is not Kind.CPU else [Kind.HOST]
    others = [d for kind in kinds for d in registry.REGISTRY.devices() if d.kind is kind and d is not device]
    named = [d for d in others if d.name == "cpu"]
    return next(iter(named or others), None)
