"""Modules of torch on opweave: `import_program` takes what ``torch.export.export`` returns and runs it over any mix of
devices; ``torch.compile(module, backend="opweave")`` does so for any module."""

from opweave_torch.frontend.compiled import refresh
from opweave_torch.frontend.model import Model, import_program

__all__ = ["Model", "import_program", "refresh"]
