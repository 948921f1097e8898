"""What a classifier's outputs mean: one class of several, several labels at once, or numbers."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelAveragePrecision, MultilabelF1Score

from cnnstrategies.data.module import TaskName
from cnnstrategies.errors import ConfigurationError

THRESHOLDS = 200  # At which precision and recall are known, in memory that does not grow with the data.


class Task(Protocol):
    """What a network learns.

    Attributes:
        least: Outputs that it has at least.
        quality: The metric by which networks are compared.
        predicted: What :meth:`values` are called.
    """

    least: int
    quality: str
    predicted: str

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        """The mean over a batch's images, which does not depend on how they are divided."""

    def values(self, outputs: Tensor) -> Tensor:
        """What is predicted: (N, outputs)."""

    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the metrics take."""

    def balance(self, targets: Tensor, outputs: int) -> Tensor:
        """The weights that make up for what is rare among all training targets."""

    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        """New metrics by name."""


class Classes:
    """One class of several: cross-entropy, accuracy."""

    least, quality, predicted = 2, "acc", "probabilities"

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        """The cross-entropy of class indices (N,) or probabilities (N, outputs), times the classes' weights."""
        if weights is None:
            return F.cross_entropy(outputs, targets, label_smoothing=label_smoothing)
        # torch's own mean divides by the batch's weights, and so depends on which images are in a process's batch.
        return F.cross_entropy(outputs, targets, weights, reduction="none", label_smoothing=label_smoothing).mean()

    def values(self, outputs: Tensor) -> Tensor:
        """The classes' probabilities."""
        return outputs.softmax(dim=1)

    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and class indices, of mixed images that of the larger share."""
        return outputs, targets.argmax(dim=1) if targets.ndim == 2 else targets

    def balance(self, targets: Tensor, outputs: int) -> Tensor:
        """Inverse to how often classes occur; the mean over the images is 1."""
        return len(targets) / (outputs * torch.bincount(targets, minlength=outputs).clamp(min=1))

    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        """Accuracy, and with more than five classes that of the five most probable."""
        found: dict[str, Metric] = {"acc": MulticlassAccuracy(outputs, average="micro", validate_args=False)}
        if outputs > 5 and not training:
            found["acc_top5"] = MulticlassAccuracy(outputs, top_k=5, average="micro", validate_args=False)
        return found


class Multilabel:
    """Several labels at once: binary cross-entropy, mean average precision and F1."""

    least, quality, predicted = 2, "map", "probabilities"

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        """The binary cross-entropy of (N, outputs) zeros and ones; weights are those of ones."""
        check_targets(outputs, targets, "multilabel")
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), pos_weight=weights)

    def values(self, outputs: Tensor) -> Tensor:
        """Each label's probability."""
        return outputs.sigmoid()

    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, for which the metrics take logits that happen to be in [0, 1]."""
        return outputs.sigmoid(), targets.long()

    def balance(self, targets: Tensor, outputs: int) -> Tensor:
        """For each label, how many images have it not for each that has."""
        there = targets.sum(dim=0)
        return (len(targets) - there) / there.clamp(min=1)

    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        """Both are means over the labels."""
        return {
            "map": MultilabelAveragePrecision(outputs, thresholds=THRESHOLDS, validate_args=False),
            "f1": MultilabelF1Score(outputs, validate_args=False),
        }


class Regression:
    """Numbers: mean squared error, mean absolute error and the root of the former."""

    least, quality, predicted = 1, "mae", "values"

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        """The mean squared error of numbers (N, outputs)."""
        check_targets(outputs, targets, "regression")
        return F.mse_loss(outputs, targets.to(outputs.dtype))

    def values(self, outputs: Tensor) -> Tensor:
        """The numbers."""
        return outputs

    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Both as they are."""
        return outputs, targets

    def balance(self, targets: Tensor, outputs: int) -> Tensor:
        """None: numbers are not counted."""
        raise NotImplementedError

    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        """Over all numbers."""
        return {"mae": MeanAbsoluteError(), "rmse": MeanSquaredError(squared=False)}


TASKS: dict[TaskName, Task] = {"classes": Classes(), "multilabel": Multilabel(), "regression": Regression()}


def check_targets(outputs: Tensor, targets: Tensor, task: str) -> None:
    """Refuse targets that are not a number for each output.

    Raises:
        ConfigurationError: They have another shape.
    """
    if targets.shape != outputs.shape:
        raise ConfigurationError(
            f"task={task} needs targets of shape {tuple(outputs.shape)}, a number for each output, and the data gives "
            f"{tuple(targets.shape)}: take ImageTableDataModule, or task=classes for class indices"
        )
