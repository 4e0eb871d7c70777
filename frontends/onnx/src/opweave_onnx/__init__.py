"""ONNX models on opweave: `load` a model file, run it over any mix of devices, see what runs where and why."""

from opweave_onnx.model import Model, load

__all__ = ["Model", "load"]
