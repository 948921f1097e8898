"""What ``tune`` can try with how ranks exchange gradients and activations, and with how data is loaded."""

import importlib
import inspect
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from cnnstrategies.data.shards.decoders import DECODERS, chosen, is_installed
from cnnstrategies.pipeline.batchnorm import has_batch_norm
from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.settings import Setting
from cnnstrategies.strategies import CompressedDDPStrategy, HybridPipelineStrategy, ParameterServerStrategy

BUCKETS = (5, 25, 100)  # MB; torch's own is 25
MICROBATCHES = (4, 8, 16)  # where the configuration leaves their number open
MOST_SERVERS = 2  # of a machine; more help only where one server's core is always busy
MOST_WORKERS = 4  # of a rank


def communication(trainer: Any, model: nn.Module, allow: Collection[str]) -> list[Setting]:
    """One setting after the other; what is configured already is not among them.

    Args:
        trainer: The trainer's parsed configuration.
        model: Its batch normalisation makes the number of microbatches a part of what is learned.
        allow: What may be changed although it changes what is learned.
    """
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


def loading(config: Any, data: type, device: torch.device) -> list[Setting]:
    """Other numbers of processes that load, and pinned memory where a device needs it.

    Args:
        config: The parsed configuration.
        data: The data module's class: it must have arguments for them.
        device: Of the kind that will train.
    """
    arguments = inspect.signature(data).parameters
    if "num_workers" not in arguments or not hasattr(config.data, "init_args"):
        return []
    own = config.data.init_args
    ranks = int(config.trainer.devices) if str(config.trainer.devices).isdigit() else 1
    most = min(MOST_WORKERS, max(1, (os.cpu_count() or 1) // ranks))
    keeps = {"data.init_args.persistent_workers": True} if "persistent_workers" in arguments else {}
    found = [
        Setting(f"{one} workers", {"data.init_args.num_workers": one, **(keeps if one else {})}, Effect.NONE)
        for one in dict.fromkeys((0, 1, most // 2, most))
        if one != own.get("num_workers", 0)
    ]
    if device.type == "cuda" and "pin_memory" in arguments and own.get("pin_memory") is False:
        found.append(Setting("pinned memory", {"data.init_args.pin_memory": True}, Effect.NONE))
    return found


def decoding(config: Any, data: type, allow: Collection[str]) -> list[Setting]:
    """The other decoders of JPEG files that are installed; each rounds in its own way, so other pixels are learned.

    Args:
        config: The parsed configuration.
        data: The data module's class: it must have an argument for the decoder.
        allow: What may be changed although it changes what is learned.
    """
    if "decoder" not in allow or "decoder" not in inspect.signature(data).parameters:
        return []
    own = chosen(config.data.init_args.get("decoder", "auto"))
    return [
        Setting(one, {"data.init_args.decoder": one}, Effect.LEARNING)
        for one in DECODERS
        if one != own and is_installed(one)
    ]


def _strategy(configured: Any) -> tuple[type, Mapping[str, Any]]:
    """A configured strategy's class and what it is given."""
    if not isinstance(configured, str):
        module, _, name = configured.class_path.rpartition(".")
        return getattr(importlib.import_module(module), name), dict(configured.get("init_args") or {})
    if configured not in StrategyRegistry:
        return DDPStrategy, {}  # "auto" with several devices
    entry = StrategyRegistry[configured]
    return entry["strategy"], dict(entry["init_params"])
