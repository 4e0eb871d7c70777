"""``opweave opencl``: commands about the drivers, and about the cache of built programs.

Only running ``info`` imports pyopencl.
"""

from __future__ import annotations

from typing import Any

import typer

from opweave.cli.options import Json
from opweave.cli.output import plain, print_json, quiet_stdout
from opweave.errors import Unavailable
from opweave.units import human_bytes
from opweave_opencl.caching import FOLDER, LIMIT, BinaryCache

__all__ = ["commands"]

commands = typer.Typer(help="Drivers of OpenCL, and the cache of built programs.", no_args_is_help=True)


@commands.command()
def info(as_json: Json = False) -> None:
    """List the drivers with their devices, and the cache of built programs."""
    cache = BinaryCache()
    sizes = [status.st_size for _, status in cache.programs()]
    kept = {"folder": cache.folder, "programs": len(sizes), "bytes": sum(sizes), "limit": LIMIT}
    error = remedy = ""
    drivers: list[dict[str, Any]] = []
    try:
        with quiet_stdout():
            drivers = _drivers()
    except Unavailable as failure:
        error, remedy = failure.message, failure.remedy
    if as_json:
        print_json({"drivers": drivers, "error": error, "remedy": remedy, "cache": kept})
        return
    for driver in drivers:
        print(plain(f"{driver['name']}, {driver['version']}"))
        for device in driver["devices"]:
            print(plain(f"  opencl:{device['id']}  {device['name']}, {device['version']}, driver {device['driver']}"))
    if error:
        print(plain(f"no driver: {error}\n  remedy: {remedy}"))
    if cache.folder is None:
        print(f"programs are not kept ({FOLDER}=0)")
    else:
        size, limit = human_bytes(sum(sizes)), human_bytes(LIMIT)
        print(plain(f"{len(sizes)} built programs and answers, {size} of {limit}, in {cache.folder}"))


@commands.command()
def clear_cache() -> None:
    """Delete the built programs, and the kept answers about which drivers work. They are made again when needed."""
    cache = BinaryCache()
    found = cache.programs()
    for path, _ in found:
        cache.drop(path.name)
    left = len(cache.programs())
    size = human_bytes(sum(status.st_size for _, status in found))
    print(
        plain(
            f"deleted {len(found) - left} files, {size}, in {cache.folder}" if found else "there was nothing to delete"
        )
    )
    if left:
        print(plain(f"{left} files in {cache.folder} cannot be deleted"))
        raise typer.Exit(1)


def _drivers() -> list[dict[str, Any]]:
    """Every platform that has a device, and its devices. All of them, whichever are selected."""
    from opweave_opencl.discovery import find_devices

    drivers: dict[int, dict[str, Any]] = {}
    for found in find_devices():
        platform, device = found.device.platform, found.device
        driver = drivers.setdefault(
            platform.int_ptr, {"name": platform.name.strip(), "version": platform.version.strip(), "devices": []}
        )
        driver["devices"].append(
            {
                "id": found.id, "name": device.name.strip(), "version": device.version.strip(),
                "driver": device.driver_version.strip(),
            }
        )  # fmt: skip
    return list(drivers.values())
