"""The profile that chooses a pipeline's cuts: measured, or kept from an earlier start of the same run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.utils._pytree import tree_leaves

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.graph_checks import nothing_stored
from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.pipeline.tracing import trace_open
from cnnstrategies.planning.costs import Profile
from cnnstrategies.planning.kept_profile import NAME, keep, kept, key_of
from cnnstrategies.planning.measure import measure_profile


def profile_of(
    network: nn.Module,
    images: Images,
    size: int,
    device: torch.device,
    trainer: Trainer,
) -> Profile:
    """Return the profile of a network.

    The profile is kept beside the checkpoints. The next start reads it if the network, the images, the device and the
    versions are the same.

    Args:
        network: The network.
        images: Example inputs of the network, on its device.
        size: Number of samples that one device has in a step.
        device: Device on which the network is measured.
        trainer: The trainer.

    Raises:
        ConfigurationError: The network fails on the images.
    """
    settings = str(trainer.precision), bool(getattr(trainer.lightning_module, "channels_last", False))
    with _failures_named(network, images):
        traced = trace_open(network, training=True)
    file = _file(trainer)
    key = "" if file is None else key_of(traced, images, size, device, *settings)
    if file is not None and (earlier := kept(file, key)) is not None:
        rank_zero_info(
            f"The cuts are chosen by the profile of an earlier start, {file}; remove the file to measure again"
        )
        return earlier
    # Only one rank measures, but all ranks count and store.
    with _failures_named(network, images), nothing_stored(trainer.lightning_module or network, network):
        profile = measure_profile(traced, images, size, device, *settings)
    if file is not None:
        keep(file, key, profile)
    return profile


@contextmanager
def _failures_named(network: nn.Module, images: Images) -> Iterator[None]:
    """Return a context whose errors say that the network fails on the images."""
    try:
        yield
    except Exception as error:
        shapes = " and ".join(str(tuple(image.shape[1:])) for image in tree_leaves(images))
        raise ConfigurationError(
            f"cuts are chosen by a profile, and {type(network).__name__} fails on what the batch has, samples of shape "
            f"{shapes}: {type(error).__name__}: {error}. The steps must give it that in one call; else set "
            "self.example_input_array, or name the cuts"
        ) from error


def _file(trainer: Trainer) -> Path | None:
    """Return the file in which the profile is kept; None if the run has no local folder of checkpoints."""
    checkpoint = getattr(trainer, "checkpoint_callback", None)
    folder = checkpoint.dirpath if isinstance(checkpoint, ModelCheckpoint) else None
    return None if folder is None or "://" in str(folder) else Path(folder) / NAME
