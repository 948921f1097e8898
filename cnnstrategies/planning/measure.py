"""Measure the costs of a network in the precision of training, and the memory of an optimizer."""

import contextlib
import gc
import inspect
import math
import time

import torch
from torch import Tensor, fx
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.pipeline.microbatches import CPU, Images
from cnnstrategies.planning.costs import Profile, from_two_sizes
from cnnstrategies.planning.held_bytes import HeldBytes
from cnnstrategies.planning.measure_nodes import profile
from cnnstrategies.planning.memory import NO_UPDATE, Update

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# The second measured batch is smaller than the first by this factor, so that most microbatches have a size between the
# two measured sizes.
SMALLER = 4
BUDGET = 4.0  # Seconds that the measurement of the large batch may take. If it would take longer, the batch is smaller.
SMALL_PARAMETERS = 10  # Number of layers with which the memory of an update is measured.
USUAL_STATES = 2  # Size of Adam's state as a multiple of the parameters' size.


def measure_profile(
    traced: fx.GraphModule, images: Images, size: int, device: torch.device, precision: str, channels_last: bool
) -> Profile:
    """Measure a network with two batch sizes: ``size`` samples, and about a fourth of this number.

    The small batch is measured first. If the large batch would take more than `BUDGET` seconds, it has fewer samples.

    If the network does not fit into the device's memory, one node at a time is moved to the device and measured.

    Args:
        traced: The traced network. It is moved back to its current device afterwards.
        images: Inputs from which the batches are made. If there are too few inputs, they are used repeatedly.
        size: Number of samples that one device has in a step.
        device: Device on which to measure.
        precision: Precision of the trainer, such as ``bf16-mixed``.
        channels_last: Whether images are stored in the memory format channels_last.
    """
    dtype = AUTOCAST.get(precision)
    previous_device = next(traced.parameters()).device

    def batch_of(count: int, place: torch.device) -> Images:
        rows = torch.arange(count) % len(tree_leaves(images)[0])

        def taken(tensor: Tensor) -> Tensor:
            is_channels_last = channels_last and tensor.ndim == 4
            chosen = tensor[rows.to(tensor.device)].to(place)
            return chosen.contiguous(memory_format=torch.channels_last) if is_channels_last else chosen

        result: Images = tree_map(taken, images)
        return result

    def measured(place: torch.device, apart_on: torch.device | None = None) -> Profile:
        traced.to(place)
        # The small batch has at least two samples if possible, because BatchNorm does not accept a batch of one sample.
        count = max(min(2, size), size // SMALLER)
        start = time.monotonic()
        small = profile(traced, batch_of(count, place), apart_on=apart_on)
        most = max(count, int(count * BUDGET / max(time.monotonic() - start, 1e-9)))
        large = (
            small if min(size, most) == count else profile(traced, batch_of(min(size, most), place), apart_on=apart_on)
        )
        return from_two_sizes(large, small, has_batch_norm(traced))

    with contextlib.ExitStack() as stack:
        stack.callback(traced.to, previous_device)
        for kind in {device.type, CPU.type} if dtype else ():
            stack.enter_context(torch.autocast(kind, dtype))
        with contextlib.suppress(torch.OutOfMemoryError):
            return measured(device)
        # The traceback of the OutOfMemoryError still refers to tensors on the device. Garbage collection frees their
        # memory for the second attempt.
        gc.collect()
        return measured(CPU, apart_on=device)


def states_of(optimizer: Optimizer) -> int:
    """Return the size of an optimizer's state as a multiple of the parameters' size, rounded up.

    To measure the size, a new optimizer with the same class and options makes one step on a small parameter.
    If this fails, return 2, the value for Adam.
    """
    parameter = _small_parameter(CPU)
    try:
        small_optimizer = _like(optimizer, [parameter])
        small_optimizer.step()
        held = [
            value
            for value in small_optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.numel() > 1
        ]
    except Exception:
        return USUAL_STATES
    return math.ceil(sum(value.numel() for value in held) / parameter.numel())


def update_of(optimizer: Optimizer, device: torch.device) -> Update:
    """Return the memory that an optimizer's step needs besides the optimizer's state.

    To measure it, a new optimizer with the same class and options makes two steps on small parameters. On a GPU torch's
    optimizers update all parameters together, and on a CPU one parameter after the other. If this fails, assume that
    the step needs nothing.

    Args:
        optimizer: The optimizer.
        device: Device of the training.
    """
    # A tensor of one parameter's update may exist until that of the next parameter. Layers with many weights alternate
    # with small parameters, such as biases, in a network and so here.
    parameters = [_small_parameter(device, side) for side in (64, 1) * SMALL_PARAMETERS]
    try:
        small_optimizer = _like(optimizer, parameters)
        small_optimizer.step()
        with HeldBytes() as held:
            small_optimizer.step()
    except Exception:
        return NO_UPDATE
    copies = held.most / parameters[0].nbytes
    # An update of all parameters together needs temporary tensors for at least half of them.
    if copies >= SMALL_PARAMETERS / 2:
        return Update(of_all=copies / SMALL_PARAMETERS)
    return Update(of_largest=round(copies))


def _small_parameter(device: torch.device, side: int = 64) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(side, side, device=device))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _like(optimizer: Optimizer, parameters: list[torch.nn.Parameter]) -> Optimizer:
    """Return a new optimizer of the same class and with the same options, for other parameters."""
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return type(optimizer)(parameters, **options)
