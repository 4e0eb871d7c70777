"""`Backend`: the class that ``onnx.backend.test`` requires. The environment variable ``OPWEAVE_ONNX_DEVICES`` names the
devices on which it runs models, by default ``cpu,host``."""

from __future__ import annotations

import os
from typing import Any

from onnx import ModelProto
from onnx.backend.base import Backend as OnnxBackend
from onnx.backend.base import BackendRep

from opweave_onnx.model import Model, load

__all__ = ["Backend", "Prepared", "devices"]


def devices() -> list[str]:
    """The devices that models are prepared for."""
    return [name.strip() for name in os.environ.get("OPWEAVE_ONNX_DEVICES", "cpu,host").split(",")]


class Prepared(BackendRep):  # type: ignore[misc]
    """A model that is ready to run.

    Attributes:
        model: the loaded model.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs, for inputs in the order of the model's."""
        return tuple(self.model.run(dict(zip([v.name for v in self.model.inputs], inputs, strict=False))).values())


class Backend(OnnxBackend):  # type: ignore[misc]
    """opweave as a backend of ONNX."""

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        """The model, ready to run."""
        return Prepared(load(model, devices()))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether ONNX's tests may ask for a kind of device: only ``"CPU"``."""
        return device == "CPU"
