"""The meanings of a classifier's outputs: one class of several, any number of labels, or numbers."""

import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelAveragePrecision, MultilabelF1Score
from typing_extensions import override

from cnnstrategies.data.module import TaskName
from cnnstrategies.errors import ConfigurationError

# Number of thresholds at which precision and recall are computed: with a fixed number, memory does not grow with the
# data.
THRESHOLDS = 200


class LearningTask:
    """A task that a network learns; the base class is the task ``classes``, one class of several.

    A loss is the mean over a batch's images, so that it does not depend on how the images are divided over devices.

    Attributes:
        least: Smallest number of outputs.
        quality: Name of the metric by which networks are compared.
        predicted: Name of :meth:`values` in the results of ``predict_step``.
    """

    least, quality, predicted = 2, "acc", "probabilities"

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        """Return the cross-entropy of class indices (N,) or probabilities (N, outputs), times the classes' weights."""
        if weights is None:
            return F.cross_entropy(outputs, targets, label_smoothing=label_smoothing)
        # torch's own mean divides by the sum of the batch's weights, which depends on how images are divided over
        # processes.
        return F.cross_entropy(outputs, targets, weights, reduction="none", label_smoothing=label_smoothing).mean()

    def values(self, outputs: Tensor) -> Tensor:
        """Return the predictions (N, outputs); for classes their probabilities."""
        return outputs.softmax(dim=1)

    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and class indices for the metrics; a mixed image has the class of its larger share."""
        return outputs, targets.argmax(dim=1) if targets.ndim == 2 else targets

    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        """Return new metrics by name; for classes accuracy, and top-5 accuracy if there are more than five classes."""
        metrics: dict[str, Metric] = {"acc": MulticlassAccuracy(outputs, average="micro", validate_args=False)}
        if outputs > 5 and not training:
            metrics["acc_top5"] = MulticlassAccuracy(outputs, top_k=5, average="micro", validate_args=False)
        return metrics


class Multilabel(LearningTask):
    """The task ``multilabel``, any number of labels: binary cross-entropy, mean average precision and F1."""

    quality = "map"

    @override
    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        check_targets(outputs, targets, "multilabel")  # Targets are zeros and ones; the weights are those of the ones.
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), pos_weight=weights)

    @override
    def values(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    @override
    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # The metrics would mistake logits in [0, 1] for probabilities.
        return outputs.sigmoid(), targets.long()

    @override
    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        return {  # Both are means over the labels.
            "map": MultilabelAveragePrecision(outputs, thresholds=THRESHOLDS, validate_args=False),
            "f1": MultilabelF1Score(outputs, validate_args=False),
        }


class Regression(LearningTask):
    """The task ``regression``, numbers: mean squared error, its root and the mean absolute error."""

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
    """Refuse targets that do not have a number for each output."""
    if targets.shape != outputs.shape:
        raise ConfigurationError(
            f"task={task} needs targets of shape {tuple(outputs.shape)}, a number for each output, and the data gives "
            f"{tuple(targets.shape)}: use ImageTableDataModule, or task=classes for class indices"
        )
