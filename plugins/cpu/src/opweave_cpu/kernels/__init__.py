"""The kernels, one module for each family of ``opweave.ops``."""

from opweave_cpu.kernels import (  # noqa: F401 - importing a family enters its kernels
    activation,
    arrangement,
    attention,
    convolution,
    creation,
    custom,
    elementwise,
    experts,
    gated,
    indexing,
    interpolation,
    matmul,
    movement,
    normalization,
    pooling,
    reduction,
    rope,
    rounding,
    selection,
    sorting,
    state_space,
)
from opweave_cpu.kernels.table import KERNELS

__all__ = ["KERNELS"]
