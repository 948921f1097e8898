"""The state of the whole network's optimizers, from those of the stages, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError

Groups = list[list[str]]  # the names of the parameters of each group of an optimizer


def group_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> Groups:
    """The names of the parameters of each parameter group."""
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ConfigurationError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not part of the "
                    "network that is divided: give it the parameters of that alone"
                )
        groups.append([names[parameter] for parameter in group["params"]])
    return groups


def hold(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], groups: Groups) -> None:
    """Have an optimizer hold some of the network's parameters alone; its groups stay, even where they become empty."""
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in names if name in parameters]
        if "param_names" in group:
            group["param_names"] = [name for name in names if name in parameters]
    kept = set(parameters.values())
    for parameter in list(optimizer.state):
        if parameter not in kept:
            del optimizer.state[parameter]


def named_state(optimizer: Optimizer, own: Mapping[str, nn.Parameter], groups: Groups) -> dict[str, Any]:
    """The state of each of a stage's parameters by name."""
    names = [name for group in groups for name in group if name in own]
    state: dict[int, Any] = optimizer.state_dict()["state"]
    return {name: state[index] for index, name in enumerate(names) if index in state}


def merge_state(optimizer: Optimizer, parts: Sequence[Mapping[str, Any]], groups: Groups) -> dict[str, Any]:
    """The state dict of the optimizer over the whole network, as one process would save it, from the stages' states."""
    states = {name: state for part in parts for name, state in part.items()}
    merged: dict[int, Any] = {}
    param_groups = []
    index = 0
    for group, names in zip(optimizer.state_dict()["param_groups"], groups, strict=True):
        param_groups.append({**group, "params": list(range(index, index + len(names)))})
        if "param_names" in group:
            param_groups[-1]["param_names"] = names
        for name in names:
            if name in states:
                merged[index] = states[name]
            index += 1
    return {"state": merged, "param_groups": param_groups}


def split_state(state: Mapping[str, Any], own: Mapping[str, nn.Parameter], groups: Groups) -> dict[str, Any]:
    """The part of a whole optimizer's state dict that belongs to a stage, with its parameters by name."""
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(names) for names in groups]:
        raise ConfigurationError(
            f"the checkpoint's optimizer has parameter groups of sizes {sizes}, this one's are "
            f"{[len(names) for names in groups]}: resume with the model and optimizer that the checkpoint is of"
        )
    states: dict[int, Any] = {}
    param_groups = []
    local = 0
    for group, names in zip(state["param_groups"], groups, strict=True):
        kept = []
        for index, name in zip(group["params"], names, strict=True):
            if name not in own:
                continue
            if index in state["state"]:
                states[local] = state["state"][index]
            kept.append(local)
            local += 1
        param_groups.append({**group, "params": kept})
        if "param_names" in group:
            param_groups[-1]["param_names"] = [name for name in names if name in own]
    return {"state": states, "param_groups": param_groups}
