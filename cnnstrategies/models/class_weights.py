"""Weights of the classes in the loss: numbers, or the weights that balance the classes of the training images."""

from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from cnnstrategies.data.module import TaskName
from cnnstrategies.errors import ConfigurationError

ClassWeights = list[float] | Literal["balanced"]


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
