"""The ONNX Runtime backend of opweave: every execution provider that is installed, as ``ort:cpu``, ``ort:cuda:0``, ...

Importing this package imports neither onnx nor onnxruntime; `OrtBackend.devices` does.
"""

from opweave_ort.backend import OrtBackend

__all__ = ["OrtBackend"]
