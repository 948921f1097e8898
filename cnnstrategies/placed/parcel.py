"""Tensors of one place on their way to other ranks: on the CPU in a message, or from device to device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cnnstrategies.placed.compact import Compact
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
