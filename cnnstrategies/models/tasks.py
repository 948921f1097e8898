"""What a classifier's outputs mean: one class of several, several labels at once, or numbers."""

import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelAveragePrecision, MultilabelF1Score
from typing_extensions import override

from cnnstrategies.data.module import TaskName
from cnnstrategies.errors import ConfigurationError

THRESHOLDS = 200  # At which precision and recall are known, in memory that does not grow with the data.


class LearningTask:
    """What a network learns; here one class of several: cross-entropy, accuracy.

    It has at least ``least`` outputs, networks are compared by the metric ``quality``, and ``predicted`` is what
    :meth:`values` are called. A loss is the mean over a batch's images, which does not depend on how they are divided.
    """

    least, quality, predicted = 2, "acc", "probabilities"

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        """The cross-entropy of class indices (N,) or probabilities (N, outputs), times the classes' weights."""
        if weights is None:
            return F.cross_entropy(outputs, targets, label_smoothing=label_smoothing)
        # torch's own mean divides by the batch's weights, and so depends on which images are in a process's batch.
        return F.cross_entropy(outputs, targets, weights, reduction="none", label_smoothing=label_smoothing).mean()

    def values(self, outputs: Tensor) -> Tensor:
        """What is predicted (N, outputs): the classes' probabilities."""
        return outputs.softmax(dim=1)

    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the metrics take: logits, and class indices, of mixed images that of the larger share."""
        return outputs, targets.argmax(dim=1) if targets.ndim == 2 else targets

    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        """New ones by name: accuracy, and with more than five classes that of the five most probable."""
        found: dict[str, Metric] = {"acc": MulticlassAccuracy(outputs, average="micro", validate_args=False)}
        if outputs > 5 and not training:
            found["acc_top5"] = MulticlassAccuracy(outputs, top_k=5, average="micro", validate_args=False)
        return found


class Multilabel(LearningTask):
    """Several labels at once: binary cross-entropy, mean average precision and F1."""

    quality = "map"

    @override
    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        check_targets(outputs, targets, "multilabel")  # Zeros and ones; weights are those of ones.
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), pos_weight=weights)

    @override
    def values(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    @override
    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # The metrics would take logits that happen to be in [0, 1] for probabilities.
        return outputs.sigmoid(), targets.long()

    @override
    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        return {  # Means over the labels.
            "map": MultilabelAveragePrecision(outputs, thresholds=THRESHOLDS, validate_args=False),
            "f1": MultilabelF1Score(outputs, validate_args=False),
        }


class Regression(LearningTask):
    """Numbers: mean squared error, mean absolute error and the root of the former."""

    least, quality, predicted = 1, "mae", "values"

    @override
    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        check_targets(outputs, targets, "regression")
        return F.mse_loss(outputs, targets.to(outputs.dtype))

    @override
    def values(self, outputs: Tensor) -> Tensor:
        return outputs

    @override
    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, targets

    @override
    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        return {"mae": MeanAbsoluteError(), "rmse": MeanSquaredError(squared=False)}


TASKS: dict[TaskName, LearningTask] = {
    "classes": LearningTask(),
    "multilabel": Multilabel(),
    "regression": Regression(),
}


def check_targets(outputs: Tensor, targets: Tensor, task: str) -> None:
    """Refuse targets that are not a number for each output."""
    if targets.shape != outputs.shape:
        raise ConfigurationError(
            f"task={task} needs targets of shape {tuple(outputs.shape)}, a number for each output, and the data gives "
            f"{tuple(targets.shape)}: take ImageTableDataModule, or task=classes for class indices"
        )
