"""Access to a network's outputs: the main logits, and the logits of auxiliary classifiers."""

from typing import Any

import torch
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError


def main_logits(outputs: Any) -> Tensor:
    """Return the main logits: the outputs if they are a tensor, the first item of a tuple, or ``out`` of a dict."""
    if isinstance(outputs, dict):
        outputs = outputs.get("out", outputs)
    logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return logits


class MainLogits(nn.Module):
    """Wrapper of a network that returns only the main logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the main logits of images."""
        return main_logits(self.network(images))


def giving_logits(network: nn.Module, images: Tensor) -> nn.Module:
    """Return a network that can be exported. An exported network cannot return a dict.

    If the network returns a dict, the result is a wrapper that returns only the main logits. Otherwise the result is
    the network itself.

    Args:
        network: The network.
        images: Images for which the network is called once to see what it returns.
    """
    with torch.no_grad():
        return MainLogits(network) if isinstance(network(images), dict) else network


def name_of(network: nn.Module) -> str:
    """Return the name of a network's class, even if the network is wrapped in :class:`MainLogits`."""
    return type(network.network if isinstance(network, MainLogits) else network).__name__


def check_logits(outputs: Any, samples: int, num_classes: int) -> None:
    """Refuse logits of a wrong shape. Cross-entropy itself accepts logits for too many classes.

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
            f"the network returned {shape[1]} logits for an image, but the model has num_classes={num_classes}: set "
            f"num_classes={num_classes} also in init_args or dict_kwargs of model.init_args.network, or set "
            f"model.init_args.num_classes={shape[1]}"
        )
