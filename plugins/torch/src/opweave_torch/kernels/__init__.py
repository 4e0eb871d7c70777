"""The kernels, by family as in ``opweave.ops``. Importing a module registers its kernels in `KERNELS`, those that
round products to bf16 in tables of their own."""

from opweave.contract.kernels import import_kernels
from opweave_torch.kernels.half_products import WITH_BF16, kernels_for_cpu
from opweave_torch.kernels.table import KERNELS

__all__ = ["KERNELS", "WITH_BF16", "kernels_for_cpu"]

import_kernels(__name__)
