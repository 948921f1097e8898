"""`ImageClassifier`, a LightningModule that trains a network to classify images."""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchvision.transforms import v2

from cnnstrategies.data.module import ImageDataModule, TaskName
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.logits import check_logits, main_logits
from cnnstrategies.models.network_module import Batch, MeanOverSamples, NetworkModule
from cnnstrategies.models.tasks import TASKS

# Numbers, or the weights that balance the classes of the training images.
ClassWeights = list[float] | Literal["balanced"]


class ImageClassifier(NetworkModule):
    """LightningModule that trains a network to classify images. Every strategy can train this module.

    A step calls ``self.network(images)`` once. :meth:`loss` is the mean loss over a batch. A batch is
    ``(images, targets)`` with images (N, C, H, W) and targets (N,), or ``(images, indices)`` for predict.

    The module logs ``train_loss``, ``train_acc``, ``val_loss`` and ``val_acc``. With more than five classes it also
    logs ``val_acc_top5``. A test logs the metrics of a validation, with ``test_`` in place of ``val_``. These metrics
    cover the samples of all ranks, and count each sample once. ``train_loss_step`` is the loss of rank 0's last batch.

    Args:
        network: Any module that maps images to logits (N, num_classes). A configuration can build it with a function of
            torchvision, with ``timm.create_model``, with a class or function of your own, or with one of
            :mod:`cnnstrategies.networks`. The network may also return auxiliary logits, as GoogLeNet and Inception do
            in training.
        num_classes: Number of the network's outputs for an image: classes, labels or numbers, depending on ``task``.
        optimizer: Function that builds the optimizer from the parameters. The default is AdamW with its own defaults.
        lr_scheduler: Function that builds the learning-rate scheduler from the optimizer. By default there is none.
        lr_interval: Whether the scheduler advances after each epoch or after each optimizer step.
        task: With ``classes`` each image has one class. With ``multilabel`` an image has any number of labels. Targets
            are then zeros and ones (N, num_classes), and the loss is the binary cross-entropy. The average precision
            and the F1 score, as means over the labels, are logged as ``val_map`` and ``val_f1``. With ``regression``
            the targets are numbers (N, num_classes), and the loss is the mean squared error. ``val_mae`` and
            ``val_rmse`` are logged.
        class_weights: Weight of each class in the loss. The weighted losses of a batch's images are summed and divided
            by the number of images, not by the sum of the weights. ``balanced`` is n / (num_classes * n_c) for a class
            c with n_c of the n training images. With ``multilabel``: weight of the positive examples of each label, see
            ``pos_weight`` of ``torch.nn.BCEWithLogitsLoss``.
        label_smoothing: Label smoothing as in ``torch.nn.CrossEntropyLoss``, in [0, 1).
        mixup_alpha: Parameter alpha of mixup (Zhang et al. 2018), which mixes pairs of training images with a weight
            from Beta(alpha, alpha). 0 turns mixup off.
        cutmix_alpha: Parameter alpha of CutMix (Yun et al. 2019), which pastes a rectangle of one training image into
            another. 0 turns CutMix off. If mixup and CutMix are both on, one of them is chosen at random for each
            batch.
        decay_norms_and_biases: Whether weight decay is also applied to the parameters of normalisations and to biases.
            All parameters with one dimension count as parameters of normalisations or biases.
        layer_lr_decay: Factor in (0, 1] between the learning rates of a layer and of the next layer, for fine-tuning.
            The last layer has the optimizer's rate. The layers are those of ``timm.optim.param_groups_layer_decay``,
            which knows the networks of timm, and networks whose class has a method ``group_matcher``.
        test_flips: Whether predictions in validation, test and predict are means over each image and its mirror image
            (left and right): means of the probabilities, or of the numbers of a regression.
        aux_weight: Weight of the loss of each auxiliary classifier.
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
        task: TaskName = "classes",
        class_weights: ClassWeights | None = None,
        label_smoothing: float = 0.0,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        decay_norms_and_biases: bool = True,
        layer_lr_decay: float = 1.0,
        test_flips: bool = False,
        aux_weight: float = 0.4,
        channels_last: bool = False,
        compile_backend: str | None = None,
    ) -> None:
        super().__init__(
            *(network, num_classes, optimizer, lr_scheduler, lr_interval, decay_norms_and_biases),
            *(channels_last, compile_backend),
            least=TASKS[task].least,
            layer_lr_decay=layer_lr_decay,
        )
        if task != "classes" and (label_smoothing or mixup_alpha or cutmix_alpha):
            raise ConfigurationError(
                f"label_smoothing, mixup_alpha and cutmix_alpha need task=classes, but the model has task={task}: set "
                "them to 0"
            )
        if not 0 <= label_smoothing < 1:
            raise ConfigurationError(f"label_smoothing={label_smoothing} is outside [0, 1); give a number such as 0.1")
        for name, value in (
            ("mixup_alpha", mixup_alpha),
            ("cutmix_alpha", cutmix_alpha),
            ("aux_weight", aux_weight),
        ):
            if value < 0:
                raise ConfigurationError(f"{name}={value} is negative; use 0 or a larger number")
        weights = weights_of(class_weights, num_classes, task)
        self.task = task
        self.learning_task = TASKS[task]
        self.quality = self.learning_task.quality
        self.label_smoothing = label_smoothing
        # The buffer is not persistent, because the class weights come from the configuration and not from a checkpoint.
        self.balanced = class_weights == "balanced"
        self.register_buffer("class_weights", weights, persistent=False)
        self.class_weights: Tensor | None
        self.test_flips = test_flips
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
        """Refuse a data module that has masks, or whose task or number of classes differs from the model's."""
        super().check_data(datamodule)
        if isinstance(datamodule, ImageDataModule) and datamodule.task != self.task:
            raise ConfigurationError(
                f"the model has task={self.task}, but {type(datamodule).__name__} has task={datamodule.task}: "
                f"set model.init_args.task={datamodule.task}, or use ImageTableDataModule with task={self.task}"
            )
        if getattr(datamodule, "ignore_index", None) is not None:
            raise ConfigurationError(
                f"{type(datamodule).__name__} has masks, which ImageClassifier cannot learn: use ImageSegmenter, or a "
                "data module with a class for each image"
            )

    def setup(self, stage: str) -> None:
        """Prepare the module as :meth:`NetworkModule.setup` does, and count the classes for balanced class weights."""
        super().setup(stage)
        if self.balanced and stage != "predict":
            assert self.class_weights is not None
            weights = balanced_weights(getattr(self.trainer, "datamodule", None), self.num_classes)
            self.class_weights = weights.to(self.class_weights)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the loss of a batch, as a mean over its images. For ``task=classes`` it is the cross-entropy.

        Args:
            outputs: The network's outputs: logits (N, num_classes), or a tuple of the main logits followed by the
                logits of auxiliary classifiers.
            targets: Class indices (N,) or class probabilities (N, num_classes); for other tasks numbers
                (N, num_classes).

        Returns:
            A scalar.

        Raises:
            ConfigurationError: The logits do not have the shape (N, num_classes).
        """
        check_logits(outputs, len(targets), self.num_classes)
        main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
        # The logits may have another device or dtype than the module.
        weights = None if self.class_weights is None else self.class_weights.to(main)
        loss = self.learning_task.loss(main, targets, weights, self.label_smoothing)
        for logits in auxiliary:
            if logits is not None:
                loss = loss + self.aux_weight * self.learning_task.loss(logits, targets, weights, self.label_smoothing)
        return loss

    def loss_weight(self, targets: Tensor) -> int:
        """Return the number of samples, which is the weight of a batch's :meth:`loss` in a mean over several batches.

        A subclass in which :meth:`loss` is not a mean over samples must also override this method.
        """
        return len(targets)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Apply mixup or CutMix to training images, and set the images' memory format, on the device."""
        if self.mix is not None and self.trainer.training:
            batch = self.mix(*batch)
        return super().on_after_batch_transfer(batch, dataloader_idx)

    def evaluated(self, images: Tensor) -> Any:
        """Return the network's outputs for images in validation, test and predict.

        With ``test_flips`` these are main logits (N, num_classes) whose predictions are the means over each image and
        its mirror image.
        """
        if not self.test_flips:
            return super().evaluated(images)
        outputs = [self.network(images), self.network(images.flip(-1))]
        for output in outputs:
            check_logits(output, len(images), self.num_classes)
        return self.learning_task.averaged(*map(main_logits, outputs))

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Predict a batch of ``(images, indices)``.

        Returns:
            A mapping: ``index`` (N,) has the samples' positions in the predict dataset, and ``probabilities``
            (N, num_classes) the probabilities of the classes or labels. For a regression, ``values`` (N, num_classes)
            has the predicted numbers instead.
        """
        images, indices = batch
        outputs = self.evaluated(images)
        check_logits(outputs, len(images), self.num_classes)
        return {"index": indices, self.learning_task.predicted: self.learning_task.values(main_logits(outputs).float())}

    def log_step(self, stage: Literal["train", "val", "test"], outputs: Any, targets: Tensor, loss: Tensor) -> None:
        """Add a batch to the metrics of training, validation or test, and log them."""
        logits = main_logits(outputs)
        check_logits(logits, len(targets), self.num_classes)  # A subclass may override `loss` without such a check.
        super().log_step(stage, logits, targets, loss)

    def compared(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and targets as the task's metrics expect them, for example probabilities for ``multilabel``."""
        return self.learning_task.compared(logits, targets)


