"""`TorchBackend`: what the entry point ``torch`` names. Nothing here imports torch before devices are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from opweave.contract import Backend, Device
from opweave.errors import Unavailable
from opweave_torch.collectives import NcclCollectives

__all__ = ["TorchBackend"]


class TorchBackend(Backend):
    """Every device of PyTorch: ``torch:cpu``, ``torch:cuda:0``, ``torch:xpu:0``, ``torch:mps``, ...

    ``OPWEAVE_TORCH_SEPARATE=1`` gives ``torch:cpu`` memory of its own.
    """

    priority = 10  # of two backends that show one GPU, the one with tuned kernels for every operation

    def __init__(self) -> None:
        self._collectives: Final = NcclCollectives()

    def devices(self) -> Sequence[Device]:
        """Accelerators in torch's order, and ``torch:cpu`` last.

        Raises:
            Unavailable: torch cannot be imported.
            Broken: ``OPWEAVE_TORCH_SEPARATE`` is neither 0 nor 1.
        """
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: a library of its own that does not load
            raise Unavailable(
                f"torch cannot be imported: {error}",
                remedy="install the build for your hardware, see https://pytorch.org/get-started/locally: "
                "pip install torch",
            ) from error
        from opweave_torch.discovery import find_devices

        return find_devices()

    def set_threads(self, n: int | None) -> None:
        """Use ``n`` threads for torch's CPU kernels in streams that were opened without ``threads``; ``None``: as torch
        is set.

        Raises:
            PluginError: ``n`` is no positive whole number.
        """
        from opweave.contract import check_threads
        from opweave_torch.options import THREADS

        THREADS.default = None if n is None else check_threads(n)

    def extensions(self) -> Sequence[object]:
        return (self._collectives,)

    def features(self) -> Mapping[str, Any]:
        """torch's version, the capability level and threads of its kernels for the CPU, and its libraries."""
        from opweave_torch.device import cpu_features

        return cpu_features()
