"""Example inputs of a network, found without consuming the data, with which the network is profiled and compared."""

import copy
import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from cnnstrategies._lightning_private import first_loader
from cnnstrategies._torch_private import hook_tables
from cnnstrategies.pipeline.microbatches import CPU, Images
from cnnstrategies.pipeline.network_inputs import as_images, inputs_of_call, network_inputs
from cnnstrategies.strategies.hybrid_pipeline.network import module_at
from cnnstrategies.strategies.module_copies import NoCollectives, muted_copy, same_random_numbers, tensors_stay

STEPS: dict[TrainerFn | None, str] = {
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def example_inputs(module: LightningModule, path: str, size: int) -> Images | None:
    """Return inputs of the network for about ``size`` samples; None if they are not known.

    The inputs are the module's ``example_input_array``, or random numbers of the data module's ``image_shape``, or what
    the module's step passes to the network for the first samples of the data: ``training_step`` in ``fit``, and the
    step of the run's kind in other runs. The step runs on a copy of the module, up to the call of the network. No
    loader is iterated.

    Args:
        module: The module, which has a trainer.
        path: Path of the network.
        size: Number of samples. At least two samples are returned, because batch normalisation cannot train on one.
    """
    size = max(2, size)
    names = network_inputs(module_at(module, path))
    images = given_inputs(module, names)
    if images is not None:
        return repeated(images, size)
    shape = getattr(getattr(module.trainer, "datamodule", None), "image_shape", None)
    with same_random_numbers(CPU):
        if shape is not None and len(names) == 1:
            return torch.randn(size, *shape)
        batch = first_samples(first_loader(module.trainer), size)
        if batch is None:
            return None
        batch = as_loaded(module, batch)
        step = STEPS.get(module.trainer.state.fn, "training_step")
        arguments = arguments_of_call(module, path, step, batch)
    if arguments is None or not all(map(_has_tensors_only, arguments)):
        return None
    return as_images(arguments)


def given_inputs(module: LightningModule, names: Sequence[str]) -> Images | None:
    """Return a module's ``example_input_array``, if it has a tensor for each input of the network; else None."""
    example = module.example_input_array
    arrays: tuple[Any, ...] = example if isinstance(example, tuple) else (example,)
    is_complete = len(arrays) == len(names) and all(isinstance(array, Tensor) for array in arrays)
    return as_images(arrays) if is_complete else None


def _has_tensors_only(argument: Any) -> bool:
    values = argument.values() if isinstance(argument, dict) and argument else (argument,)
    return all(isinstance(value, Tensor) for value in values)


def is_attached(module: LightningModule) -> bool:
    """Return whether a module has a trainer, which it gets in each rank."""
    try:
        return module.trainer is not None
    except RuntimeError:
        return False


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


def as_loaded(module: LightningModule, batch: Any) -> Any:
    """Return a batch as the steps get it, after the hooks of its transfer, which run on a copy of the module."""
    copied = muted_copy(module)
    batch = module.trainer.precision_plugin.convert_input(batch)  # Lightning does this when it loads a batch.
    return copied.on_after_batch_transfer(copied.on_before_batch_transfer(batch, 0), 0)


class _CallSeen(BaseException):
    """Ends a step. No ``except Exception`` of the step catches this exception."""


def arguments_of_call(module: LightningModule, path: str, step: str, batch: Any) -> list[Any] | None:
    """Return what a step passes to the network, in the order of the network's arguments.

    The step runs on a copy of the module, up to the call of the network.

    Args:
        module: The module.
        path: Path of the network.
        step: Name of the step's method.
        batch: The batch, which the step may change.

    Returns:
        The arguments; None if the step does not call the network, calls it in a way in which it cannot be called, or
        calls a collective before. Errors of the step are ignored here, because they occur again when the step runs.
    """
    copied, network = muted_copy(module), module_at(module, path)
    called = copied.get_submodule(path)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        raise _CallSeen

    vars(called)["forward"] = record
    for hooks in hook_tables(called) if path else ():
        hooks.clear()
    with tensors_stay(module), NoCollectives(), torch.no_grad(), suppress(_CallSeen, Exception):
        parameters = inspect.signature(getattr(module, step)).parameters.values()
        taken = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        # A trainer also gives the indices of the batch and of the loader.
        getattr(copied, step)(*[batch, 0, 0][: max(1, len(taken))])
    if not calls:
        return None
    args, kwargs = calls[-1]
    try:
        return inputs_of_call(inspect.signature(network.forward), network_inputs(network), args, kwargs)[0]
    except TypeError:
        return None
