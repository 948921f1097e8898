"""A network that is tried out, and is afterwards as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def preserved(network: nn.Module) -> Iterator[None]:
    """Put a network's buffers and gradients and the random numbers back as they were.

    Parameters are expected not to change: nothing here steps an optimizer.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in network.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    gradients = [(parameter, parameter.grad) for parameter in network.parameters()]
    tensors = (*network.parameters(), *network.buffers())
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    device_type = next(iter(devices)).type if devices else "cuda"
    try:
        with torch.random.fork_rng(devices=list(devices), device_type=device_type):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer)  # Some are replaced.
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
