"""Transfers of tensors from device to device, during which no process waits for its device."""

import torch
import torch.distributed as dist
from torch import Tensor


class DeviceLink:
    """The connections of a rank's device to the devices of all other ranks, such as those of NCCL.

    A message of `Messages` contains values that are on the CPU, so a process must wait until its device has computed
    them. A transfer of this class only joins the work that is queued on the devices. All ranks must begin their
    transfers in the same order.

    Args:
        group: Group of all ranks, for tensors on the device.
        device: This rank's device.

    Attributes:
        device: See above.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device

    def carries(self, tensor: Tensor) -> bool:
        """Whether a tensor, which may be foreign, is on a device of the kind that this link connects."""
        return tensor.device.type == self.device.type

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a contiguous tensor to a rank."""
        if tensor.numel():
            dist.send(_as_bytes(tensor), group=self._group, group_dst=target)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive a contiguous tensor from a rank."""
        if tensor.numel():
            dist.recv(_as_bytes(tensor), group=self._group, group_src=source)

    def share(self, tensor: Tensor, source: int) -> None:
        """Copy a contiguous tensor from a rank to all other ranks. All ranks must call this."""
        if tensor.numel():
            dist.broadcast(_as_bytes(tensor), group=self._group, group_src=source)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes, because a backend does not send tensors of all dtypes."""
    return tensor.flatten().view(torch.uint8)
