"""The torch backend of opweave: every device that PyTorch knows, as ``torch:cpu``, ``torch:cuda:0``, ...

Importing this package does not import torch; `TorchBackend.devices` does.
"""

from opweave_torch.backend import TorchBackend

__all__ = ["TorchBackend"]
