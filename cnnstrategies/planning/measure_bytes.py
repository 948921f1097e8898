"""Determine the bytes of a network's nodes without computing, and without memory for their tensors."""

import copy

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from cnnstrategies._torch_private import without_values
from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.planning.costs import GraphCosts
from cnnstrategies.planning.measure_nodes import profile

META = torch.device("meta")


def bytes_of(
    traced: fx.GraphModule,
    images: Images,
    samples: int,
    autocast: torch.dtype | None = None,
    device: torch.device = META,
) -> GraphCosts:
    """Return the bytes of all nodes of a network. The times are not those of the network.

    The nodes run with tensors that have a shape but no values. Operations that allocate a workspace on a device do not
    do so here.

    Args:
        traced: The traced network, which is not changed.
        images: Inputs of the network.
        samples: Number of samples of the batch for which the bytes are determined.
        autocast: Dtype of autocast; None without autocast.
        device: Device of the training, which decides which operations run in the dtype of autocast. Without autocast
            it does not matter.
    """
    if autocast is None:
        return profile(on_meta(traced), _batch_of(images, samples, META), repeats=0)
    with without_values(), torch.autocast(device.type, autocast):
        return profile(on_meta(traced, device), _batch_of(images, samples, device), repeats=0)


def _batch_of(images: Images, samples: int, device: torch.device) -> Images:
    def batch_of(image: Tensor) -> Tensor:
        return torch.empty((samples, *image.shape[1:]), dtype=image.dtype, device=device)

    batch: Images = tree_map(batch_of, images)
    return batch


def on_meta(traced: fx.GraphModule, device: torch.device = META) -> fx.GraphModule:
    """Return a copy of a network on the meta device. No tensor is copied but counts.

    A forward may read a count, as BatchNorm with ``momentum=None`` reads its number of batches.

    Args:
        traced: The traced network.
        device: Another device, in the context `without_values`.
    """

    def like(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    copies: dict[int, Tensor] = {}
    for parameter in traced.parameters():
        copies[id(parameter)] = nn.Parameter(like(parameter), parameter.requires_grad)
    for buffer in traced.buffers():
        is_count = buffer.ndim == 0 and not (buffer.is_floating_point() or buffer.is_complex())
        copies[id(buffer)] = buffer.detach().cpu().clone() if is_count else like(buffer)
    return copy.deepcopy(traced, copies)
