"""What a network returns: logits, and those of auxiliary classifiers beside them."""

from typing import Any

import torch
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError


def main_logits(outputs: Any) -> Tensor:
    """The main logits of what a network returned: alone, first of a tuple, or ``out`` of a dict."""
    if isinstance(outputs, dict):
        outputs = outputs.get("out", outputs)
    logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return logits


class MainLogits(nn.Module):
    """A network that returns its main logits and nothing beside them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """The main logits of images."""
        return main_logits(self.network(images))


def giving_logits(network: nn.Module, images: Tensor) -> nn.Module:
    """A network as one that returns no dict, which what runs exported networks does not know."""
    with torch.no_grad():
        return MainLogits(network) if isinstance(network(images), dict) else network


def name_of(network: nn.Module) -> str:
    """What a network is called in messages."""
    return type(network.network if isinstance(network, MainLogits) else network).__name__


def check_logits(outputs: Any, samples: int, num_classes: int) -> None:
    """Refuse outputs of another number of classes; cross-entropy takes more of them than there are, and trains.

    Outputs are logits, or a tuple of the main ones followed by auxiliary ones or None.
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
                f"shape {(samples, num_classes)}: end the network with a layer that gives those"
            )
        raise ConfigurationError(
            f"the network gives {shape[1]} logits for an image, but the model has num_classes={num_classes}: give "
            f"model.init_args.network num_classes={num_classes} too (in its init_args or dict_kwargs), or set "
            f"model.init_args.num_classes={shape[1]}"
        )
