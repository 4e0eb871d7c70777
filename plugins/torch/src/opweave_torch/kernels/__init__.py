"""The kernels, by family as in ``opweave.ops``. Importing a module registers its kernels in `KERNELS`."""

from opweave.contract.kernels import import_kernels
from opweave_torch.kernels.table import KERNELS

__all__ = ["KERNELS"]

import_kernels(__name__)
