"""What a network would return, from shapes alone: no data, no memory for weights, no arithmetic."""

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.classifier import ImageClassifier
from cnnstrategies.models.logits import check_logits, main_logits
from cnnstrategies.models.network_module import NetworkModule
from cnnstrategies.models.segmenter import ImageSegmenter, check_map

SAMPLES = 2  # Batch normalisation refuses to train on one.


def check_network(model: NetworkModule, datamodule: LightningDataModule | None, training: bool) -> None:
    """Refuse a network with another number of classes than the model has, where it can be known without data.

    What is not certain is left to the model's first step: a model of one's own, a network whose outputs depend on more
    than shapes, and outputs of a shape that real images might not give.
    """
    shape = getattr(datamodule, "image_shape", None)
    if type(model) not in (ImageClassifier, ImageSegmenter) or shape is None:
        return
    outputs = outputs_without_data(model.network, shape, training)
    if type(model) is ImageSegmenter:
        if isinstance(outputs, Tensor | dict):
            check_map(main_logits(outputs), (SAMPLES, model.num_classes, *shape[1:]))
        return
    logits = None if outputs is None else main_logits(outputs)
    if isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == SAMPLES:
        check_logits(outputs, SAMPLES, model.num_classes)


def outputs_without_data(network: nn.Module, image_shape: Sequence[int], training: bool) -> Any:
    """What a copy of a network returns for ``SAMPLES`` images on torch's meta device, where tensors have no contents.

    None where that depends on more than shapes, or the network cannot be copied. The network itself, its weights and
    the random numbers stay as they are.
    """
    shape = (SAMPLES, *image_shape)
    try:
        with torch.no_grad(), isolate_rng(include_cuda=False), warnings.catch_warnings(action="ignore"):
            shadow = copy_without_contents(network).train(training)
            for module in shadow.modules():
                if isinstance(module, nn.Conv2d):
                    module.register_forward_pre_hook(partial(_check_channels, shape))
            return shadow(torch.empty(shape, device="meta"))
    except ConfigurationError:
        raise
    except Exception:
        return None


def copy_without_contents(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors have shapes and no contents, and so take no memory."""
    # The memo has deepcopy take these for the copies of the tensors.
    without_contents: dict[int, Any] = {
        **{id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()},
        **{id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()},
    }
    return copy.deepcopy(module, without_contents)


def _check_channels(shape: tuple[int, ...], convolution: nn.Conv2d, inputs: tuple[Any, ...]) -> None:
    """Refuse images that the convolution which sees them first does not take; torch does not say so in these terms."""
    wanted = convolution.in_channels
    if inputs and isinstance(inputs[0], Tensor) and tuple(inputs[0].shape) == shape and shape[1] != wanted:
        raise ConfigurationError(
            f"the network takes images with {wanted} channel{'s'[: wanted > 1]}, and those of the data have the shape "
            f"{shape[1:]}: set model.init_args.network.init_args.in_channels={shape[1]} (in_chans for timm; those of "
            "torchvision take 3), or take data that fit"
        )
