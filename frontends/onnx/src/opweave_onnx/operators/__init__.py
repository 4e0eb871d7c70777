"""The builders of ONNX's operators, by family. Importing this enters all of them into `OPERATORS`."""

from opweave_onnx.operators import (
    activation as activation,
)
from opweave_onnx.operators import (
    arithmetic as arithmetic,
)
from opweave_onnx.operators import (
    attention as attention,
)
from opweave_onnx.operators import (
    bits as bits,
)
from opweave_onnx.operators import (
    control as control,
)
from opweave_onnx.operators import (
    convolution as convolution,
)
from opweave_onnx.operators import (
    creation as creation,
)
from opweave_onnx.operators import (
    detection as detection,
)
from opweave_onnx.operators import (
    indexing as indexing,
)
from opweave_onnx.operators import (
    matmul as matmul,
)
from opweave_onnx.operators import (
    movement as movement,
)
from opweave_onnx.operators import (
    normalization as normalization,
)
from opweave_onnx.operators import (
    pooling as pooling,
)
from opweave_onnx.operators import (
    qlinear as qlinear,
)
from opweave_onnx.operators import (
    quantization as quantization,
)
from opweave_onnx.operators import (
    recurrent as recurrent,
)
from opweave_onnx.operators import (
    reduction as reduction,
)
from opweave_onnx.operators import (
    resampling as resampling,
)
from opweave_onnx.operators import (
    sampling as sampling,
)
from opweave_onnx.operators import (
    scattering as scattering,
)
from opweave_onnx.operators import (
    sequences as sequences,
)
from opweave_onnx.operators import (
    signal as signal,
)
from opweave_onnx.operators import (
    sorting as sorting,
)
from opweave_onnx.operators import (
    types as types,
)
from opweave_onnx.operators.table import OPERATORS, Operator

__all__ = ["OPERATORS", "Operator"]
