"""The form in which a tensor is sent: only elements that differ, in the order in which they are in memory."""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Compact(NamedTuple):
    """How a tensor's elements are sent, computed from shape and strides, so that all ranks know it.

    Attributes:
        shape: Shape of the tensor.
        sent: Shape of the elements that are sent. Dimensions along which the tensor is expanded have size 1.
        order: Dimensions in the order of their strides, the largest first.
        stride: Strides of the copies.
    """

    shape: tuple[int, ...]
    sent: tuple[int, ...]
    order: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the form of a tensor, which may be foreign."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        sent = tuple(1 if step == 0 and size else size for size, step in zip(shape, stride, strict=True))
        order = tuple(sorted(range(len(shape)), key=lambda dim: -stride[dim]))
        strides, step = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim] = 0 if sent[dim] != shape[dim] else step
            step *= max(sent[dim], 1)
        return cls(shape, sent, order, tuple(strides))

    @property
    def _is_dense(self) -> bool:
        """Whether all elements are sent, in the order of the dimensions."""
        return self.sent == self.shape and self.order == tuple(range(len(self.order)))

    def pack(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the elements to send, as a new tensor on a device."""
        if self._is_dense:
            return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        part = tensor.detach()[tuple(slice(0, size) for size in self.sent)].permute(self.order)
        return part.to(device, copy=True, memory_format=torch.contiguous_format)

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor on a device, for the elements that are sent."""
        return torch.empty([self.sent[dim] for dim in self.order], dtype=dtype, device=device)

    def unpack(self, part: Tensor, device: torch.device) -> Tensor:
        """Return a copy of the tensor from the elements that were sent."""
        if self._is_dense:
            return part.to(device)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return part.to(device).permute(inverse).expand(self.shape)