def weights_of(class_weights: ClassWeights | None, num_classes: int, task: TaskName) -> Tensor | None:
    """Return the weights of the classes (num_classes,), or None if there are none.

    For ``balanced`` the result has ones, until :func:`balanced_weights` can count the training images.

    Raises:
        ConfigurationError: The weights do not fit the classes or the task.
    """
    if class_weights is None:
        return None
    if task == "regression":
        raise ConfigurationError("class_weights cannot be used with task=regression: leave class_weights out")
    if class_weights == "balanced":
        if task != "classes":
            raise ConfigurationError(f"class_weights=balanced needs task=classes, but the model has task={task}")
        return torch.ones(num_classes)
    if len(class_weights) != num_classes or min(class_weights) < 0:
        raise ConfigurationError(
            f"class_weights={class_weights}: give {num_classes} numbers that are at least 0, one for each class"
        )
    return torch.tensor(class_weights)


def balanced_weights(datamodule: LightningDataModule | None, num_classes: int) -> Tensor:
    """Return n / (num_classes * n_c) for each class c, where n_c of the n training images have the class c.

    All ranks count all training images of the split, and not those that a rank trains on, so their weights are equal.

    Args:
        datamodule: Data module after its ``setup``.
        num_classes: Number of classes.

    Raises:
        ConfigurationError: The data module does not know the classes of all training images, or a class has none.
    """
    targets = getattr(getattr(datamodule, "train_source", None), "targets", None)
    if not isinstance(targets, Tensor):
        name = "a run without a data module" if datamodule is None else type(datamodule).__name__
        raise ConfigurationError(
            f"class_weights=balanced: {name} does not give the classes of all training images: give a list of "
            f"{num_classes} numbers instead"
        )
    counts = targets.bincount(minlength=num_classes)
    if not bool(counts.all()):
        missing = int(counts.argmin())
        names = getattr(datamodule, "class_names", [])
        label = names[missing] if missing < len(names) else missing
        raise ConfigurationError(
            f"class_weights=balanced: the class {label} has no training images: give a list of {num_classes} numbers "
            "instead"
        )
    return len(targets) / (num_classes * counts)
