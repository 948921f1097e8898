"""What ``tune`` can try with a configuration; what is configured already is not among it."""

import importlib
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from cnnstrategies.commands.run.errors import parameters_of
from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.tune.settings import Setting
from cnnstrategies.strategies import CompressedDDPStrategy, HybridPipelineStrategy, ParameterServerStrategy

BUCKETS = (5, 25, 100)  # MB; torch's own is 25
MICROBATCHES = (4, 8, 16)  # where the configuration leaves their number open
MOST_SERVERS = 2  # of a machine; more help only where one server's core is always busy
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


def communication(trainer: Any, model: nn.Module, allow: Collection[str]) -> list[Setting]:
    """One setting after the other. Batch normalisation makes the number of microbatches a part of what is learned."""
    if str(trainer.devices) == "1" and int(trainer.num_nodes) == 1:
        return []
    kind, given = _strategy(trainer.strategy)
    whole = not hasattr(trainer.strategy, "init_args")

    def setting(name: str, effect: Effect, to: type = kind, **changed: Any) -> Setting:
        if not whole and to is kind:
            return Setting(name, {f"trainer.strategy.init_args.{key}": one for key, one in changed.items()}, effect)
        path = f"{to.__module__}.{to.__qualname__}"
        start = {} if to is not kind and not whole else given
        return Setting(name, {"trainer.strategy": {"class_path": path, "init_args": {**start, **changed}}}, effect)

    found: list[Setting] = []
    if issubclass(kind, HybridPipelineStrategy):
        current, learns = given.get("microbatches"), has_batch_norm(model)
        counts = MICROBATCHES if current is None else (current // 2, 2 * current)
        if not learns or "microbatches" in allow:
            effect = Effect.LEARNING if learns else Effect.ROUNDING
            found += [setting(f"{one} microbatches", effect, microbatches=one) for one in counts if one]
        if given.get("schedule", "1f1b") == "1f1b":
            found += [
                setting(f"run_ahead: {one}".lower(), Effect.ROUNDING, run_ahead=one)
                for one in (True, False)
                if given.get("run_ahead") is not one
            ]
            found.append(setting("gpipe", Effect.ROUNDING, schedule="gpipe"))
        else:
            found.append(setting("1f1b", Effect.ROUNDING, schedule="1f1b"))
    elif issubclass(kind, ParameterServerStrategy):
        if not given.get("endpoints"):
            others = (one for one in range(1, MOST_SERVERS + 1) if one != given.get("servers", 1))
            found += [setting(f"{one} servers", Effect.ROUNDING, servers=one) for one in others]
        if "compression" in allow and given.get("compression", "none") == "none":
            found.append(setting("bf16 sent", Effect.LEARNING, compression="bf16", pull_compression="bf16"))
    elif issubclass(kind, DDPStrategy):
        sizes = (one for one in BUCKETS if one != given.get("bucket_cap_mb", 25))
        found += [setting(f"buckets of {one} MB", Effect.ROUNDING, bucket_cap_mb=one) for one in sizes]
        if kind is DDPStrategy and "compression" in allow:
            found += [
                setting(f"{one} gradients", Effect.LEARNING, CompressedDDPStrategy, compression=one)
                for one in ("bf16", "powersgd")
            ]
    return found


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


def _strategy(configured: Any) -> tuple[type, Mapping[str, Any]]:
    """A configured strategy's class and what it is given."""
    if not isinstance(configured, str):
        module, _, name = configured.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name), dict(configured.get("init_args") or {})
    if configured not in StrategyRegistry:
        return DDPStrategy, {}  # "auto" with several devices
    entry = StrategyRegistry[configured]
    return entry["strategy"], dict(entry["init_params"])
