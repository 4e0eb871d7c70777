"""Training: gradients of graphs, optimizers, data sets, schedules and the loop. Imported only when it is used."""

from opweave.training.backward import gradients
from opweave.training.curves import curves
from opweave.training.data import Dataset
from opweave.training.metrics import Epoch, Metrics
from opweave.training.optimizers import SGD, AdamW, LossScale, Optimizer, all_finite, clip_by_norm
from opweave.training.schedules import cosine, linear, steps
from opweave.training.trainer import Trainer

__all__ = [
    "SGD", "AdamW", "Dataset", "Epoch", "LossScale", "Metrics", "Optimizer", "Trainer", "all_finite", "clip_by_norm",
    "cosine", "curves", "gradients", "linear", "steps",
]  # fmt: skip
