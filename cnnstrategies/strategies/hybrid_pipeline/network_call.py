"""What a step gives its network: found by running a step of the user's up to the call."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.tracing import network_inputs
from cnnstrategies.strategies.hybrid_pipeline.batches import flatten
from cnnstrategies.strategies.hybrid_pipeline.shadow import copy_metrics, same_random_numbers, shadow_of


class _CallSeen(BaseException):
    """Ends a step; no ``except Exception`` of the step's own catches it."""


class _Recorder(nn.Module):
    """Takes the network's place and keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.call = (args, kwargs)
        raise _CallSeen


def find_inputs(
    module: LightningModule, path: str, network: nn.Module, step: str, batch: Any, dataloader: int, device: torch.device
) -> list[int]:
    """Which leaves of a batch a step gives the network, in the order of the network's arguments.

    The step runs on a copy of the module, up to the call. Where that does not tell, these are the first tensors of the
    batch; if the step does something else, it says so when it runs.

    Args:
        module: The module.
        path: The path of its network.
        network: The whole network.
        step: Name of the step.
        batch: A batch.
        dataloader: Which of several loaders it is from.
        device: Where it is.

    Raises:
        ConfigurationError: There are not as many tensors as the network takes.
    """
    leaves, _ = flatten(batch)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim]
    names = network_inputs(network)
    first = tensors[: len(names)]
    if len(first) < len(names):
        raise ConfigurationError(
            f"a batch is a {_described(batch)}, and the network takes {' and '.join(names)}: strategy hybrid_pipeline "
            "takes batches of tensors with one row per sample, in tuples, lists or dicts"
        )
    if len(tensors) == 1:
        return first
    recorder = _Recorder().train(module.training)
    shadow = shadow_of(module, path, recorder, copy_metrics(module))
    try:
        with same_random_numbers(device), torch.no_grad():
            getattr(shadow, step)(*_arguments(getattr(shadow, step), batch, dataloader))
    except (_CallSeen, Exception):  # An error comes again when the step runs, and then it is shown.
        pass
    if recorder.call is None:
        return first
    try:
        bound = inspect.signature(network.forward).bind(*recorder.call[0], **recorder.call[1])
    except TypeError:
        return first
    given = [_position(bound.arguments.get(name), leaves, tensors) for name in names]
    return first if None in given else [index for index in given if index is not None]


def _arguments(step: Any, batch: Any, dataloader: int) -> list[Any]:
    wanted = [one for one in inspect.signature(step).parameters.values() if one.kind is not one.VAR_KEYWORD]
    return [batch, 0, dataloader][: max(1, len(wanted))]


def _described(batch: Any) -> str:
    leaves, _ = flatten(batch)
    kinds = [f"Tensor{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    return f"{type(batch).__name__} of {', '.join(kinds)}"


def _position(value: Any, leaves: Sequence[Any], tensors: Sequence[int]) -> int | None:
    """Which leaf a value is, or a copy of."""
    for index in tensors:
        if value is leaves[index]:
            return index
    if not isinstance(value, Tensor):
        return None
    for index in tensors:
        leaf = leaves[index]
        if value.shape == leaf.shape and value.dtype == leaf.dtype and torch.equal(value, leaf):
            return index
    return None
