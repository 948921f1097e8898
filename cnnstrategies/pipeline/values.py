"""What crosses a cut, taken apart into tensors that are sent as they lie in memory, and put together again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor on its way, how it and its gradient lie in memory, and whether that is sent back."""

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool
    memory_format: torch.memory_format = field(compare=False)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format)


@dataclass(frozen=True)
class Header:
    """What a message holds; it travels once for each size of a microbatch.

    Attributes:
        leaves: For each leaf of the values its :class:`TensorSpec`, or the leaf itself where it is no tensor.
        tree: How the leaves make up the tuple of values.
    """

    leaves: tuple[Any, ...]
    tree: TreeSpec

    @property
    def tensors(self) -> list[TensorSpec]:
        """The tensors of the message, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def wanted(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of the tensors of the message those whose gradients are sent back."""
        return [tensor for tensor, spec in zip(tensors, self.tensors, strict=True) if spec.needs_gradient]

    def on(self, device: torch.device) -> "Header":
        """The same where it arrives: a device that the network has read off its tensors is there another one."""
        leaves = tuple(device if isinstance(leaf, torch.device) else leaf for leaf in self.leaves)
        return Header(leaves, self.tree)

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The values, from the tensors of the message."""
        arrived = iter(tensors)
        leaves = [next(arrived) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        values: tuple[Any, ...] = tree_unflatten(leaves, self.tree)
        return values


def pack(values: tuple[Any, ...], ask_for_all: bool) -> tuple[Header, list[Tensor]]:
    """Take apart what a stage sends to another one: the header, and the tensors, still part of their autograd graph.

    Asks for the gradients of all floating-point tensors, or only of those that autograd tracks.
    """
    leaves, tree = tree_flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    specs = tuple(
        TensorSpec(
            leaf.shape,
            leaf.dtype,
            leaf.requires_grad or (ask_for_all and leaf.is_floating_point()),
            memory_format_of(leaf),
        )
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    )
    return Header(specs, tree), tensors


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """``channels_last`` where a tensor lies so and not in the order of its dimensions as well."""
    last = CHANNELS_LAST.get(tensor.ndim)
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def on_the_wire(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """A contiguous view of a tensor in a memory format; a copy where it lies in another one."""
    laid_out = tensor.detach().contiguous(memory_format=memory_format)
    return laid_out if memory_format == torch.contiguous_format else laid_out.movedim(1, -1)
