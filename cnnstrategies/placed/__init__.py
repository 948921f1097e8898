"""Tensors that live on some ranks only, while every rank runs the same program.

A tensor's place is either all ranks (None), or the ranks that have copies of the tensor. On other ranks the tensor is a
`ForeignTensor`: it has the tensor's shape, strides, dtype and device, but not a storage. An operation runs on the ranks
of its operands' place; on the other ranks its result is a foreign tensor. If the program reads a value, the first rank
of the value's place sends the value to all other ranks. All ranks therefore continue in the same way, as one device
would. `rules.py` contains the rules for operations that need more than this.

The package needs only torch, so a script without Lightning can use it. ::

    places = Places(rank, world_size, GlooLink(group, rank, world_size))
    with places:
        weights = places.give(weights, (1,), "weights")
        loss = (weights * images).sum()    # Rank 1 computes the sum.
        if loss.item() > 1: ...            # Rank 1 sends the value to all ranks.
"""

from cnnstrategies.placed.decision import Place
from cnnstrategies.placed.device_link import DeviceLink
from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.gloo_link import GlooLink
from cnnstrategies.placed.hidden import HiddenGradients, hide_foreign_gradients
from cnnstrategies.placed.messages import DivergedError, MessageLink, RefusedError
from cnnstrategies.placed.places import Places

__all__ = [
    "DeviceLink",
    "DivergedError",
    "ForeignTensor",
    "GlooLink",
    "HiddenGradients",
    "MessageLink",
    "Place",
    "Places",
    "RefusedError",
    "hide_foreign_gradients",
]
