"""`DetectionModule`, a LightningModule that trains a network to find objects and their boxes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.ssd import SSD

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.detection_quality import REPORTED, DetectionQuality, coco_backend
from cnnstrategies.models.network_module import ON_BAR, MeanOverSamples, NetworkModule

# How a detector's loss divides a sum over the images of a batch.
# "samples": the loss is a mean over the images.
# "own": the loss divides by the number of foreground anchors of the batch, or by 1 if there are none.
# "unknown": the detector is not one of torchvision's.
LossDivisor = Literal["samples", "own", "unknown"]
# These detectors have a class for the background, so no box has the label 0.
WITH_BACKGROUND = (SSD, FasterRCNN, GeneralizedRCNN)


def divisor_of(network: nn.Module) -> LossDivisor:
    """Return how the loss of a detector divides the sum over a batch's images."""
    if isinstance(network, (RetinaNet, GeneralizedRCNN)):
        return "samples"
    return "own" if isinstance(network, (FCOS, SSD)) else "unknown"


def samples_boxes(network: nn.Module) -> bool:
    """Whether the loss of a detector samples boxes at random, as those of Faster R-CNN and Mask R-CNN do."""
    return isinstance(network, GeneralizedRCNN)


@contextmanager
def counts_foreground(network: nn.Module, counted: list[Tensor]) -> Iterator[None]:
    """Return a context in which the foreground anchors of each call of FCOS or SSD are counted.

    Args:
        network: The detector. In the context, its ``compute_loss`` or that of its head is an attribute of the object.
        counted: List to which the number of each call is appended, a scalar.
    """
    holder = network.head if isinstance(network, FCOS) else network if isinstance(network, SSD) else None
    if holder is None:
        yield
        return
    compute: Callable[..., Any] = holder.compute_loss

    def compute_and_count(
        targets: Any, head_outputs: Any, anchors: Any, matched_idxs: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        foreground = [(indices >= 0).sum() for indices in matched_idxs]
        counted.append(sum(foreground[1:], foreground[0]))
        losses: dict[str, Tensor] = compute(targets, head_outputs, anchors, matched_idxs)
        return losses

    holder.compute_loss = compute_and_count
    try:
        yield
    finally:
        del holder.compute_loss


Images = Sequence[Tensor]
Targets = Sequence[Mapping[str, Tensor]]
SAMPLED = "boxes of which Faster R-CNN computes its loss are sampled at random, by each process on its own"
PADDED = "images of different sizes are padded to the largest image of each process's own batch"
OWN_FOREGROUND = "the loss divides by the number of foreground boxes of each process's own images"


class DetectionModule(NetworkModule):
    """LightningModule that trains a network to find the objects of an image, their classes and boxes.

    A batch is ``(images, targets)``. The images are a list of float tensors (C, H, W) in [0, 1], which may have
    different sizes. Targets are a list of mappings with ``boxes`` (n, 4) as x1, y1, x2, y2 in pixels and ``labels``
    (n,). Optional are ``iscrowd`` and ``area`` (n,), and ``image_id``, by which an image that is evaluated several
    times counts once. For predict a batch is ``(images, indices)``.

    The module logs ``train_loss``, each part of the loss such as ``train_classification``, and COCO's mean average
    precision ``val_map``, ``val_map_50`` and ``val_map_75``. A test logs the metrics of a validation, with ``test_`` in
    place of ``val_``. These metrics cover the images of all ranks, and count each image once.

    The losses of RetinaNet are means over images. FCOS and SSD divide by the number of foreground boxes in a batch,
    and :meth:`loss_weight` returns this number, so that the weights of a step are those of one device. Faster R-CNN and
    Mask R-CNN sample boxes at random.

    Args:
        network: A detector of torchvision (RetinaNet, FCOS, SSD, Faster R-CNN), or any module that takes images and
            targets and returns a mapping of losses in training, and otherwise takes images and returns for each image a
            mapping with ``boxes``, ``labels`` and ``scores``. The network normalises and resizes the images itself.
        num_classes: Number of classes, including the background, which is class 0.
        optimizer: Function that builds the optimizer from the parameters. The default is AdamW with its own defaults.
        lr_scheduler: Function that builds the learning-rate scheduler from the optimizer. By default there is none.
        lr_interval: Whether the scheduler advances after each epoch or after each optimizer step.
        loss_weights: Weight of each part of the loss, by its name in the network's result; 1 for other parts.
        decay_norms_and_biases: Whether weight decay is also applied to the parameters of normalisations and to biases.
            All parameters with one dimension count as parameters of normalisations or biases.

    Raises:
        ConfigurationError: A number is out of its range, the network returns no losses, the package for the mean
            average precision is missing, or the data do not have boxes or ``num_classes`` classes.
    """

    quality, task = "map", "detection"
    loss = None  # type: ignore[assignment]  # The network computes its loss itself, so no pipeline can call it.
    least_loss_weight = 1  # FCOS and SSD divide by 1 if no box of a batch is foreground.

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
        loss_weights: dict[str, float] | None = None,
        decay_norms_and_biases: bool = True,
    ) -> None:
        super().__init__(
            *(network, num_classes, optimizer, lr_scheduler, lr_interval, decay_norms_and_biases), False, None
        )
        coco_backend()
        for name, weight in (loss_weights or {}).items():
            if weight < 0:
                raise ConfigurationError(f"loss_weights: {name} has the weight {weight}; use 0 or a larger number")
        self.loss_weights = loss_weights or {}
        self.loss_divisor: LossDivisor = divisor_of(network)
        self.train_loss = MeanOverSamples()
        self.val_quality, self.test_quality = DetectionQuality(), DetectionQuality()
        self._foreground: list[Tensor] = []  # Number of foreground boxes in each forward of the last training step.

    # Reason for which each device needs whole images, for strategies that divide images.
    whole_images = "anchors, matching and the selection of boxes need whole images: use strategy ddp or hybrid_pipeline"

    @property
    def divided_submodule(self) -> str | None:
        """Path of the submodule that a pipeline divides: the backbone, because a detector's code cannot be traced."""
        return "network.backbone" if isinstance(getattr(self.network, "backbone", None), nn.Module) else None

    def check_data(self, datamodule: LightningDataModule | None) -> None:
        """Refuse a data module of this package without boxes, or with a number of classes other than the model's."""
        super().check_data(datamodule)
        first = getattr(datamodule, "first_label", None)
        if first is None and hasattr(datamodule, "image_shape"):
            raise ConfigurationError(
                f"{type(datamodule).__name__} has no boxes, which DetectionModule needs: use "
                "DetectionFolderDataModule, or ImageClassifier to classify whole images"
            )
        if first == 0 and isinstance(self.network, WITH_BACKGROUND):
            raise ConfigurationError(
                f"{type(datamodule).__name__} has first_label=0, but {type(self.network).__name__} needs label 0 for "
                "the background: set data.init_args.first_label=1"
            )

    def differences_of_parts(self, weighted: bool) -> list[str]:
        """Return a line for each way in which the loss of a batch differs from the losses of the batch's parts.

        Args:
            weighted: Whether the parts are weighted by :meth:`loss_weight`.
        """
        lines = [SAMPLED] if samples_boxes(self.network) else []
        if self.loss_divisor == "own" and not weighted:
            lines.append(OWN_FOREGROUND)
        datamodule = getattr(self._trainer, "datamodule", None)
        return lines if getattr(datamodule, "has_equal_sizes", False) else [*lines, PADDED]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch unchanged."""
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a training batch: the weighted sum of the network's losses."""
        images, targets = batch
        self._foreground = []
        with counts_foreground(self.network, self._foreground):
            losses = self.network(list(images), [dict(target) for target in targets])
        total = self._total(losses)
        known = self.train_loss.update_called
        # The logged losses are weighted as the gradients are.
        weight = max(1, int(self.loss_weight(targets))) if self.loss_divisor == "own" else len(images)
        self.train_loss.update(total.detach(), weight)
        if not known:
            self.log("train_loss", self.train_loss, on_step=False, on_epoch=True, prog_bar="train_loss" in ON_BAR)
        self.log("train_loss_step", total.detach(), on_step=True, on_epoch=False)
        for name, value in losses.items():
            options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": weight}
            self.log(f"train_{name.removeprefix('loss_')}", value.detach(), sync_dist=True, **options)
        return total

    def loss_weight(self, targets: Any) -> Tensor | int:
        """Return the weight of the last training batch's loss in a mean over several batches.

        This is the number of foreground boxes for FCOS and SSD, and the number of images for other detectors.
        """
        return sum(self._foreground[1:], self._foreground[0]) if self._foreground else len(targets)

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Add a validation batch to the metrics. Return ``detections`` and ``targets``, which callbacks may read."""
        return self._detect(self.val_quality, batch)

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Add a test batch to the metrics. Return ``detections`` and ``targets``, which callbacks may read."""
        return self._detect(self.test_quality, batch)

    def on_validation_epoch_end(self) -> None:
        """Log the mean average precision of the validation."""
        self._log_quality("val", self.val_quality)

    def on_test_epoch_end(self) -> None:
        """Log the mean average precision of the test."""
        self._log_quality("test", self.test_quality)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Predict a batch of ``(images, indices)``.

        Returns:
            A mapping: ``index`` (N,) has the images' positions in the predict dataset, and ``detections`` is a list
            with ``boxes``, ``labels`` and ``scores`` of each image.
        """
        images, indices = batch
        return {"index": indices, "detections": self.network(list(images))}

    def _total(self, losses: Any) -> Tensor:
        if not isinstance(losses, Mapping) or not losses:
            raise ConfigurationError(
                f"{type(self.network).__name__} returned {type(losses).__name__} in training instead of a mapping of "
                "losses: use a network that takes images and targets, as torchvision's detectors do"
            )
        if unknown := sorted(set(self.loss_weights) - set(losses)):
            raise ConfigurationError(
                f"loss_weights has {unknown[0]!r}, but the losses of {type(self.network).__name__} are "
                f"{', '.join(losses)}: correct model.init_args.loss_weights"
            )
        return torch.stack([self.loss_weights.get(name, 1.0) * value for name, value in losses.items()]).sum()

    def _detect(self, quality: DetectionQuality, batch: tuple[Images, Targets]) -> dict[str, Any]:
        images, targets = batch
        detections = self.network(list(images))
        quality.update(detections, targets)
        return {"detections": detections, "targets": targets}

    def _log_quality(self, stage: str, quality: DetectionQuality) -> None:
        quality.update([], [])  # A rank without a batch takes part in the exchange of the rows.
        result = quality.compute()
        quality.reset()
        for name in REPORTED:
            key = f"{stage}_{name}"
            self.log(key, result[name].to(self.device), prog_bar=key in ON_BAR, sync_dist=True)
