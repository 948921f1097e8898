"""A microbatch to measure and compare the network with, before training."""

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from cnnstrategies._lightning_private import train_loader
from cnnstrategies.models.own_forward import network_at
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.tracing import network_inputs
from cnnstrategies.strategies.hybrid_pipeline.batches import flatten
from cnnstrategies.strategies.hybrid_pipeline.shadow import copy_metrics, same_random_numbers, shadow_of
from cnnstrategies.strategies.hybrid_pipeline.wiring import NetworkCalls, arguments_of


def example_images(module: LightningModule, path: str, size: int) -> Images | None:
    """One microbatch of the network's inputs, of so many samples where that is open.

    It is the module's own example, repeated, noise of the size of the data's images, or samples of the training data.
    No loader of the module's trainer may have been iterated.

    Returns:
        The images; None where they cannot be known without taking them from what is trained with.
    """
    size = max(2, size)  # Batch normalisation refuses to train on one, which many examples have.
    network = network_at(module, path)
    names = network_inputs(network)
    example = module.example_input_array
    shape = getattr(getattr(module.trainer, "datamodule", None), "image_shape", None)
    given: tuple[Any, ...] = example if isinstance(example, tuple) else (example,)
    if len(given) == len(names) and all(isinstance(one, Tensor) for one in given):
        images: Images = given[0] if len(names) == 1 else given
        return _repeated(images, size)
    with same_random_numbers(CPU):
        if shape is not None and len(names) == 1:
            return torch.randn(size, *shape)
        batch = _samples(train_loader(module.trainer), size)
        return None if batch is None else _inputs(module, path, network, batch)


def example_on_device(module: LightningModule, path: str, size: int) -> Images | None:
    """The same on the network's device and of its type; None before the module has a trainer, too."""
    images = example_images(module, path, size) if is_attached(module) else None
    return None if images is None else on_device_of(network_at(module, path), images)


def is_attached(module: LightningModule) -> bool:
    """Whether a module has its trainer already, which it gets in each rank."""
    try:
        return module.trainer is not None
    except RuntimeError:
        return False


def on_device_of(network: nn.Module, images: Images) -> Images:
    """The images on the network's device and, unless they are integers, of its type."""
    like = next(network.parameters())
    result: Images = tree_map(lambda one: one.to(like.device, like.dtype if one.is_floating_point() else None), images)
    return result


def _repeated(images: Images, size: int) -> Images:
    """The samples again and again, up to a number of them."""
    rows = torch.arange(size) % len(tree_leaves(images)[0])
    repeated: Images = tree_map(lambda one: one[rows.to(one.device)], images)
    return repeated


def _samples(loader: Any, size: int) -> Any:
    """A batch of the first samples of the data; nothing that a sampler or an iterator gives is used up."""
    dataset: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
        return None
    if loader.batch_size is None and loader.batch_sampler is None:
        return loader.collate_fn(dataset[next(iter(copy.deepcopy(loader.sampler)))])
    return loader.collate_fn([dataset[index] for index in range(min(size, len(dataset)))])


def _inputs(module: LightningModule, path: str, network: nn.Module, batch: Any) -> Images:
    shadow = shadow_of(module, path, network, copy_metrics(module))
    batch = module.trainer.precision_plugin.convert_input(batch)  # As when it is loaded.
    batch = shadow.on_after_batch_transfer(shadow.on_before_batch_transfer(batch, 0), 0)
    calls = NetworkCalls(module, path, network)
    wiring = calls.wiring("training_step", batch, 0, CPU)
    leaves, _ = flatten(batch)
    images = [leaves[index] for index in wiring.inputs]
    if wiring.computes:
        arguments = arguments_of(module, "training_step", batch, 0, 0)
        images = calls.given("training_step", arguments) or images
    return images[0] if len(images) == 1 else tuple(images)
