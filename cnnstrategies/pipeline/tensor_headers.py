"""Headers of messages: the structure of nested containers of tensors, and the form in which each tensor is sent.

The sender flattens the containers into tensors, and the receiver builds the containers again. Each tensor is sent in
its own memory format, such as ``channels_last``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class TensorSpec:
    """Description of a tensor in a message.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        needs_gradient: Whether the receiver sends the tensor's gradient back.
        memory_format: Memory format in which the tensor and its gradient are sent.
    """

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool
    memory_format: torch.memory_format = field(compare=False)

    def empty(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor with this shape, dtype and memory format, into which a message is received."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format)


@dataclass(frozen=True)
class TensorHeader:
    """The values of a message without the contents of their tensors.

    Messages with equal size keys have equal headers, so only the first of these messages contains the header.

    Attributes:
        leaves: Leaves of the nested containers. A tensor is represented by its description; plain data is unchanged.
        tree: Structure of the nested containers.
    """

    leaves: tuple[Any, ...]
    tree: TreeSpec

    @property
    def tensors(self) -> list[TensorSpec]:
        """Descriptions of the message's tensors, in the order of the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def with_gradient(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return only those tensors of a message for which the receiver sends a gradient back.

        Args:
            tensors: All tensors of the message, in the order of the leaves.
        """
        return [tensor for tensor, spec in zip(tensors, self.tensors, strict=True) if spec.needs_gradient]

    def on(self, device: torch.device) -> "TensorHeader":
        """Return a copy of the header in which ``device`` replaces each value that is a device.

        If a network passes a tensor's device on as a value, this value can cross a cut. The receiving stage then needs
        its own device in place of the sender's device.
        """
        leaves = tuple(device if isinstance(leaf, torch.device) else leaf for leaf in self.leaves)
        return TensorHeader(leaves, self.tree)

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Rebuild the nested containers of a message, and return its values.

        Args:
            tensors: The message's tensors, in the order of the leaves. Each tensor takes the place of its `TensorSpec`
                among the leaves of this header.
        """
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        values: tuple[Any, ...] = tree_unflatten(leaves, self.tree)
        return values


def pack(values: tuple[Any, ...], ask_for_all: bool) -> tuple[TensorHeader, list[Tensor]]:
    """Flatten the values that one stage sends to another, and return their header and their tensors.

    The tensors remain connected to their autograd graph.

    Args:
        values: The values.
        ask_for_all: Whether the receiver must send back the gradients of all floating-point tensors, even of tensors
            that do not require a gradient.
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
    return TensorHeader(specs, tree), tensors


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor: contiguous, ``channels_last`` or ``channels_last_3d``.

    A tensor that is stored in both formats, for example because it has one channel, counts as contiguous.
    """
    last = CHANNELS_LAST.get(tensor.ndim)
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def on_the_wire(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return a tensor's elements as a contiguous tensor for a transfer, in the order of a memory format.

    If ``tensor`` already has this memory format, the result is a view of ``tensor``; otherwise it is a view of a copy.
    """
    formatted = tensor.detach().contiguous(memory_format=memory_format)
    return formatted if memory_format == torch.contiguous_format else formatted.movedim(1, -1)
