"""Which parameters of a network are decayed, and how fast each layer learns."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def parameter_groups(
    module: nn.Module, network: nn.Module, decay_norms_and_biases: bool, by_layer: bool
) -> tuple[list[dict[str, Any]], list[int]]:
    """The parameters that are trained, in groups for an optimizer.

    Args:
        module: What is trained.
        network: The part of it that has layers; all other parameters are those of its last one.
        decay_norms_and_biases: Whether parameters of one dimension, which are those of normalisations and biases,
            have the optimizer's weight decay; else theirs is 0.
        by_layer: Whether each layer has groups of its own.

    Returns:
        The groups, and how far from the end of the network the layer of each is.
    """
    depths = layer_depths(network) if by_layer else {}
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            decayed = decay_norms_and_biases or parameter.ndim > 1
            groups.setdefault((depths.get(id(parameter), 0), decayed), []).append(parameter)
    without: dict[str, Any] = {"weight_decay": 0.0}
    made = [{"params": members, **({} if decayed else without)} for (_, decayed), members in groups.items()]
    return made, [depth for depth, _ in groups]


def layer_depths(network: nn.Module) -> dict[int, int]:
    """How far from the end the layer of each parameter is, by the parameter's ``id``: 0 in the last layer.

    Layers are the network's submodules in the order in which it names them: containers such as ``nn.Sequential`` are
    opened, blocks are not. One that has only normalisations and biases belongs to the layer before.
    """
    layers: list[list[nn.Parameter]] = []
    for parameters in _units(network):
        if layers and all(parameter.ndim < 2 for parameter in parameters):
            layers[-1] += parameters
        else:
            layers.append(parameters)
    depths: dict[int, int] = {}
    for depth, members in enumerate(reversed(layers)):
        for parameter in members:
            depths[id(parameter)] = depth  # One that two layers share learns as the first.
    return depths


def scale_learning_rates(optimizer: Optimizer, shares: Sequence[float]) -> None:
    """Give each group its share of the optimizer's learning rate; before a scheduler is made."""
    for group, share in zip(optimizer.param_groups, shares, strict=True):
        group["lr"] = group["lr"] * share


def hold_back(optimizer: Optimizer, is_held: Callable[[int], bool], depths: Sequence[int]) -> None:
    """Have some groups' parameters stay as they are for now, by steps with a learning rate of 0.

    They need gradients all the same. Were it taken from them and given back later, DDP would not notice, and their
    gradients would be each process's own.
    """
    rates: list[Any] = []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group, depth in zip(optimizer.param_groups, depths, strict=True):
            if is_held(depth):
                group["lr"] = 0.0

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _units(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    own = list(module.parameters(recurse=False))
    if own:
        yield own
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    for child in children:
        if isinstance(child, CONTAINERS) or (len(children) == 1 and not own and any(True for _ in child.children())):
            yield from _units(child)
        else:
            yield list(child.parameters())
