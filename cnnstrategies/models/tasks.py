"""Learning tasks of `ImageClassifier`: classification, multilabel classification and regression."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelAveragePrecision, MultilabelF1Score
from typing_extensions import override

from cnnstrategies.data.module import TaskName
from cnnstrategies.errors import ConfigurationError

# Number of thresholds at which precision and recall are computed. With a fixed number, the memory of the metric does
# not grow with the number of samples.
THRESHOLDS = 200


class LearningTask:
    """The task ``classes``: each image has one class. Base class of the other tasks.

    Every loss is a mean over a batch's images, so that the result of training does not depend on how the images are
    divided among the devices.

    Attributes:
        least: Smallest allowed number of the network's outputs for an image.
        quality: Name of the metric by which networks are compared, without ``val_`` or ``test_``.
        predicted: Key under which ``predict_step`` returns the result of :meth:`values`.
    """

    least, quality, predicted = 2, "acc", "probabilities"

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        """Return the loss of a batch, a scalar; for ``classes`` the cross-entropy.

        Args:
            outputs: Logits (N, outputs).
            targets: For ``classes``: class indices (N,) or class probabilities (N, outputs).
            weights: Weight of each class (outputs,), or None.
            label_smoothing: Label smoothing, in [0, 1).
        """
        if weights is None:
            return F.cross_entropy(outputs, targets, label_smoothing=label_smoothing)
        # Divide by the number of images. torch's own weighted mean divides by the sum of the weights in the batch,
        # which depends on how the images are divided among the processes.
        return F.cross_entropy(outputs, targets, weights, reduction="none", label_smoothing=label_smoothing).mean()

    def values(self, outputs: Tensor) -> Tensor:
        """Return the predictions (N, outputs) for the network's outputs.

        For the task ``classes``, the predictions are the probabilities of the classes.
        """
        return outputs.softmax(dim=1)

    def averaged(self, first: Tensor, second: Tensor) -> Tensor:
        """Return outputs whose predictions are the means of the predictions for two outputs.

        For the task ``classes``, these are the logarithms of the mean probabilities.
        """
        return torch.logaddexp(first.log_softmax(dim=1), second.log_softmax(dim=1)) - math.log(2)

    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets in the form that the metrics expect.

        For the task ``classes``, these are logits and class indices. An image that mixup or CutMix has mixed from two
        images counts for the class with the larger weight.
        """
        return outputs, targets.argmax(dim=1) if targets.ndim == 2 else targets

    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        """Return new metrics. The keys are the metrics' names.

        For ``classes`` the metric is the accuracy. Validation and test also have the top-5 accuracy if there are more
        than five classes.

        Args:
            outputs: Number of the network's outputs.
            training: Whether the metrics are for training.
        """
        metrics: dict[str, Metric] = {"acc": MulticlassAccuracy(outputs, average="micro", validate_args=False)}
        if outputs > 5 and not training:
            metrics["acc_top5"] = MulticlassAccuracy(outputs, top_k=5, average="micro", validate_args=False)
        return metrics


class Multilabel(LearningTask):
    """The task ``multilabel``: each image has any number of labels.

    The loss is the binary cross-entropy. The metrics are mean average precision and F1.
    """

    quality = "map"

    @override
    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        check_targets(outputs, targets, "multilabel")
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), pos_weight=weights)

    @override
    def values(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    @override
    def averaged(self, first: Tensor, second: Tensor) -> Tensor:
        present = torch.logaddexp(F.logsigmoid(first), F.logsigmoid(second))
        return present - torch.logaddexp(F.logsigmoid(-first), F.logsigmoid(-second))

    @override
    def compared(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # The metrics get probabilities. If all logits were in [0, 1], the metrics would take them for probabilities.
        return outputs.sigmoid(), targets.long()

    @override
    def metrics(self, outputs: int, training: bool) -> dict[str, Metric]:
        return {  # Both metrics are means over the labels.
            "map": MultilabelAveragePrecision(outputs, thresholds=THRESHOLDS, validate_args=False),
            "f1": MultilabelF1Score(outputs, validate_args=False),
        }


class Regression(LearningTask):
    """The task ``regression``: each image has one or more numbers.

    The loss is the mean squared error. The metrics are the mean absolute error and the root of the mean squared error.
    """

    least, quality, predicted = 1, "mae", "values"

    @override
    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None, label_smoothing: float) -> Tensor:
        check_targets(outputs, targets, "regression")
        return F.mse_loss(outputs, targets.to(outputs.dtype))

    @override
    def values(self, outputs: Tensor) -> Tensor:
        return outputs

    @override
    def averaged(self, first: Tensor, second: Tensor) -> Tensor:
        return (first + second) / 2

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
    """Refuse targets that do not have one number for each output."""
    if targets.shape != outputs.shape:
        raise ConfigurationError(
            f"task={task} needs targets of shape {tuple(outputs.shape)}, one number for each output, but the data has "
            f"targets of shape {tuple(targets.shape)}: use ImageTableDataModule, or task=classes for class indices"
        )
