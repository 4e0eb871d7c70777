"""Training: optimizers, data sets, schedules, the loop, checkpoints and curves. Gradients are in the core."""

from opweave.backward import gradients
from opweave_training.curves import curves
from opweave_training.data import Dataset
from opweave_training.metrics import Epoch, Metrics
from opweave_training.optimizers import SGD, AdamW, LossScale, Optimizer, all_finite, clip_by_norm
from opweave_training.schedules import cosine, linear, steps
from opweave_training.trainer import Trainer

__all__ = [
    "SGD", "AdamW", "Dataset", "Epoch", "LossScale", "Metrics", "Optimizer", "Trainer", "all_finite", "clip_by_norm",
    "cosine", "curves", "gradients", "linear", "steps",
]  # fmt: skip
