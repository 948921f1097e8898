"""Tensors of one place on their way to other ranks: on the CPU in a message, or from device to device."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from cnnstrategies.placed.device_link import DeviceLink

CPU = torch.device("cpu")


class TensorParcel:
    """Tensors that are sent together. The sender packs them into parts, from which a receiver unpacks copies.

    Parts of tensors on the CPU travel in a message. Parts of tensors on a device travel from device to device after the
    message, so that no process waits for the device.

    Args:
        tensors: The tensors. They are foreign on ranks that do not have them.
        devices: Connections of the ranks' devices; None if the device is the CPU.

    Attributes:
        forms: Form of each tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], devices: DeviceLink | None) -> None:
        self._tensors, self._devices = tensors, devices
        self.forms = [Compact.of(tensor) for tensor in tensors]
        self._on_device = [devices is not None and devices.carries(tensor) for tensor in tensors]

    def pack(self) -> list[Tensor]:
        """Return new tensors with the elements to send."""
        return [
            form.pack(tensor, tensor.device if on_device else CPU)
            for form, tensor, on_device in zip(self.forms, self._tensors, self._on_device, strict=True)
        ]

    def for_message(self, parts: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the parts for a message, with None in place of parts that are sent from device to device."""
        return [None if on_device else part for part, on_device in zip(parts, self._on_device, strict=True)]

    def send(self, parts: Sequence[Tensor], target: int) -> None:
        """Send the parts that are not in the message to a rank, which calls :meth:`receive`."""
        for part, on_device in zip(parts, self._on_device, strict=True):
            if on_device and self._devices is not None:
                self._devices.send(part, target)

    def receive(self, parts: Sequence[Tensor | None], source: int) -> list[Tensor]:
        """Return all parts from those in the message, after :meth:`send` on another rank."""
        received = self._with_empty(parts)
        for part, on_device in zip(received, self._on_device, strict=True):
            if on_device and self._devices is not None:
                self._devices.receive(part, source)
        return received

    def share(self, parts: Sequence[Tensor | None], source: int) -> list[Tensor]:
        """Return all parts on all ranks. All ranks must call this.

        Args:
            parts: On the source, all parts. On other ranks, the parts in the message.
            source: Rank that has the tensors.
        """
        shared = self._with_empty(parts)
        for part, on_device in zip(shared, self._on_device, strict=True):
            if on_device and self._devices is not None:
                self._devices.share(part, source)
        return shared

    def unpack(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the tensors."""
        return [
            form.unpack(part, tensor.device)
            for form, part, tensor in zip(self.forms, parts, self._tensors, strict=True)
        ]

    def _with_empty(self, parts: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the parts, with uninitialised tensors on the device in place of those that are not in the message."""
        return [
            form.empty(tensor.dtype, tensor.device) if part is None else part
            for form, tensor, part in zip(self.forms, self._tensors, parts, strict=True)
        ]


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
        order = _order(shape, stride)
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


def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions in the order of their strides, the largest first.

    The stride of a dimension of size 1 has no meaning, and differs between a tensor and a foreign tensor, as in the
    gradient of a convolution with one input channel. Therefore it does not change the order.
    """
    dims = range(len(shape))
    long = sorted((dim for dim in dims if shape[dim] != 1), key=lambda dim: -stride[dim])
    if long == sorted(long):
        return tuple(dims)
    return (*(dim for dim in dims if shape[dim] == 1), *long)
