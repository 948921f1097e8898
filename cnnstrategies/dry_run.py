"""What a network would return, from shapes alone: no data, no memory for weights, no arithmetic."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from cnnstrategies.classifier import ImageClassifier
from cnnstrategies.logits import check_logits, main_logits

SAMPLES = 2  # Batch normalisation refuses to train on one.


def check_network(model: ImageClassifier, datamodule: LightningDataModule | None, training: bool) -> None:
    """Refuse a network with another number of classes than the model has, where it can be known without data.

    What is not certain is left to the model's first step: a model of one's own, a network whose outputs depend on more
    than shapes, and outputs of a shape that real images might not give.

    Args:
        model: The model.
        datamodule: Its ``image_shape`` is that of the images, if it has one.
        training: Whether the network is to be trained.

    Raises:
        ConfigurationError: The numbers differ.
    """
    shape = getattr(datamodule, "image_shape", None)
    if type(model) is not ImageClassifier or shape is None:
        return
    outputs = outputs_without_data(model.network, shape, training)
    logits = None if outputs is None else main_logits(outputs)
    if isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == SAMPLES:
        check_logits(outputs, SAMPLES, model.num_classes)


def outputs_without_data(network: nn.Module, image_shape: Sequence[int], training: bool) -> Any:
    """Run a copy of a network on torch's meta device, where tensors have shapes and no contents.

    The network itself, its weights and the random numbers stay as they are.

    Args:
        network: The network.
        image_shape: (C, H, W).
        training: In which mode it runs.

    Returns:
        Its outputs for ``SAMPLES`` images; None where they depend on more than shapes, or the network cannot be copied.
    """
    try:
        without_contents: dict[int, Any] = {
            **{id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in network.parameters()},
            **{id(buffer): torch.empty_like(buffer, device="meta") for buffer in network.buffers()},
        }
        with torch.no_grad(), isolate_rng(include_cuda=False), warnings.catch_warnings(action="ignore"):
            # The memo has deepcopy take these for the copies of the tensors.
            shadow = copy.deepcopy(network, without_contents).train(training)
            return shadow(torch.empty(SAMPLES, *image_shape, device="meta"))
    except Exception:
        return None
