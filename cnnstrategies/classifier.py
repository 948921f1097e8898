"""`ImageClassifier`, the LightningModule that every strategy can train."""

import os
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy
from torchvision.transforms import v2

from cnnstrategies._lightning_private import built_by_cli
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.logits import check_logits, main_logits
from cnnstrategies.seeds import mixed_seed

Batch = tuple[Tensor, Tensor]


class ImageClassifier(LightningModule):
    """Trains any CNN to classify images.

    Its steps call ``self.network(images)`` once, and :meth:`loss` is the mean loss over a batch. Batches are
    ``(images, targets)`` with images (N, C, H, W) and targets (N,), or ``(images, indices)`` for predict.

    Logged, over all samples of all ranks, each counted once: ``train_loss``, ``train_acc``, ``val_loss``,
    ``val_acc``, and with more than five classes ``val_acc_top5``; ``test_...`` likewise. ``train_loss_step`` is
    the last batch of rank 0 alone.

    Args:
        network: Any module that maps images to logits (N, num_classes): a torchvision builder,
            ``timm.create_model``, a class or function of your own, or one of :mod:`cnnstrategies.networks`.
            Auxiliary logits, as GoogLeNet and Inception return them in training, are understood.
        num_classes: Number of classes.
        optimizer: Builds the optimizer from the parameters; AdamW with its defaults when left out.
        lr_scheduler: Builds the learning-rate scheduler from the optimizer; none when left out.
        lr_interval: Whether the scheduler advances after each epoch or after each optimizer step.
        label_smoothing: Share of the target mass spread over all classes, in [0, 1).
        mixup_alpha: Mixes pairs of training images (Zhang et al. 2018) with a weight from Beta(alpha, alpha);
            0 turns it off.
        cutmix_alpha: Pastes a rectangle of one training image into another (Yun et al. 2019); 0 turns it off.
            With both on, each batch draws one of the two.
        aux_weight: Weight of the loss of each auxiliary classifier.
        channels_last: Store images and weights with the channels innermost, which is faster on GPUs with tensor
            cores and on recent CPUs.
        compile_backend: Compile the network with this ``torch.compile`` backend, for example ``inductor``; not
            compiled when left out.

    Raises:
        ConfigurationError: A number is out of its range, or the data or the network has another number of classes.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
        label_smoothing: float = 0.0,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        aux_weight: float = 0.4,
        channels_last: bool = False,
        compile_backend: str | None = None,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ConfigurationError(f"num_classes={num_classes}: a classifier needs at least 2 classes")
        if not 0 <= label_smoothing < 1:
            raise ConfigurationError(f"label_smoothing={label_smoothing} is outside [0, 1); 0.1 is usual")
        for name, value in (
            ("mixup_alpha", mixup_alpha),
            ("cutmix_alpha", cutmix_alpha),
            ("aux_weight", aux_weight),
        ):
            if value < 0:
                raise ConfigurationError(f"{name}={value} is negative; use 0 to turn it off")
        # Objects cannot be stored in a checkpoint that loads with weights_only=True; a configuration can.
        self.save_hyperparameters(ignore=None if built_by_cli() else ["network", "optimizer", "lr_scheduler"])
        self.network = network.to(memory_format=torch.channels_last) if channels_last else network
        self.num_classes = num_classes
        # Not the argument's default: jsonargparse would pass AdamW's weight decay on to the optimizer chosen instead.
        self.optimizer_factory = torch.optim.AdamW if optimizer is None else optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.lr_interval = lr_interval
        self.label_smoothing = label_smoothing
        self.aux_weight = aux_weight
        self.channels_last = channels_last
        self.compile_backend = compile_backend
        mixers: list[nn.Module] = []
        if mixup_alpha:
            mixers.append(v2.MixUp(alpha=mixup_alpha, num_classes=num_classes))
        if cutmix_alpha:
            mixers.append(v2.CutMix(alpha=cutmix_alpha, num_classes=num_classes))
        self.mix = v2.RandomChoice(mixers) if mixers else None
        self.train_metrics = _metrics(num_classes, top5=False)
        self.val_metrics = _metrics(num_classes, top5=num_classes > 5)
        self.test_metrics = _metrics(num_classes, top5=num_classes > 5)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The mean cross-entropy of a batch.

        Args:
            outputs: What the network returned: logits (N, num_classes), or a tuple of the main logits followed by
                those of auxiliary classifiers.
            targets: Class indices (N,) or class probabilities (N, num_classes).

        Returns:
            A scalar.

        Raises:
            ConfigurationError: The logits have another shape.
        """
        check_logits(outputs, len(targets), self.num_classes)
        main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = F.cross_entropy(main, targets, label_smoothing=self.label_smoothing)
        for logits in auxiliary:
            if logits is not None:
                loss = loss + self.aux_weight * F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        return loss

    def loss_weight(self, targets: Tensor) -> int:
        """How much the mean :meth:`loss` of a batch of such targets counts in that of several: its samples.

        It belongs to :meth:`loss`: a subclass with another one has another weight, or none.
        """
        return len(targets)

    def check_data(self, datamodule: LightningDataModule | None) -> None:
        """Refuse data with another number of classes.

        Args:
            datamodule: Its ``num_classes`` is compared, if it has one.

        Raises:
            ConfigurationError: It is not the model's.
        """
        classes = getattr(datamodule, "num_classes", self.num_classes)
        if classes != self.num_classes:
            raise ConfigurationError(
                f"the model has num_classes={self.num_classes}, but {type(datamodule).__name__} has {classes}: "
                f"set model.init_args.num_classes={classes}"
            )

    def setup(self, stage: str) -> None:
        """Check the data against the model and compile the network."""
        self.check_data(getattr(self.trainer, "datamodule", None))
        if self.compile_backend is not None:
            self.network.compile(backend=self.compile_backend)

    def on_fit_start(self) -> None:
        """Start the metrics anew: `validate` leaves them with tensors that only inference mode may update."""
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Seed the random numbers of this training step (dropout, mixup) from (seed, step, rank).

        A resumed run so draws what the uninterrupted one would have drawn, without states in the checkpoint.
        """
        seed = os.environ.get("PL_GLOBAL_SEED")
        if self.trainer.training and seed is not None:
            step = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
            torch.manual_seed(mixed_seed(int(seed), step, self.global_rank))
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Mix training images and choose the memory format, on the device."""
        images, targets = batch
        if self.trainer.training and self.mix is not None:
            images, targets = self.mix(images, targets)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, targets

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a training batch."""
        images, targets = batch
        outputs = self.network(images)
        loss = self.loss(outputs, targets)
        self.log_step("train", outputs, targets, loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a validation batch to the metrics."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a test batch to the metrics."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Classify a batch of ``(images, indices)``.

        Returns:
            ``index`` (N,), the positions in the predict dataset, and ``probabilities`` (N, num_classes).
        """
        images, indices = batch
        outputs = self.network(images)
        check_logits(outputs, len(images), self.num_classes)
        return {"index": indices, "probabilities": main_logits(outputs).float().softmax(dim=1)}

    def log_step(self, stage: Literal["train", "val", "test"], outputs: Any, targets: Tensor, loss: Tensor) -> None:
        """Add a batch to a stage's metrics and log them.

        Args:
            stage: Which metrics.
            outputs: What the network returned for the batch.
            targets: Class indices (N,) or class probabilities (N, num_classes).
            loss: Mean loss over the batch.
        """
        logits = main_logits(outputs).detach()
        check_logits(logits, len(targets), self.num_classes)  # The loss of a subclass may not check.
        classes = targets.argmax(dim=1) if targets.ndim == 2 else targets
        metrics = getattr(self, f"{stage}_metrics")
        for name, metric in metrics.items():
            if name == "loss":
                metric.update(loss.detach(), weight=len(targets))
            else:
                metric.update(logits, classes)
            on_bar = f"{stage}_{name}" in ("train_loss", "val_loss", "val_acc", "test_acc")
            self.log(f"{stage}_{name}", metric, on_step=False, on_epoch=True, prog_bar=on_bar)
        if stage == "train":
            self.log("train_loss_step", loss.detach(), on_step=True, on_epoch=False)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer and the scheduler over the parameters that are trained."""
        optimizer = self.optimizer_factory([p for p in self.parameters() if p.requires_grad])
        if self.lr_scheduler_factory is None:
            return optimizer
        scheduler = self.lr_scheduler_factory(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "monitor": scheduler.monitor},
            }
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.lr_interval},
        }

    def _evaluate(self, stage: Literal["val", "test"], batch: Batch) -> None:
        images, targets = batch
        outputs = self.network(images)
        self.log_step(stage, outputs, targets, self.loss(outputs, targets))


def _metrics(num_classes: int, top5: bool) -> nn.ModuleDict:
    metrics: dict[str, Metric] = {
        "loss": MeanMetric(),
        "acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
    }
    if top5:
        metrics["acc_top5"] = MulticlassAccuracy(num_classes, top_k=5, average="micro", validate_args=False)
    return nn.ModuleDict(metrics)
