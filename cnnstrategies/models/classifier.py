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

    The module logs ``train_loss``, ``train_acc``, ``val_loss``, ``val_acc``, with more than five classes
    ``val_acc_top5``, and the same metrics as ``test_...``. Each sample of each rank counts once. ``train_loss_step`` is
    the loss of rank 0's last batch.

    Args:
        network: Any module that maps images to logits (N, num_classes): a torchvision builder,
            ``timm.create_model``, a class or function of your own, or one of :mod:`cnnstrategies.networks`.
            It may also return auxiliary logits, as GoogLeNet and Inception do in training.
        num_classes: Number of the network's outputs for an image: classes, labels or numbers, depending on ``task``.
        optimizer: Builds the optimizer from the parameters; AdamW with its defaults when left out.
        lr_scheduler: Builds the learning-rate scheduler from the optimizer; none when left out.
        lr_interval: Whether the scheduler advances after each epoch or after each optimizer step.
        task: With ``classes`` each image has one class. With ``multilabel`` an image has any number of labels; targets
            are zeros and ones (N, num_classes), the loss is the binary cross-entropy, and the means over the labels of
            average precision and F1 are logged as ``val_map`` and ``val_f1``. With ``regression`` targets are numbers
            (N, num_classes), the loss is the mean squared error, and ``val_mae`` and ``val_rmse`` are logged.
        class_weights: Weight of each class in the loss. The loss is the sum of the weighted losses of a batch's images,
            divided by the number of images and not by the sum of the weights. With ``multilabel`` the weight of images
            that have a label, relative to images that do not have it.
        label_smoothing: Share of the target mass that is spread over all classes, in [0, 1).
        mixup_alpha: Mix pairs of training images (Zhang et al. 2018) with a weight from Beta(alpha, alpha); 0 turns
            mixup off.
        cutmix_alpha: Paste a rectangle of one training image into another (Yun et al. 2019); 0 turns CutMix off. If
            both are on, one of the two is drawn for each batch.
        decay_norms_and_biases: Whether the optimizer's weight decay also applies to normalisations and biases, which
            are the parameters of one dimension.
        aux_weight: Weight of the loss of each auxiliary classifier.
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
                f"label_smoothing, mixup_alpha and cutmix_alpha need task=classes, and the model has task={task}: set "
                "them to 0"
            )
        if task == "regression" and class_weights is not None:
            raise ConfigurationError("class_weights with task=regression: a regression has no classes; leave them out")
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
                f"class_weights={class_weights}: give {num_classes} numbers that are at least 0, one for each class"
            )
        # Objects cannot be stored in a checkpoint that loads with weights_only=True; a configuration can.
        self.save_hyperparameters(ignore=None if built_by_cli() else ["network", "optimizer", "lr_scheduler"])
        self.task = task
        self.learning_task = TASKS[task]
        self.quality = self.learning_task.quality
        self.label_smoothing = label_smoothing
        # Not persistent: the weights come from the configuration and are not part of a checkpoint.
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
            nn.ModuleDict({"loss": MeanOverSamples(), **self.learning_task.metrics(num_classes, training)})
            for training in (True, False, False)
        )

    def check_data(self, datamodule: LightningDataModule | None) -> None:
        """Refuse data with another number of classes, data for another task, and data with masks."""
        super().check_data(datamodule)
        if isinstance(datamodule, ImageDataModule) and datamodule.task != self.task:
            raise ConfigurationError(
                f"the model has task={self.task}, and {type(datamodule).__name__} has targets for {datamodule.task}: "
                f"set model.init_args.task={datamodule.task}, or use ImageTableDataModule with task={self.task}"
            )
        if getattr(datamodule, "ignore_index", None) is not None:
            raise ConfigurationError(
                f"{type(datamodule).__name__} has masks, and ImageClassifier learns classes of whole images: use "
                "ImageSegmenter, or data without masks"
            )

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean over a batch's images of the task's loss; for ``task=classes`` this is the cross-entropy.

        Args:
            outputs: The network's outputs: logits (N, num_classes), or a tuple of the main logits followed by the
                logits of auxiliary classifiers.
            targets: Class indices (N,) or class probabilities (N, num_classes); for other tasks numbers
                (N, num_classes).

        Returns:
            A scalar.

        Raises:
            ConfigurationError: The logits have another shape.
        """
        check_logits(outputs, len(targets), self.num_classes)
        main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
        # In a pipeline the stage that computes the loss may be on another device than the module.
        weights = None if self.class_weights is None else self.class_weights.to(main)
        loss = self.learning_task.loss(main, targets, weights, self.label_smoothing)
        for logits in auxiliary:
            if logits is not None:
                loss = loss + self.aux_weight * self.learning_task.loss(logits, targets, weights, self.label_smoothing)
        return loss

    def loss_weight(self, targets: Tensor) -> int:
        """Return the weight of this batch's :meth:`loss` in a mean over several batches: its number of samples.

        A subclass that overrides :meth:`loss` must also override this method if its loss has another weight.
        """
        return len(targets)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Mix training images and set the memory format, on the device."""
        if self.mix is not None and self.trainer.training:
            batch = self.mix(*batch)
        return super().on_after_batch_transfer(batch, dataloader_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Predict a batch of ``(images, indices)``.

        Returns:
            ``index`` (N,), the positions in the predict dataset, and ``probabilities`` (N, num_classes) of the classes
            or of each label; for a regression ``values`` (N, num_classes) instead of probabilities.
        """
        images, indices = batch
        outputs = self.network(images)
        check_logits(outputs, len(images), self.num_classes)
        return {"index": indices, self.learning_task.predicted: self.learning_task.values(main_logits(outputs).float())}

    def log_step(self, stage: Literal["train", "val", "test"], outputs: Any, targets: Tensor, loss: Tensor) -> None:
        """Add a batch to a stage's metrics and log them."""
        logits = main_logits(outputs)
        check_logits(logits, len(targets), self.num_classes)  # The loss of a subclass may not check.
        super().log_step(stage, logits, targets, loss)

    def compared(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets in the form that the task's metrics take."""
        return self.learning_task.compared(logits, targets)
