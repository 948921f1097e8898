"""Check whether a network takes images with the channels that the data have, before processes start."""

import warnings

import torch
from torch import nn

from cnnstrategies._torch_private import has_hooks
from cnnstrategies.checkpoints.check import copy_without_contents
from cnnstrategies.errors import ConfigurationError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def check_channels(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Raise a ConfigurationError if a network's first convolution refuses images of the data.

    A copy of the network without values computes the shapes for two images. Networks that cannot be copied or tried in
    this way are accepted, and so are networks with hooks, which may have effects elsewhere.

    Args:
        network: The network.
        shape: Shape of an image (C, H, W).
    """
    first = next((module for module in network.modules() if isinstance(module, CONVOLUTIONS)), None)
    hooked = any(map(has_hooks, network.modules()))
    if first is None or first.in_channels == shape[0] or hooked:
        return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            copy_without_contents(network).eval()(torch.empty(2, *shape, device="meta"))
    except RuntimeError as error:
        if "channel" in str(error):
            raise ConfigurationError(
                f"the network takes images with {first.in_channels} channels, but the data's images have {shape[0]}: "
                "change the network or the data"
            ) from error
    except Exception:
        return
