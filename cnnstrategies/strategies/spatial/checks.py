"""Refusals: options and modules with which images cannot be divided."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import compiled_method, is_compiled
from cnnstrategies.data.division import describe_loader, divided_among, has_map, same_loaders
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.groups import GatherRows


def check_parts(parts: int) -> None:
    """Refuse a number of parts below 1.

    Raises:
        ConfigurationError: The number is refused.
    """
    if parts < 1:
        raise ConfigurationError(f"parts={parts}: an image has at least one part; use 2 or more to divide images")


def check_devices(parts: int, devices: int, device: torch.device, backend: str | None, syncs_batch_norm: bool) -> None:
    """Refuse options of a run that contradict the strategy.

    Args:
        parts: Number of parts of each image.
        devices: Number of devices of the run.
        device: Device of this rank.
        backend: Backend of the process group; None for the default.
        syncs_batch_norm: Whether the trainer's option ``sync_batchnorm`` is set.

    Raises:
        ConfigurationError: An option cannot be used.
    """
    if devices % parts:
        raise ConfigurationError(
            f"parts={parts}: {devices} device{'' if devices == 1 else 's'} cannot be divided into groups of {parts}; "
            f"set trainer.devices to a multiple of parts, such as {-(-devices // parts) * parts}, or choose another "
            "number of parts"
        )
    if syncs_batch_norm:
        raise ConfigurationError(
            "sync_batchnorm=True: batch normalisation sees the whole images of a group already; set "
            "trainer.sync_batchnorm to false"
        )
    if device.type == "cuda" and backend == "gloo":
        raise ConfigurationError(
            "process_group_backend=gloo: gloo sends no messages from one GPU to another; leave it out for NCCL"
        )


def check_module(module: LightningModule) -> None:
    """Refuse a module that is compiled, or that a callback would compile, or that has layers without a rule.

    A module that needs whole images says why in its attribute ``whole_images``.

    Raises:
        ConfigurationError: The module is refused.
    """
    if (reason := getattr(module, "whole_images", None)) is not None:
        raise ConfigurationError(f"strategy spatial cannot train {type(module).__name__}: {reason}")
    remedy = "spatial divides the operations of a module that is not compiled; leave torch.compile out, or use ddp"
    trainer = getattr(module, "_trainer", None)
    for owner in (module, *(() if trainer is None else trainer.callbacks)):
        if (backend := getattr(owner, "compile_backend", None)) is not None:
            raise ConfigurationError(f"compile_backend={backend!r} of {type(owner).__name__}: {remedy}")
    if is_compiled_whole(module):
        raise ConfigurationError(f"{type(module).__name__} is compiled: {remedy}")
    for name, layer in module.named_modules():
        if is_compiled(layer):
            raise ConfigurationError(f"{name or type(module).__name__} is compiled: {remedy}")
        if (method := compiled_method(layer)) is not None:
            raise ConfigurationError(f"{name or type(module).__name__}.{method} is compiled: {remedy}")
        if isinstance(layer, nn.SyncBatchNorm):
            raise ConfigurationError(
                f"{name} is a SyncBatchNorm layer, which does not know parts of images: use BatchNorm, which sees the "
                "whole images of a group under spatial"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigurationError(
                f"{name} gets its shape in the first forward, but all ranks begin with equal values: call the layer "
                "once with an example in __init__ or configure_model"
            )


def check_division(loader: Any, replicas: int, parts: int, gather: GatherRows) -> None:
    """Refuse a loader whose data the user's code has divided among all ranks. All ranks of a group must call this.

    Only one rank of a group loads data, so the data of the other ranks would be left out.

    Args:
        loader: This rank's loader.
        replicas: Number of groups.
        parts: Number of ranks in a group.
        gather: Function that sends a row of numbers to all ranks of the group, and returns their rows.

    Raises:
        ConfigurationError: The loader is refused.
    """
    declared = divided_among(loader)
    if declared is not None:
        name, number = declared
        if number not in (1, replicas):
            refuse_divided_data(f"{name} has num_replicas={number}", replicas, parts)
    elif has_map(loader) and parts > 1:
        first, *others = gather(describe_loader(loader))
        if not all(same_loaders(first, row) for row in others):
            refuse_divided_data("the ranks of a group have different data sets or samplers", replicas, parts)


def refuse_divided_data(reason: str, replicas: int, parts: int, is_stream: bool = False) -> None:
    """Raise the error for data that the user's code has divided among all ranks.

    Args:
        reason: Text for what was found.
        replicas: Number of groups.
        parts: Number of ranks in a group.
        is_stream: Whether the samples have no indices, so that Lightning cannot divide them.

    Raises:
        ConfigurationError: In each call.
    """
    remedy = "use **trainer.distributed_sampler_kwargs, or let Lightning divide the data"
    if is_stream:
        remedy = f"divide the stream by the number rank // {parts} in place of the rank, or do not divide the stream"
    raise ConfigurationError(
        f"{reason}: with parts={parts} each {parts} ranks get parts of the same images, which one of them loads, so "
        f"the data can be divided among {replicas} rank{'' if replicas == 1 else 's'} only; {remedy}"
    )
