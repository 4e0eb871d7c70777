"""The kernels, mostly by family as in ``opweave.ops``. Modules register them in `KERNELS`; ``.cl`` files are their
source."""

from opweave.contract.kernels import import_kernels
from opweave_opencl.kernels.table import KERNELS

__all__ = ["KERNELS"]

import_kernels(__name__)
