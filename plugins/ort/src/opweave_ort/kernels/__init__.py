"""How operations are written in ONNX, by family as in ``opweave.ops``: one module each."""

from opweave.contract.kernels import import_kernels
from opweave_ort.kernels.table import KERNELS, MOVERS

__all__ = ["KERNELS", "MOVERS"]

import_kernels(__name__)
