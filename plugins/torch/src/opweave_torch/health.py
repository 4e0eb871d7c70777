"""Whether torch runs kernels on a device: each build has them for some architectures only."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from opweave.contract import Device
from opweave.errors import Unavailable

__all__ = ["REMEDY", "UnusableAccelerator", "try_kernel", "why_no_kernels"]

REMEDY = "install the build of PyTorch for this card: https://pytorch.org/get-started/locally"


def why_no_kernels(architecture: str, built_for: Sequence[str]) -> str | None:
    """Why a build's kernels do not run on a card, or ``None`` where they do or nothing is known of them.

    Binary code of CUDA runs on cards of the same major version that are not older, code of a ``compute_`` architecture
    on every card that is not older; ROCm's runs on its own architecture.

    Args:
        architecture: of the card, ``"sm_90"`` or ``"gfx90a"``.
        built_for: what the build has code for.
    """
    if not built_for or any("generic" in name for name in built_for):
        return None
    card = re.fullmatch(r"sm_(\d+)(\d)", architecture)
    if card is None:
        runs = architecture in built_for
    else:
        major, minor = int(card[1]), int(card[2])
        known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name) for name in built_for]
        runs = any(
            ((major, minor) == (int(n[2]), int(n[3])))
            or (n[1] == "sm" and n[4] != "a" and major == int(n[2]) and minor >= int(n[3]))
            or (n[1] == "compute" and not n[4] and (major, minor) >= (int(n[2]), int(n[3])))
            for n in known
            if n
        )
    if runs:
        return None
    return f"torch {torch.__version__} has no kernels for {architecture}, only for {' '.join(built_for)}"


def try_kernel(target: torch.device) -> None:
    """Run a small kernel.

    Raises:
        Unavailable: it fails, or gives something else than it should.
    """
    try:
        with torch.inference_mode():
            result = float((torch.ones(8, device=target) * 2).sum())
    except Exception as error:  # torch has no class of its own for what a driver says
        why = str(error).strip().partition("\n")[0]
        raise Unavailable(f"it runs no kernel: {why or type(error).__name__}", remedy=REMEDY) from error
    if result != 16:
        raise Unavailable(f"it runs no kernel: the sum of eight twos is {result}", remedy=REMEDY)


class UnusableAccelerator(Device):
    """A device that torch counts, but fails to describe; it refuses all steps with torch's reason."""

    def __init__(self, target: torch.device, error: Exception) -> None:
        self.id, self.description = f"{target.type}:{target.index}", f"PyTorch on {target}"
        self._why = str(error).strip().partition("\n")[0] or type(error).__name__

    def _why_not(self, step: object) -> str:
        return self._why

    def _probe(self) -> None:
        raise Unavailable(self._why, remedy="look at the driver's own tool (nvidia-smi, rocm-smi, xpu-smi)")
