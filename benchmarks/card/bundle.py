"""A folder of wheels by which opweave is installed on a machine without a registry.

It has all our packages, and what those for a card need, but for torch, which the machine brings with it, in the build
for its card, and ONNX Runtime, whose build for cards is several hundred MB. ``pip install --no-index --find-links DIR
opweave-torch ...`` takes from it what the machine lacks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["LIMIT", "make_bundle"]

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT: Final = 60 << 20
"""Bytes that the wheels may take."""

NEEDED: Final = ("hypothesis", "jinja2", "ml_dtypes", "numpy", "packaging", "pluggy", "pyopencl", "pytest",
                 "pytest-timeout", "rich", "safetensors", "threadpoolctl", "typer")  # fmt: skip
"""What the packages for a card and the tests need, with what those need."""

PLATFORMS: Final = (*[f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17)], "manylinux2014_x86_64", "any")


def make_bundle(folder: Path, python: str) -> int:
    """Fill ``folder`` with wheels for Linux on x86-64 and a version of Python (``"3.12"``).

    Returns:
        The exit status: 1 where the wheels take more than `LIMIT`.

    Raises:
        CalledProcessError: pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    ours = [str(found.parent) for found in sorted((*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")))]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), *ours], check=True)
    subprocess.run(
        [*pip, "download", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms,
         "-c", str(ROOT / "requirements/constraints.txt"), "-d", str(folder), *NEEDED], check=True,
    )  # fmt: skip
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    names = "opweave-torch opweave-cpu opweave-conformance opweave-training opweave-opencl hypothesis pytest-timeout"
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB, for Python {python}. There:")
    print(f"python3 -m pip install --no-index --find-links {folder} {names}")
    if size > LIMIT:
        print(f"that is more than {LIMIT >> 20} MiB", file=sys.stderr)
        return 1
    return 0
