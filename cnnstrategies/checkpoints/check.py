"""Checks whether a checkpoint fits the model, before a run starts. The values of tensors are not read."""

import copy
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from cnnstrategies.checkpoints.io import unreadable
from cnnstrategies.errors import ConfigurationError

REQUIRED_KEYS = ("state_dict", "pytorch-lightning_version")  # Every Lightning checkpoint has these keys.
# Hooks that can change the network or the checkpoint before the weights are loaded. For a module that has such a hook,
# the names and shapes of the weights are not compared.
LOADING_HOOKS = ("on_load_checkpoint", "configure_model", "configure_sharded_model")


def check_weights(
    model: LightningModule, path: Path | str, weights_only: bool | None = None, training: bool = False
) -> None:
    """Check that a file is a checkpoint, and that the names and shapes of its weights are those of the model.

    Names and shapes are not compared if the module sets ``strict_loading`` to False, or has hooks that may change the
    network or the checkpoint. A path that is not a file is accepted without a check: a URL, a keyword such as ``last``,
    or the directory of a sharded checkpoint.

    Args:
        model: The module that will load the checkpoint.
        path: Path of the checkpoint.
        weights_only: The argument ``weights_only`` of ``torch.load``: whether objects other than tensors and plain
            values are refused.
        training: Whether training is resumed, for which the checkpoint must contain the optimizers' states.

    Raises:
        ConfigurationError: The file is damaged, is not a checkpoint, or does not fit the model.
    """
    path = Path(path)
    if not path.is_file():
        return
    try:
        # Files in torch's legacy format are not zip archives and cannot be memory-mapped, so they are read completely.
        content = torch.load(path, map_location="meta", mmap=zipfile.is_zipfile(path), weights_only=weights_only)
    except Exception as error:
        raise unreadable(path, error) from error
    keys = sorted(map(str, content)) if isinstance(content, Mapping) else [type(content).__name__]
    if not isinstance(content, Mapping) or not all(key in content for key in REQUIRED_KEYS):
        raise ConfigurationError(
            f"ckpt_path: {path} is not a checkpoint of a run, because it contains only {', '.join(keys[:3])}"
            f"{', ...' if len(keys) > 3 else ''}: if it is a file of weights, load it in the model's own code"
        )
    if training and "optimizer_states" not in content:
        raise ConfigurationError(
            f"ckpt_path: {path} contains only weights, and fit also needs the optimizers' states to resume: set a "
            "checkpoint that was saved without save_weights_only"
        )
    if not model.strict_loading or any(is_overridden(hook, model) for hook in LOADING_HOOKS):
        return
    try:
        shadow = copy_without_contents(model)
    except Exception:
        return
    try:
        # Hide torch's warnings that values are not copied to meta tensors: loading only compares names and shapes here.
        with warnings.catch_warnings(action="ignore"):
            shadow.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        raise ConfigurationError(
            f"ckpt_path: {path} does not fit the network of `model`: "
            f"{_difference(content['state_dict'], shadow.state_dict()) or str(error).splitlines()[-1].strip()}; "
            f"{remedy(path)}"
        ) from error


def copy_without_contents(module: nn.Module) -> nn.Module:
    """Return a copy of a module with meta tensors, which have shapes and dtypes but do not use memory."""
    # This is a memo for `deepcopy`. Keys: ids of the tensors. Values: the copies that `deepcopy` uses for the tensors.
    without_contents: dict[int, Any] = {
        **{id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()},
        **{id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()},
    }
    return copy.deepcopy(module, without_contents)


def _difference(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Return a text about the first difference between the weights of a checkpoint and of the model.

    Only names and shapes are compared. The result is None if all names and shapes are equal.
    """
    for name, value in expected.items():
        if name not in saved:
            return f"the checkpoint has no {name}"
        if hasattr(value, "shape") and value.shape != saved[name].shape:
            return (
                f"{name} has the shape {tuple(saved[name].shape)} in the checkpoint and {tuple(value.shape)} in `model`"
            )
    return next((f"the checkpoint has {name}, but `model` does not" for name in saved if name not in expected), None)


def remedy(path: Path) -> str:
    """Return the remedy for an error message: use the configuration of the run that saved the checkpoint."""
    configuration = path.parent.parent / "config.yaml"
    source = f"{configuration}" if configuration.is_file() else "the config.yaml of its run"
    return f"use the `model` of {source}"
