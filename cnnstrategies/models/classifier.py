"""`ImageClassifier`, the LightningModule that every strategy can train."""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchvision.transforms import v2

from cnnstrategies._lightning_private import built_by_cli
from cnnstrategies.data.module import ImageDataModule, TaskName
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.logits import check_logits, main_logits
from cnnstrategies.models.network_module import Batch, MeanOverSamples, NetworkModule
from cnnstrategies.models.tasks import TASKS


class ImageClassifier(NetworkModule):
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
        num_classes: Number of classes, of labels or of numbers.
        optimizer: Builds the optimizer from the parameters; AdamW with its defaults when left out.
        lr_scheduler: Builds the learning-rate scheduler from the optimizer; none when left out.
        lr_interval: Whether the scheduler advances after each epoch or after each optimizer step.
        task: ``classes``: each image has one class. ``multilabel``: it has any number of labels; targets are zeros and
            ones (N, num_classes), the loss is the binary cross-entropy, and ``val_map`` and ``val_f1`` are logged, the
            means over the labels of average precision and F1. ``regression``: targets are numbers (N, num_classes), the
            loss is the mean squared error, and ``val_mae`` and ``val_rmse`` are logged.
        class_weights: How much an image of each class counts in the loss, which is the mean over a batch's images and
            not over their weights. With ``multilabel`` how much it counts that an image has a label, in proportion to
            that it has not.
        label_smoothing: Share of the target mass spread over all classes, in [0, 1).
        mixup_alpha: Mixes pairs of training images (Zhang et al. 2018) with a weight from Beta(alpha, alpha);
            0 turns it off.
        cutmix_alpha: Pastes a rectangle of one training image into another (Yun et al. 2019); 0 turns it off.
            With both on, each batch draws one of the two.
        decay_norms_and_biases: Whether the optimizer's weight decay is that of normalisations and biases, which are the
            parameters of one dimension, too.
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
        task: TaskName = "classes",
        class_weights: list[float] | None = None,
        label_smoothing: float = 0.0,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        decay_norms_and_biases: bool = True,
        aux_weight: float = 0.4,
        channels_last: bool = False,
        compile_backend: str | None = None,
    ) -> None:
        super().__init__(
            *(network, num_classes, optimizer, lr_scheduler, lr_interval, decay_norms_and_biases),
            *(channels_last, compile_backend),
            least=TASKS[task].least,
        )
        if task != "classes" and (label_smoothing or mixup_alpha or cutmix_alpha):
            raise ConfigurationError(
                f"label_smoothing, mixup and cutmix are for task=classes, and task={task}: set them to 0"
            )
        if task == "regression" and class_weights is not None:
            raise ConfigurationError("class_weights with task=regression: numbers have no classes; leave them out")
        if not 0 <= label_smoothing < 1:
            raise ConfigurationError(f"label_smoothing={label_smoothing} is outside [0, 1); 0.1 is usual")
        for name, value in (
            ("mixup_alpha", mixup_alpha),
            ("cutmix_alpha", cutmix_alpha),
            ("aux_weight", aux_weight),
        ):
            if value < 0:
                raise ConfigurationError(f"{name}={value} is negative; use 0 to turn it off")
        if class_weights is not None and (len(class_weights) != num_classes or min(class_weights) < 0):
            raise ConfigurationError(
                f"class_weights={class_weights}: a number from 0 on for each of the {num_classes} classes is needed"
            )
        # Objects cannot be stored in a checkpoint that loads with weights_only=True; a configuration can.
        self.save_hyperparameters(ignore=None if built_by_cli() else ["network", "optimizer", "lr_scheduler"])
        self.task = task
        self.learns = TASKS[task]
        self.quality = self.learns.quality
        self.label_smoothing = label_smoothing
        # Of the configuration, and so of no checkpoint.
        weights = None if class_weights is None else torch.tensor(class_weights)
        self.register_buffer("class_weights", weights, persistent=False)
        self.class_weights: Tensor | None
        self.aux_weight = aux_weight
        mixers: list[nn.Module] = []
        if mixup_alpha:
            mixers.append(v2.MixUp(alpha=mixup_alpha, num_classes=num_classes))
        if cutmix_alpha:
            mixers.append(v2.CutMix(alpha=cutmix_alpha, num_classes=num_classes))
        self.mix = v2.RandomChoice(mixers) if mixers else None
        self.train_metrics, self.val_metrics, self.test_metrics = (
            nn.ModuleDict({"loss": MeanOverSamples(), **self.learns.metrics(num_classes, training)})
            for training in (True, False, False)
        )

    def check_data(self, datamodule: LightningDataModule | None) -> None:
        """Refuse data with another number of classes, for another task, or with masks."""
        super().check_data(datamodule)
        if isinstance(datamodule, ImageDataModule) and datamodule.task != self.task:
            raise ConfigurationError(
                f"the model has task={self.task}, and {type(datamodule).__name__} has targets for {datamodule.task}: "
                f"set model.init_args.task={datamodule.task}, or take ImageTableDataModule with task={self.task}"
            )
        if getattr(datamodule, "ignore_index", None) is not None:
            raise ConfigurationError(
                f"{type(datamodule).__name__} has masks, and ImageClassifier learns classes of whole images: take "
                "ImageSegmenter, or data without masks"
            )

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """The mean over the images of a batch of what the task says, for classes their cross-entropy.

        Args:
            outputs: What the network returned: logits (N, num_classes), or a tuple of the main logits followed by
                those of auxiliary classifiers.
            targets: Class indices (N,) or class probabilities (N, num_classes); for other tasks numbers (N,
                num_classes).

        Returns:
            A scalar.

        Raises:
            ConfigurationError: The logits have another shape.
        """
        check_logits(outputs, len(targets), self.num_classes)
        main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
        # On the device of the stage that computes the loss, where that is not the module's.
        weights = None if self.class_weights is None else self.class_weights.to(main)
        loss = self.learns.loss(main, targets, weights, self.label_smoothing)
        for logits in auxiliary:
            if logits is not None:
                loss = loss + self.aux_weight * self.learns.loss(logits, targets, weights, self.label_smoothing)
        return loss

    def loss_weight(self, targets: Tensor) -> int:
        """How much the mean :meth:`loss` of a batch of such targets counts in that of several: its samples.

        It belongs to :meth:`loss`: a subclass with another one has another weight, or none.
        """
        return len(targets)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Mix training images and choose the memory format, on the device."""
        if self.mix is not None and self.trainer.training:
            batch = self.mix(*batch)
        return super().on_after_batch_transfer(batch, dataloader_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Classify a batch of ``(images, indices)``.

        ``index`` (N,) are the positions in the predict dataset, ``probabilities`` (N, num_classes) those of the
        classes, of labels each by itself; a regression has ``values``.
        """
        images, indices = batch
        outputs = self.network(images)
        check_logits(outputs, len(images), self.num_classes)
        return {"index": indices, self.learns.predicted: self.learns.values(main_logits(outputs).float())}

    def log_step(self, stage: Literal["train", "val", "test"], outputs: Any, targets: Tensor, loss: Tensor) -> None:
        """Add a batch to a stage's metrics and log them."""
        logits = main_logits(outputs)
        check_logits(logits, len(targets), self.num_classes)  # The loss of a subclass may not check.
        super().log_step(stage, logits, targets, loss)

    def compared(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the metrics take."""
        return self.learns.compared(logits, targets)
