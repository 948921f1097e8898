"""What ``tune`` can try with a configuration; what is configured already is not among it."""

import os
from collections.abc import Collection
from typing import Any

import torch

from cnnstrategies.commands.run.errors import parameters_of
from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.tune.settings import Setting

MOST_WORKERS = 4  # of a rank


def choices(config: Any, model: type, device: torch.device, allow: Collection[str]) -> list[list[Setting]]:
    """Groups of settings that exclude each other, tried in all combinations.

    What the module's class has arguments for is set there, the rest by a callback.
    """
    own, arguments = _arguments(config, model)
    if "channels_last" in arguments:
        given = bool(own.get("channels_last"))
        name, values = "contiguous" if given else "channels_last", {"model.init_args.channels_last": not given}
    else:
        name, values = "channels_last", {"ComputeSettings.channels_last": True}
    groups = [[Setting(name, values, Effect.ROUNDING)]]
    if "precision" in allow and str(config.trainer.precision) in ("32-true", "32", "None"):
        found = []
        if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
            found.append(Setting("bf16", {"trainer.precision": "bf16-mixed"}, Effect.LEARNING))
        if device.type == "cuda":
            found.append(Setting("TF32", {"ComputeSettings.float32_precision": "high"}, Effect.LEARNING))
        groups.append(found)
    if device.type == "cuda" and not config.trainer.benchmark:
        groups.append([Setting("cudnn.benchmark", {"trainer.benchmark": True}, Effect.ROUNDING)])
    return [group for group in groups if group]


def compilers(config: Any, model: type) -> list[Setting]:
    """What is tried on top of the fastest of these: to compile each combination would take most of the time."""
    own, arguments = _arguments(config, model)
    if "compile_backend" in arguments:
        value = None if own.get("compile_backend") else "inductor"
        return [Setting(value or "not compiled", {"model.init_args.compile_backend": value}, Effect.ROUNDING)]
    return [Setting("inductor", {"ComputeSettings.compile_backend": "inductor"}, Effect.ROUNDING)]


def loading(config: Any, data: type) -> list[Setting]:
    """Other numbers of processes that load."""
    arguments = parameters_of(data)
    if "num_workers" not in arguments or not hasattr(config.data, "init_args"):
        return []
    ranks = int(config.trainer.devices) if str(config.trainer.devices).isdigit() else 1
    most = min(MOST_WORKERS, max(1, (os.cpu_count() or 1) // ranks))
    keeps = {"data.init_args.persistent_workers": True} if "persistent_workers" in arguments else {}
    return [
        Setting(f"{one} workers", {"data.init_args.num_workers": one, **(keeps if one else {})}, Effect.NONE)
        for one in dict.fromkeys((0, 1, most // 2, most))
        if one != config.data.init_args.get("num_workers", 0)
    ]


def _arguments(config: Any, model: type) -> tuple[Any, Collection[str]]:
    """What a module's arguments are set to, and which it has."""
    if not hasattr(config.model, "init_args"):
        return {}, ()
    return config.model.init_args, parameters_of(model)
