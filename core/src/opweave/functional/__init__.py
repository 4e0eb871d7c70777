"""Backends over libraries whose arrays cannot be written in place: XLA, ONNX Runtime, OpenVINO, MLX.

An author describes his library by an `ArrayLibrary`, subclasses `ArrayDevice`, and overrides
``Stream._compile_functional``, where `evaluate` computes the steps from a table of functions.
"""

from opweave.functional.device import ArrayDevice
from opweave.functional.evaluate import evaluate
from opweave.functional.library import ArrayLibrary
from opweave.functional.memory import ArrayMemory

__all__ = ["ArrayDevice", "ArrayLibrary", "ArrayMemory", "evaluate"]
