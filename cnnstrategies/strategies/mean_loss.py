"""Whether a module says what its loss is a mean over."""

from torch import nn


def has_mean_loss(module: nn.Module) -> bool:
    """Whether a module says with ``loss_weight(targets)`` how its ``loss(outputs, targets)`` is divided.

    A class that replaces ``loss`` alone does not.
    """
    for kind in type(module).__mro__:
        if "loss_weight" in vars(kind):
            return callable(getattr(module, "loss", None))
        if "loss" in vars(kind):
            return False
    return False
