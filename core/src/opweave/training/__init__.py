"""Training: gradients of graphs, optimizers and the loop. Imported only when it is used."""

from opweave.training.backward import gradients
from opweave.training.optimizers import SGD, AdamW, LossScale, Optimizer, clip_by_norm

__all__ = ["SGD", "AdamW", "LossScale", "Optimizer", "clip_by_norm", "gradients"]
