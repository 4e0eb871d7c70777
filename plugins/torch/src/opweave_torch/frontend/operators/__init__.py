"""The builders of ATen's operators, by family. Importing this enters all of them into `OPERATORS`."""

from opweave_torch.frontend.operators import attention as attention
from opweave_torch.frontend.operators import backward as backward
from opweave_torch.frontend.operators import convolution as convolution
from opweave_torch.frontend.operators import elementwise as elementwise
from opweave_torch.frontend.operators import indexing as indexing
from opweave_torch.frontend.operators import normalization as normalization
from opweave_torch.frontend.operators import products as products
from opweave_torch.frontend.operators import recurrent as recurrent
from opweave_torch.frontend.operators import reductions as reductions
from opweave_torch.frontend.operators import shapes as shapes
from opweave_torch.frontend.operators.complex import COMPLEX, of_complex
from opweave_torch.frontend.operators.fallback import runs_by_torch
from opweave_torch.frontend.operators.table import OPERATORS

__all__ = ["COMPLEX", "OPERATORS", "of_complex", "runs_by_torch"]
