"""The kernels, one module for each family of ``opweave.ops``."""

from opweave.contract.kernels import import_kernels
from opweave_cpu.kernels.table import KERNELS

__all__ = ["KERNELS"]

import_kernels(__name__)
