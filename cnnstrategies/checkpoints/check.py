"""Whether a run can go on from a checkpoint: what its shapes say before the start."""

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

ALWAYS = ("state_dict", "pytorch-lightning_version")  # In every checkpoint that Lightning saves.
CHANGES_IT = ("on_load_checkpoint", "configure_model", "configure_sharded_model")  # Hooks of a module.


def check_weights(
    model: LightningModule, path: Path | str, weights_only: bool | None = None, training: bool = False
) -> None:
    """Refuse a file that is no checkpoint, or that of another network; its weights are not read.

    What cannot be known without the hooks of a user's module is left to them, and what is no file, such as a URL, a
    word or a directory of shards, is not looked at. To go on ``training`` takes more than weights.
    """
    path = Path(path)
    if not path.is_file():
        return
    try:
        # Legacy files cannot be mapped.
        whole = torch.load(path, map_location="meta", mmap=zipfile.is_zipfile(path), weights_only=weights_only)
    except Exception as error:
        raise unreadable(path, error) from error
    held = sorted(map(str, whole)) if isinstance(whole, Mapping) else [type(whole).__name__]
    if not isinstance(whole, Mapping) or not all(key in whole for key in ALWAYS):
        raise ConfigurationError(
            f"ckpt_path: {path} is not a checkpoint of a run but holds {', '.join(held[:3])}"
            f"{', ...' if len(held) > 3 else ''}: weights alone are loaded by the model's own code"
        )
    if training and "optimizer_states" not in whole:
        raise ConfigurationError(
            f"ckpt_path: {path} holds weights alone, and fit goes on with the optimizers' states: take one that was "
            "saved without save_weights_only"
        )
    if not model.strict_loading or any(is_overridden(hook, model) for hook in CHANGES_IT):
        return
    try:
        shadow = copy_without_contents(model)
    except Exception:
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # That nothing is copied.
            shadow.load_state_dict(whole["state_dict"])
    except RuntimeError as error:
        raise ConfigurationError(
            f"ckpt_path: {path} is of another network than `model` describes: "
            f"{_difference(whole['state_dict'], shadow.state_dict()) or str(error).splitlines()[-1].strip()}; "
            f"{remedy(path)}"
        ) from error


def copy_without_contents(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors have shapes and no contents, and so take no memory."""
    # The memo has deepcopy take these for the copies of the tensors.
    without_contents: dict[int, Any] = {
        **{id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()},
        **{id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()},
    }
    return copy.deepcopy(module, without_contents)


def _difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    for name, value in own.items():
        if name not in saved:
            return f"it has no {name}"
        if hasattr(value, "shape") and value.shape != saved[name].shape:
            return f"{name} has the shape {tuple(saved[name].shape)} there and {tuple(value.shape)} here"
    return next((f"it has {name}, which `model` has not" for name in saved if name not in own), None)


def remedy(path: Path) -> str:
    """Where the configuration of a checkpoint's run is."""
    configuration = path.parent.parent / "config.yaml"
    where = f"{configuration}" if configuration.is_file() else "the config.yaml of its run"
    return f"take `model` as it is in {where}"
