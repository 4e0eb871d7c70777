"""ONNX models on opweave: `load` reads a model file; a `Model` runs it over any mix of devices and explains where each
node runs and why."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opweave_onnx.model import Model, load

__all__ = ["Model", "load"]


def __getattr__(name: str) -> Any:
    # The package onnx is only imported by those who use models: every command of opweave imports this package.
    if name in __all__:
        from opweave_onnx import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
