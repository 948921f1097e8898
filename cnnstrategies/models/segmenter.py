"""`ImageSegmenter`, the LightningModule that assigns a class to each pixel."""

from typing import Any, Literal

import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from cnnstrategies._lightning_private import built_by_cli
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.logits import main_logits
from cnnstrategies.models.network_module import Batch, MeanOverSamples, NetworkModule


class ImageSegmenter(NetworkModule):
    """Trains any network to segment images.

    Its steps call ``self.network(images)`` once. Batches are ``(images, masks)`` with images (N, C, H, W) and masks
    (N, H, W) of classes, or ``(images, indices)`` for predict. :meth:`loss` is the mean of the images' losses, and an
    image's loss is the mean over its pixels, so the loss does not depend on how the images are divided over devices.

    The module logs ``train_loss``, ``val_loss``, ``val_miou`` (intersection of prediction and truth divided by their
    union, as a mean over the classes) and ``val_pixel_acc``, and the same metrics as ``test_...``. Each sample of each
    rank counts once.

    Args:
        network: Any module that maps images to logits (N, num_classes, H, W), or to a dict with these logits in ``out``
            and auxiliary logits in ``aux``, as torchvision's FCN and DeepLab do.
        num_classes: Number of classes, background included.
        optimizer: Builds the optimizer from the parameters; AdamW with its defaults when left out.
        lr_scheduler: Builds the learning-rate scheduler from the optimizer; none when left out.
        lr_interval: Whether the scheduler advances after each epoch or after each optimizer step.
        ignore_index: Pixels with this value in a mask do not count, neither in the loss nor in the metrics.
        aux_weight: Weight of the loss of the auxiliary logits.
        decay_norms_and_biases: Whether the optimizer's weight decay also applies to normalisations and biases, which
            are the parameters of one dimension.
        channels_last: Store images and weights with the channels innermost, which is faster on GPUs with tensor
            cores and on recent CPUs.
        compile_backend: Compile the network with this ``torch.compile`` backend, for example ``inductor``; not
            compiled when left out.

    Raises:
        ConfigurationError: A number is out of range, or the data or the network has another number of classes.
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
            raise ConfigurationError(f"aux_weight={aux_weight} is negative; use 0 to turn it off")
        # Objects cannot be stored in a checkpoint that loads with weights_only=True; a configuration can.
        self.save_hyperparameters(ignore=None if built_by_cli() else ["network", "optimizer", "lr_scheduler"])
        self.ignore_index = ignore_index
        self.aux_weight = aux_weight
        self.train_metrics = nn.ModuleDict({"loss": MeanOverSamples()})
        self.val_metrics = self._metrics()
        self.test_metrics = self._metrics()

    quality = "miou"

    def check_data(self, datamodule: LightningDataModule | None) -> None:
        """Refuse data with another number of classes, without masks, or with another ``ignore_index``."""
        super().check_data(datamodule)
        if not isinstance(datamodule, ImageDataModule) or datamodule.ignore_index == self.ignore_index:
            return
        name, ignore_index = type(datamodule).__name__, datamodule.ignore_index
        if ignore_index is None:
            raise ConfigurationError(
                f"{name} has no masks, which ImageSegmenter needs: use SegmentationFolderDataModule; for classes of "
                "whole images use ImageClassifier"
            )
        raise ConfigurationError(
            f"the model has ignore_index={self.ignore_index}, but {name} has ignore_index={ignore_index}: set "
            f"model.init_args.ignore_index={ignore_index}"
        )

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean over a batch's images of the cross-entropy, which is itself a mean over an image's pixels.

        Args:
            outputs: The network's outputs: logits (N, num_classes, H, W), or a dict with these logits in ``out``.
            targets: Classes (N, H, W). An image in which no pixel counts has the loss 0.

        Returns:
            A scalar.

        Raises:
            ConfigurationError: The logits have another shape.
        """
        total = self._loss(main_logits(outputs), targets)
        if isinstance(outputs, dict) and "aux" in outputs:
            total = total + self.aux_weight * self._loss(outputs["aux"], targets)
        return total

    def loss_weight(self, targets: Tensor) -> int:
        """Return the weight of this batch's :meth:`loss` in a mean over several batches: its number of images."""
        return len(targets)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the ``index`` (N,) of each image in the predict dataset, and ``masks`` (N, H, W) of classes."""
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
    """Refuse logits of another shape: some shapes would train without an error, with another meaning."""
    if isinstance(logits, Tensor) and tuple(logits.shape) == expected:
        return
    returned = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
    raise ConfigurationError(
        f"the network returned {returned}, and shape {expected} is needed: logits for num_classes={expected[1]}, with "
        "the height and width of the images"
    )
