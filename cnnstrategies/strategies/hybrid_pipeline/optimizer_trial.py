"""Whether an optimizer treats each parameter by itself: tried with a few made-up ones, before training."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.shadow import same_random_numbers

# The size of each step's gradients: some optimizers mix parameters only where those are large, or after several steps
# that have led them the same way.
_SIZES = (1.0, 1.0, 1.0, 1.0, 1.0, 1e4, 1e-3)
_FEW = 4  # parameters from the beginning and the end of each group
_REMEDY = (
    "with strategy hybrid_pipeline each stage's optimizer has its own ones alone; use SGD, AdamW or another one that "
    "treats each parameter by itself, or strategy ddp"
)


def try_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Refuse an optimizer whose step of a parameter depends on others.

    A copy of it steps with all of some made-up parameters, and others with a half of these each. It and its parameters
    stay as they are.

    Raises:
        ConfigurationError: The halves come to other values than the whole, or it keeps tensors that are divided among
            no stages.
    """
    name = type(optimizer).__name__
    kept = [
        key for key, value in vars(optimizer).items() if key not in ("state", "param_groups") and _has_tensors(value)
    ]
    if kept:
        raise ConfigurationError(f"{name} keeps tensors of all parameters in {kept[0]}, beside its state: {_REMEDY}")
    try:
        with same_random_numbers(device):
            whole, *halves = [_stepped(optimizer, device, half) for half in (None, 0, 1)]
    except Exception as error:
        rank_zero_warn(f"{name} was not tried with made-up parameters, as it fails on them: {error!r}")
        return
    for own in halves:
        if any(not torch.allclose(own[place], whole[place], rtol=1e-12, atol=1e-15) for place in own):
            raise ConfigurationError(
                f"{name} changes a parameter by what others and their gradients are, as where it has a norm or a step "
                f"size of all: {_REMEDY}"
            )


def _stepped(optimizer: Optimizer, device: torch.device, half: int | None) -> dict[int, Tensor]:
    """The made-up parameters after some steps of a copy: all of them, or every second."""
    generator = torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        shape = [min(size, 3) for size in parameter.shape]
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        made[id(parameter)] = nn.Parameter(values.to(device))
    tried: Any = object.__new__(type(optimizer))
    # A learning rate scheduler has put a function in the place of `step` that steps the optimizer itself.
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state")}
    vars(tried).update(copy.deepcopy(attributes, dict(made)))
    tried.state = type(optimizer.state)(dict)
    chosen: list[nn.Parameter] = []
    for group in tried.param_groups:
        some = group["params"]
        some = some if len(some) <= 2 * _FEW else [*some[:_FEW], *some[-_FEW:]]
        chosen += some
        group["params"] = some
        if "lr" in group:
            group["lr"] = group.get("initial_lr", group["lr"]) or 1e-2  # It may be 0 at the start of a warm-up.
    places = {parameter: place for place, parameter in enumerate(chosen) if half is None or place % 2 == half}
    for group in tried.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in places]
    getattr(tried, "train", lambda: None)()  # Of those without a schedule.
    gradients = _gradients(chosen, generator)
    for step in gradients:
        _step(tried, chosen, step)
    return {place: parameter.detach().clone() for parameter, place in places.items()}


def _gradients(parameters: Sequence[nn.Parameter], generator: torch.Generator) -> list[list[Tensor]]:
    way = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one) for one in parameters]
    return [[size * one for one in way] for size in _SIZES]


def _step(optimizer: Any, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    def closure() -> Tensor:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient + 0.1 * parameter.detach()
        return torch.ones(())

    closure()  # Some take the gradients before they call it.
    with torch.enable_grad():
        optimizer.step(closure)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.ndim and leaf.numel() for leaf in tree_leaves(value))
