"""Determine the bytes of a network's nodes without computing, and without memory for their tensors."""

import copy

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.planning.costs import GraphCosts
from cnnstrategies.planning.measure_nodes import profile

META = torch.device("meta")


def bytes_of(traced: fx.GraphModule, images: Images, samples: int) -> GraphCosts:
    """Return the bytes of all nodes of a network. The times are not those of the network.

    The nodes run on the meta device, whose tensors have a shape but no values. Operations that allocate a workspace on
    a device do not do so here.

    Args:
        traced: The traced network, which is not changed.
        images: Inputs of the network.
        samples: Number of samples of the batch for which the bytes are determined.
    """

    def batch_of(image: Tensor) -> Tensor:
        return torch.empty((samples, *image.shape[1:]), dtype=image.dtype, device=META)

    batch: Images = tree_map(batch_of, images)
    return profile(on_meta(traced), batch, repeats=0)


def on_meta(traced: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a network on the meta device. No tensor is copied but counts.

    A forward may read a count, as BatchNorm with ``momentum=None`` reads its number of batches.
    """
    copies: dict[int, Tensor] = {}
    for parameter in traced.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
    for buffer in traced.buffers():
        is_count = buffer.ndim == 0 and not (buffer.is_floating_point() or buffer.is_complex())
        copies[id(buffer)] = buffer.detach().cpu().clone() if is_count else buffer.detach().to(META)
    return copy.deepcopy(traced, copies)
