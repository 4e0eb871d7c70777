"""The operations, by family. Importing this enters all of them into the table ``opweave.graph.opdef.OPS``.

The definition of an operation (shape rule, NumPy reference, what may be overwritten, cost, limits) stands right above
its public builder. A family's ``__all__`` is what it makes public, here and in ``opweave``.
"""

from types import FunctionType
from typing import TYPE_CHECKING

from opweave.ops.activation import *
from opweave.ops.arrangement import *
from opweave.ops.attention import *
from opweave.ops.attention_gradient import *
from opweave.ops.comparison import *
from opweave.ops.convolution import *
from opweave.ops.creation import *
from opweave.ops.custom import *
from opweave.ops.elementwise import *
from opweave.ops.experts import *
from opweave.ops.fourier import *
from opweave.ops.gated import *
from opweave.ops.indexing import *
from opweave.ops.interpolation import *
from opweave.ops.linalg import *
from opweave.ops.linear_attention import *
from opweave.ops.loss import *
from opweave.ops.matmul import *
from opweave.ops.movement import *
from opweave.ops.normalization import *
from opweave.ops.pooling import *
from opweave.ops.quantization import *
from opweave.ops.random import *
from opweave.ops.reduction import *
from opweave.ops.rope import *
from opweave.ops.rounding import *
from opweave.ops.row_gradients import *
from opweave.ops.rows import *
from opweave.ops.selection import *
from opweave.ops.sorting import *
from opweave.ops.sparse_attention import *
from opweave.ops.state_space import *
from opweave.ops.trigonometry import *

if not TYPE_CHECKING:  # type checkers use the imports above; they cannot evaluate a computed list
    __all__ = sorted(name for name, value in globals().items() if isinstance(value, FunctionType))
