"""`OrtBackend`: what the entry point ``ort`` names. Nothing here imports onnxruntime before devices are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opweave.contract import Backend, Device
from opweave.errors import Unavailable

__all__ = ["OrtBackend"]


class OrtBackend(Backend):
    """Every execution provider of the installed ONNX Runtime: ``ort:cpu``, ``ort:cuda:0``, ``ort:dml:0``, ..."""

    def devices(self) -> Sequence[Device]:
        """A device for each piece of hardware of each provider, ``ort:cpu`` last.

        Raises:
            Unavailable: onnxruntime or onnx cannot be imported, or as `opweave_ort.providers.find_devices`.
        """
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
            raise Unavailable(
                f"ONNX Runtime cannot be imported: {error}",
                remedy="pip install onnx onnxruntime (or the package of another provider, as onnxruntime-gpu)",
            ) from error
        from opweave_ort.providers import find_devices

        return find_devices()

    def set_threads(self, n: int | None) -> None:
        """Use ``n`` threads in sessions that are made from now on, of streams that were opened without ``threads``;
        ``None``: one for each usable core.

        Raises:
            PluginError: ``n`` is no positive whole number.
        """
        from opweave_ort.runtime import RUNTIME

        RUNTIME.set_threads(n)

    def features(self) -> Mapping[str, Any]:
        """ONNX Runtime's version and its providers."""
        from opweave_ort.providers import features

        return features()
