"""`ImageSegmenter`, a LightningModule that trains a network to assign a class to each pixel of an image."""

from typing import Any, Literal

import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.logits import main_logits
from cnnstrategies.models.network_module import Batch, MeanOverSamples, NetworkModule


class ImageSegmenter(NetworkModule):
    """LightningModule that trains a network for semantic segmentation: each pixel gets a class.

    A step calls ``self.network(images)`` once. A batch is ``(images, masks)`` with images (N, C, H, W) and masks
    (N, H, W) that have the class of each pixel, or ``(images, indices)`` for predict. The loss of an image is the mean
    over its pixels, and :meth:`loss` is the mean over the images. The result of training therefore does not depend on
    how the images are divided among the devices.

    The module logs ``train_loss``, ``val_loss``, ``val_miou`` (mean intersection over union of the classes) and
    ``val_pixel_acc``. A test logs the metrics of a validation, with ``test_`` in place of ``val_``. These metrics cover
    the samples of all ranks, and count each sample once.

    Args:
        network: Any module that maps images to logits (N, num_classes, H, W), or to a dict with these logits in ``out``
            and auxiliary logits in ``aux``, as torchvision's FCN and DeepLab do.
        num_classes: Number of classes, including the background.
        optimizer: Function that builds the optimizer from the parameters. The default is AdamW with its own defaults.
        lr_scheduler: Function that builds the learning-rate scheduler from the optimizer. By default there is none.
        lr_interval: Whether the scheduler advances after each epoch or after each optimizer step.
        ignore_index: Value of a mask's pixels that the loss and the metrics ignore.
        aux_weight: Weight of the loss of the auxiliary logits.
        decay_norms_and_biases: Whether weight decay is also applied to the parameters of normalisations and to biases.
            All parameters with one dimension count as parameters of normalisations or biases.
        channels_last: Whether to store images and weights in torch's ``channels_last`` memory format, which is faster
            on GPUs with tensor cores and on recent CPUs.
        compile_backend: Backend of ``torch.compile``, for example ``inductor``, with which the network is compiled. The
            network is not compiled when this argument is left out.

    Raises:
        ConfigurationError: A number is out of its range, or the data or the network do not have ``num_classes``
            classes.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
        ignore_index: int = 255,
        aux_weight: float = 0.5,
        decay_norms_and_biases: bool = True,
        channels_last: bool = False,
        compile_backend: str | None = None,
    ) -> None:
        super().__init__(
            *(network, num_classes, optimizer, lr_scheduler, lr_interval, decay_norms_and_biases),
            *(channels_last, compile_backend),
        )
        if aux_weight < 0:
            raise ConfigurationError(f"aux_weight={aux_weight} is negative; use 0 or a larger number")
        self.ignore_index = ignore_index
        self.aux_weight = aux_weight
        self.train_metrics = nn.ModuleDict({"loss": MeanOverSamples()})
        self.val_metrics = self._metrics()
        self.test_metrics = self._metrics()

    quality = "miou"

    def check_data(self, datamodule: LightningDataModule | None) -> None:
        """Refuse the data module if it has no masks, or if its classes or ``ignore_index`` differ from the model's."""
        super().check_data(datamodule)
        if not isinstance(datamodule, ImageDataModule) or datamodule.ignore_index == self.ignore_index:
            return
        name, ignore_index = type(datamodule).__name__, datamodule.ignore_index
        if ignore_index is None:
            raise ConfigurationError(
                f"{name} has no masks, which ImageSegmenter needs: use SegmentationFolderDataModule, or "
                "ImageClassifier to classify whole images"
            )
        raise ConfigurationError(
            f"the model has ignore_index={self.ignore_index}, but {name} has ignore_index={ignore_index}: set "
            f"model.init_args.ignore_index={ignore_index}"
        )

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the cross-entropy of a batch: the mean over the pixels of each image, and then over the images.

        If all pixels of an image are ignored, the loss of this image is 0.

        Args:
            outputs: The network's outputs: logits (N, num_classes, H, W), or a dict with these logits in ``out``.
            targets: Class of each pixel (N, H, W).

        Returns:
            A scalar.

        Raises:
            ConfigurationError: The logits do not have the shape (N, num_classes, H, W).
        """
        total = self._loss(main_logits(outputs), targets)
        if isinstance(outputs, dict) and "aux" in outputs:
            total = total + self.aux_weight * self._loss(outputs["aux"], targets)
        return total

    def loss_weight(self, targets: Tensor) -> int:
        """Return the number of images, which is the weight of a batch's :meth:`loss` in a mean over several batches."""
        return len(targets)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Predict a batch of ``(images, indices)``.

        Returns:
            A mapping: ``index`` (N,) has the images' positions in the predict dataset, and ``masks`` (N, H, W) the
            most probable class of each pixel.
        """
        images, indices = batch
        logits = main_logits(self.network(images))
        check_map(logits, (len(images), self.num_classes, *images.shape[2:]))
        return {"index": indices, "masks": logits.argmax(dim=1)}

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        check_map(logits, (len(targets), self.num_classes, *targets.shape[1:]))
        losses = F.cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction="none").flatten(1)
        counted = (targets != self.ignore_index).flatten(1).sum(dim=1).clamp(min=1)
        return (losses.sum(dim=1) / counted).mean()

    def _metrics(self) -> nn.ModuleDict:
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "validate_args": False}
        return nn.ModuleDict(
            {
                "loss": MeanOverSamples(),
                "miou": MulticlassJaccardIndex(self.num_classes, average="macro", **options),
                "pixel_acc": MulticlassAccuracy(self.num_classes, average="micro", **options),
            }
        )


def check_map(logits: Any, expected: tuple[int, ...]) -> None:
    """Refuse logits of a wrong shape. For some wrong shapes torch would compute a wrong loss without an error."""
    if isinstance(logits, Tensor) and tuple(logits.shape) == expected:
        return
    returned = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
    raise ConfigurationError(
        f"the network returned {returned} instead of logits of shape {expected}: use a network that returns logits for "
        f"num_classes={expected[1]}, with the height and width of the images"
    )
