"""Measure a network in the precision that it will train in, and what its optimizer holds."""

import contextlib
import inspect
import math

import torch
from torch import Tensor, fx
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.batchnorm import has_batch_norm
from cnnstrategies.planning.measure_network import profile
from cnnstrategies.planning.profile import Profile, from_two_sizes

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# A second batch is so much smaller, since microbatches are between the two; batch normalisation refuses one sample.
SMALLER = 4
USUAL_STATES = 2  # Copies of the parameters that Adam holds.


def measure_profile(
    traced: fx.GraphModule, images: Images, size: int, device: torch.device, precision: str, channels_last: bool
) -> Profile:
    """Costs by the samples, from a device's share of a step's batch and a fourth of it.

    Args:
        traced: The traced network, on the device.
        images: Some of what it takes; they are repeated.
        size: Samples of the device's share.
        device: The device.
        precision: The trainer's.
        channels_last: Whether the images lie so.
    """
    dtype = AUTOCAST.get(precision)
    autocast = torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()

    def batch_of(count: int) -> Images:
        rows = torch.arange(count) % len(tree_leaves(images)[0])

        def taken(one: Tensor) -> Tensor:
            last = channels_last and one.ndim == 4
            chosen = one[rows.to(one.device)].to(device)
            return chosen.contiguous(memory_format=torch.channels_last) if last else chosen

        result: Images = tree_map(taken, images)
        return result

    with autocast:
        large = profile(traced, batch_of(size))
        small = profile(traced, batch_of(max(min(2, size), size // SMALLER)))
    return from_two_sizes(large, small, has_batch_norm(traced))


def states_of(optimizer: Optimizer) -> int:
    """Copies of the parameters that an optimizer of this kind and these options holds; tried on a small one."""
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.ones_like(parameter)
    try:
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        tried = type(optimizer)([parameter], **options)
        tried.step()
        held = [value for value in tried.state[parameter].values() if isinstance(value, Tensor) and value.numel() > 1]
    except Exception:
        return USUAL_STATES
    return math.ceil(sum(value.numel() for value in held) / parameter.numel())
