"""Learning rates that fall from layer to layer, towards the network's input, with the parameter groups of timm."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError


def check_layer_lr_decay(network: nn.Module, layer_lr_decay: float) -> None:
    """Refuse a decay outside of (0, 1], and a network whose layers timm cannot find.

    Raises:
        ConfigurationError: The learning rates cannot fall from layer to layer.
    """
    if not 0 < layer_lr_decay <= 1:
        raise ConfigurationError(f"layer_lr_decay={layer_lr_decay} is outside (0, 1]; 0.65 to 0.9 is usual")
    if layer_lr_decay == 1:
        return
    if find_spec("timm") is None:
        raise ConfigurationError(
            f"layer_lr_decay={layer_lr_decay} needs timm, which is not installed: pip install timm"
        )
    if not hasattr(network, "group_matcher"):
        raise ConfigurationError(
            f"layer_lr_decay={layer_lr_decay}: timm does not know the layers of {type(network).__name__}: use a "
            "network of timm.create_model, define the method group_matcher in the network's class, or leave "
            "layer_lr_decay out"
        )


def layer_groups(
    network: nn.Module, trained: Sequence[nn.Parameter], decay_norms_and_biases: bool, layer_lr_decay: float
) -> tuple[list[dict[str, Any]], list[float]]:
    """Return parameter groups for an optimizer, and the factor of each group's learning rate.

    Args:
        network: The network, with timm's method ``group_matcher``.
        trained: Parameters to train. Parameters outside of the network count as part of the last layer.
        decay_norms_and_biases: Whether weight decay is also applied to parameters with one dimension, and to parameters
            in the network's ``no_weight_decay``.
        layer_lr_decay: Factor between the learning rates of a layer and of the next layer.

    Raises:
        ConfigurationError: All trained parameters are in one layer.
    """
    from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]  # no re-export in timm's types

    undecayed: set[str] = getattr(network, "no_weight_decay", set)()
    # A group without weight decay gets the entry 0. Other groups get the optimizer's own weight decay.
    groups = param_groups_layer_decay(
        network,
        weight_decay=1.0,
        no_weight_decay_list=() if decay_norms_and_biases else undecayed,
        weight_decay_exclude_1d=not decay_norms_and_biases,
        layer_decay=layer_lr_decay,
    )
    factors = [group.pop("lr_scale") for group in groups]
    if len(set(factors)) < 2:
        raise ConfigurationError(
            f"layer_lr_decay={layer_lr_decay} has no effect, because all trained parameters of "
            f"{type(network).__name__} are in one layer: leave layer_lr_decay out"
        )
    for group in groups:
        if group["weight_decay"]:
            del group["weight_decay"]
    known = {id(parameter) for group in groups for parameter in group["params"]}
    if others := [parameter for parameter in trained if id(parameter) not in known]:
        groups.append({"params": others})
        factors.append(1.0)
    return groups, factors


def check_schedule(optimizer: Optimizer, scheduler: Any, layer_lr_decay: float) -> None:
    """Refuse a scheduler that has replaced the learning rates of all layers by one rate.

    Raises:
        ConfigurationError: All layers have the same learning rate.
    """
    if layer_lr_decay < 1 and len({float(group["lr"]) for group in optimizer.param_groups}) == 1:
        raise ConfigurationError(
            f"layer_lr_decay={layer_lr_decay}: {type(scheduler).__name__} sets the same learning rate for all layers: "
            "use another scheduler, such as cnnstrategies.schedules.WarmupCosine"
        )
