"""The outputs of a network: its main logits, and the logits of auxiliary classifiers."""

from typing import Any

import torch
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError


def main_logits(outputs: Any) -> Tensor:
    """Return the main logits from a network's outputs: a tensor, the first of a tuple, or ``out`` of a dict."""
    if isinstance(outputs, dict):
        outputs = outputs.get("out", outputs)
    logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return logits


class MainLogits(nn.Module):
    """A network that returns only its main logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the main logits of images."""
        return main_logits(self.network(images))


def giving_logits(network: nn.Module, images: Tensor) -> nn.Module:
    """Return a network that returns its main logits instead of a dict, which exported networks cannot return.

    Args:
        network: The network; it is returned itself if it does not return a dict.
        images: Images to try the network with.
    """
    with torch.no_grad():
        return MainLogits(network) if isinstance(network(images), dict) else network


def name_of(network: nn.Module) -> str:
    """Return the name of a network's class, for messages."""
    return type(network.network if isinstance(network, MainLogits) else network).__name__


def check_logits(outputs: Any, samples: int, num_classes: int) -> None:
    """Refuse outputs with another number of classes: with too many logits cross-entropy would train without an error.

    Args:
        outputs: Logits, or a tuple of the main logits followed by auxiliary logits or None.
        samples: Number of samples of the batch.
        num_classes: Number of classes of the model.

    Raises:
        ConfigurationError: The logits are not of shape (samples, num_classes).
    """
    main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
    for logits in (main, *(extra for extra in auxiliary if extra is not None)):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else None
        if shape == (samples, num_classes):
            continue
        if shape is None or len(shape) != 2 or shape[0] != samples:
            returned = type(logits).__name__ if shape is None else f"shape {shape}"
            raise ConfigurationError(
                f"for {samples} images the network returned {returned}, but num_classes={num_classes} needs logits of "
                f"shape {(samples, num_classes)}: end the network with a layer that returns logits of this shape"
            )
        raise ConfigurationError(
            f"the network gives {shape[1]} logits for an image, but the model has num_classes={num_classes}: give "
            f"model.init_args.network also num_classes={num_classes} (in its init_args or dict_kwargs), or set "
            f"model.init_args.num_classes={shape[1]}"
        )
