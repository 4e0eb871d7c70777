"""The kernels, by family as in ``opweave.ops``. Modules register them in `KERNELS`; ``.cl`` files hold their source."""

from opweave_opencl.kernels import activation, elementwise, indexing, matmul, movement, normalization, reduction
from opweave_opencl.kernels.table import KERNELS

__all__ = ["KERNELS", "activation", "elementwise", "indexing", "matmul", "movement", "normalization", "reduction"]
