"""Measure a network in the precision that it will train in, and what its optimizer holds."""

import contextlib
import gc
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

_HOST = torch.device("cpu")
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# A second batch is so much smaller, since microbatches are between the two; batch normalisation refuses one sample.
SMALLER = 4
USUAL_STATES = 2  # Copies of the parameters that Adam holds.


def measure_profile(
    traced: fx.GraphModule, images: Images, size: int, device: torch.device, precision: str, channels_last: bool
) -> Profile:
    """Costs by the samples, from a device's share of a step's batch and a fourth of it.

    Args:
        traced: The traced network; it comes back to where it is. What does not fit on the device is measured there
            one node at a time.
        images: Some of what it takes; they are repeated.
        size: Samples of the device's share.
        device: The device.
        precision: The trainer's.
        channels_last: Whether the images lie so.
    """
    dtype = AUTOCAST.get(precision)
    home = next(traced.parameters()).device

    def batch_of(count: int, place: torch.device) -> Images:
        rows = torch.arange(count) % len(tree_leaves(images)[0])

        def taken(one: Tensor) -> Tensor:
            last = channels_last and one.ndim == 4
            chosen = one[rows.to(one.device)].to(place)
            return chosen.contiguous(memory_format=torch.channels_last) if last else chosen

        result: Images = tree_map(taken, images)
        return result

    def measured(place: torch.device, apart_on: torch.device | None = None) -> Profile:
        traced.to(place)
        sizes = size, max(min(2, size), size // SMALLER)
        large, small = (profile(traced, batch_of(count, place), apart_on=apart_on) for count in sizes)
        return from_two_sizes(large, small, has_batch_norm(traced))

    with contextlib.ExitStack() as stack:
        stack.callback(traced.to, home)
        for kind in {device.type, _HOST.type} if dtype else ():
            stack.enter_context(torch.autocast(kind, dtype))
        with contextlib.suppress(torch.OutOfMemoryError):
            return measured(device)
        gc.collect()  # What an exception has held, so that it goes from the device, too.
        return measured(_HOST, apart_on=device)


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
