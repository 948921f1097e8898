"""What a step gives its network: a step of the user's runs, on a copy of the module, up to the call."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies.pipeline.tracing import network_inputs
from cnnstrategies.strategies.hybrid_pipeline.shadow import copy_metrics, shadow_of


class _CallSeen(BaseException):
    """Ends a step; no ``except Exception`` of the step's own catches it."""


class _Recorder(nn.Module):
    """Takes the network's place and keeps what it is called with; all else that a step asks for is the network's.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._network = [network]  # Hidden, for its layers are none of this module's.

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_network"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.call = (args, kwargs)
        raise _CallSeen


def given_to_network(
    module: LightningModule,
    path: str,
    network: nn.Module,
    step: str,
    arguments: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    shows_errors: bool = False,
) -> list[Any] | None:
    """What a step gives the network, in the order of the network's arguments.

    The random numbers that it has drawn are used up.

    Args:
        module: The module.
        path: The path of its network.
        network: The whole network.
        step: Name of the step.
        arguments: What the step is called with.
        options: Likewise, by name.
        shows_errors: Let the step's own errors out; else they come again, and are shown, when it runs in full.

    Returns:
        The values; None where the step does not come to call it, or not as the network can be called.
    """
    recorder = _Recorder(network)
    recorder.training = module.training
    shadow = shadow_of(module, path, recorder, copy_metrics(module))
    try:
        with torch.no_grad():
            getattr(shadow, step)(*arguments, **(options or {}))
    except _CallSeen:
        pass
    except Exception:
        if shows_errors:
            raise
    if recorder.call is None:
        return None
    try:
        bound = inspect.signature(network.forward).bind(*recorder.call[0], **recorder.call[1])
    except TypeError:
        return None
    return [one_of(bound.arguments.get(name)) for name in network_inputs(network)]


def one_of(value: Any) -> Any:
    """An argument; of ``*args`` the only one."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def arguments_of(module: LightningModule, step: str, batch: Any, index: int, dataloader: int) -> list[Any]:
    """What a trainer calls a step with, as far as the step takes it."""
    parameters = inspect.signature(getattr(module, step)).parameters.values()
    wanted = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    return [batch, index, dataloader][: max(1, len(wanted))]
