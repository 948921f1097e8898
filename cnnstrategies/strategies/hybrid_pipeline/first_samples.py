"""Inputs of a network for the first samples of the training data, which are found without consuming the data."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.leaf_tracer import network_inputs
from cnnstrategies.strategies.shadow import (
    NoCollectives,
    copy_metrics,
    same_random_numbers,
    shadow_of,
    tensors_stay,
)


def is_attached(module: LightningModule) -> bool:
    """Return whether a module has a trainer, which it gets in each rank."""
    try:
        return module.trainer is not None
    except RuntimeError:
        return False


def as_given(images: Sequence[Any]) -> Images:
    """Return images as a network takes them: a tuple if the network takes several."""
    arguments: Images = images[0] if len(images) == 1 else tuple(images)
    return arguments


def on_device_of(network: nn.Module, images: Images) -> Images:
    """Return images on a network's device. Images with floating-point numbers also get the network's dtype."""
    like = next(network.parameters())

    def moved(image: Tensor) -> Tensor:
        return image.to(like.device, like.dtype if image.is_floating_point() else None)

    result: Images = tree_map(moved, images)
    return result


def repeated(images: Images, size: int) -> Images:
    """Return a number of samples, in which the given samples are repeated."""
    rows = torch.arange(size) % len(tree_leaves(images)[0])
    result: Images = tree_map(lambda image: image[rows.to(image.device)], images)
    return result


def first_samples(loader: Any, size: int) -> Any:
    """Return a batch of the first samples of a loader's dataset; None if the samples have no indices.

    No sampler and no iterator of the loader is advanced.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
        return None
    if loader.batch_size is None and loader.batch_sampler is None:
        return loader.collate_fn(dataset[next(iter(copy.deepcopy(loader.sampler)))])
    return loader.collate_fn([dataset[index] for index in range(min(size, len(dataset)))])


def as_loaded(module: LightningModule, path: str, network: nn.Module, batch: Any) -> Any:
    """Return a batch as the steps get it, after the hooks of its transfer, which run on a copy of the module."""
    shadow = shadow_of(module, path, network, copy_metrics(module))
    batch = module.trainer.precision_plugin.convert_input(batch)  # Lightning does this when it loads a batch.
    return shadow.on_after_batch_transfer(shadow.on_before_batch_transfer(batch, 0), 0)


class _CallSeen(BaseException):
    """Ends a step. No ``except Exception`` of the step catches this exception."""


class _Recorder(nn.Module):
    """A module that takes the network's place and records a call. Its other attributes are those of the network.

    Attributes:
        call: Positional arguments and keyword arguments of the call; None before the call.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._network = [network]  # In a list, because the network must not become a submodule.

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_network"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.call = (args, kwargs)
        raise _CallSeen


def arguments_of_call(
    module: LightningModule, path: str, network: nn.Module, step: str, batch: Any, dataloader: int, device: torch.device
) -> list[Any] | None:
    """Return what a step passes to the network, in the order of the network's arguments.

    The step runs on a copy of the module, up to the call of the network.

    Args:
        module: The module.
        path: Path of the network.
        network: The network.
        step: Name of the step's method.
        batch: The batch, which the step may change.
        dataloader: Index of the data loader.
        device: Device of the random numbers that the step may draw.

    Returns:
        The arguments; None if the step does not call the network, or calls it in a way in which it cannot be called.
        Errors of the step are ignored here, because they occur again when the step runs.

    Raises:
        ConfigurationError: The step calls a collective.
    """
    recorder = _Recorder(network)
    recorder.training = module.training
    shadow = shadow_of(module, path, recorder, copy_metrics(module))
    with same_random_numbers(device), tensors_stay(module), NoCollectives(module, step) as watched:
        try:
            with torch.no_grad():
                getattr(shadow, step)(*_arguments(module, step, batch, dataloader))
        except (_CallSeen, Exception):
            pass
    if watched.refusal is not None:
        raise watched.refusal
    if recorder.call is None:
        return None
    try:
        bound = inspect.signature(network.forward).bind(*recorder.call[0], **recorder.call[1])
    except TypeError:
        return None
    return [only(bound.arguments.get(name)) for name in network_inputs(network)]


def only(value: Any) -> Any:
    """Return an argument; of a variable number of arguments, the only one."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _arguments(module: LightningModule, step: str, batch: Any, dataloader: int) -> list[Any]:
    """Return the arguments with which a trainer calls a step, as far as the step takes them."""
    parameters = inspect.signature(getattr(module, step)).parameters.values()
    wanted = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return [batch, 0, dataloader][: max(1, len(wanted))]
