"""Checks, before a run starts, whether it can start from a checkpoint; only shapes are read."""

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

REQUIRED_KEYS = ("state_dict", "pytorch-lightning_version")  # Lightning saves them in every checkpoint.
# Hooks of a module that can change the network or the checkpoint before the weights are loaded.
LOADING_HOOKS = ("on_load_checkpoint", "configure_model", "configure_sharded_model")


def check_weights(
    model: LightningModule, path: Path | str, weights_only: bool | None = None, training: bool = False
) -> None:
    """Refuse a file that is not a checkpoint, or that is the checkpoint of another network. Weights are not read.

    A module with hooks that change the network or the checkpoint is not compared. A path that is not a file, such as a
    URL, a word or a directory of shards, is not checked.

    Args:
        model: The module that will load the checkpoint.
        path: Path of the checkpoint.
        weights_only: Whether the file may hold only weights and plain values; see ``torch.load``.
        training: Whether a training resumes, which also needs the optimizers' states.

    Raises:
        ConfigurationError: The checkpoint cannot be used.
    """
    path = Path(path)
    if not path.is_file():
        return
    try:
        # Legacy files cannot be mapped.
        content = torch.load(path, map_location="meta", mmap=zipfile.is_zipfile(path), weights_only=weights_only)
    except Exception as error:
        raise unreadable(path, error) from error
    keys = sorted(map(str, content)) if isinstance(content, Mapping) else [type(content).__name__]
    if not isinstance(content, Mapping) or not all(key in content for key in REQUIRED_KEYS):
        raise ConfigurationError(
            f"ckpt_path: {path} is not a checkpoint of a run but holds {', '.join(keys[:3])}"
            f"{', ...' if len(keys) > 3 else ''}: load weights alone in the model's own code"
        )
    if training and "optimizer_states" not in content:
        raise ConfigurationError(
            f"ckpt_path: {path} holds weights alone, and fit needs the optimizers' states to resume: give a checkpoint "
            "that was saved without save_weights_only"
        )
    if not model.strict_loading or any(is_overridden(hook, model) for hook in LOADING_HOOKS):
        return
    try:
        shadow = copy_without_contents(model)
    except Exception:
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that tensors without contents are not copied.
            shadow.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        raise ConfigurationError(
            f"ckpt_path: {path} is of another network than `model` describes: "
            f"{_difference(content['state_dict'], shadow.state_dict()) or str(error).splitlines()[-1].strip()}; "
            f"{remedy(path)}"
        ) from error


def copy_without_contents(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors have shapes but no contents, so that the copy needs no memory."""
    # With this memo deepcopy uses these tensors as the copies.
    without_contents: dict[int, Any] = {
        **{id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()},
        **{id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()},
    }
    return copy.deepcopy(module, without_contents)


def _difference(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Return words for the first difference between a checkpoint's weights and the model's; None without any."""
    for name, value in expected.items():
        if name not in saved:
            return f"the checkpoint has no {name}"
        if hasattr(value, "shape") and value.shape != saved[name].shape:
            return (
                f"{name} has the shape {tuple(saved[name].shape)} in the checkpoint and {tuple(value.shape)} in `model`"
            )
    return next((f"the checkpoint has {name}, and `model` has not" for name in saved if name not in expected), None)


def remedy(path: Path) -> str:
    """Return the end of a message that names the configuration of a checkpoint's run."""
    configuration = path.parent.parent / "config.yaml"
    source = f"{configuration}" if configuration.is_file() else "the config.yaml of its run"
    return f"use the `model` of {source}"
