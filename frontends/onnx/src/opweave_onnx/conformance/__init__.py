"""ONNX's own tests of backends, run on opweave: the class that they require, and a scoreboard."""

from opweave_onnx.conformance.backend import Backend, Prepared

__all__ = ["Backend", "Prepared"]
