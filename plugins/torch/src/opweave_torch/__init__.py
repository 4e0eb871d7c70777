"""The torch backend of opweave: every device that PyTorch knows, as ``torch:cpu``, ``torch:cuda:0``, ...; and a front
end for modules of torch: `import_program`, and ``torch.compile(module, backend="opweave")``.

Importing this package does not import torch; `TorchBackend.devices` and `import_program` do.
"""

from typing import TYPE_CHECKING, Any

from opweave_torch.backend import TorchBackend

if TYPE_CHECKING:
    from opweave_torch.frontend import Model, import_program, refresh

__all__ = ["Model", "TorchBackend", "import_program", "refresh"]


def __getattr__(name: str) -> Any:
    # Importing the front end takes long, and only programs with modules of torch need it.
    if name in __all__:
        from opweave_torch import frontend

        return getattr(frontend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
