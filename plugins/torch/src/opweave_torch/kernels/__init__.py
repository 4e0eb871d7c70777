"""The kernels, by family as in ``opweave.ops``. Importing a module enters its kernels into `KERNELS`."""

from opweave_torch.kernels import (  # noqa: F401 - importing a family enters its kernels
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
from opweave_torch.kernels.table import KERNELS

__all__ = ["KERNELS"]
