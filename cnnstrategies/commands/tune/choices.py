"""What ``tune`` can try with a configuration."""

import importlib
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from cnnstrategies.commands.run.errors import parameters_of
from cnnstrategies.data.shards.jpeg import DECODERS, chosen, is_installed
from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.tune.settings import Setting
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
    """Other numbers of processes that load, and pinned memory where a device needs it."""
    arguments = parameters_of(data)
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
    """The other decoders of JPEG files that are installed; each rounds in its own way, so other pixels are learned."""
    if "decoder" not in allow or "decoder" not in parameters_of(data):
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


def choices(config: Any, model: type, device: torch.device, allow: Collection[str]) -> list[list[Setting]]:
    """Groups of settings that exclude each other; what is configured already is not among them.

    Args:
        config: The parsed configuration.
        model: The module's class: what it has arguments for is set there, the rest by a callback.
        device: Of the kind that will train.
        allow: What may be changed although it changes what is learned.
    """
    groups = [list(_memory_format(*_arguments(config, model)))]
    if "precision" in allow:
        groups.append(list(_precision(config.trainer, device)))
    if device.type == "cuda" and not config.trainer.benchmark:
        groups.append([Setting("cudnn.benchmark", {"trainer.benchmark": True}, Effect.ROUNDING)])
    return [group for group in groups if group]


def compilers(config: Any, model: type) -> list[Setting]:
    """What is tried on top of the fastest of these: to compile each combination would take most of the time."""
    own, arguments = _arguments(config, model)
    if "compile_backend" in arguments:
        given = own.get("compile_backend")
        value = None if given else "inductor"
        return [Setting(value or "not compiled", {"model.init_args.compile_backend": value}, Effect.ROUNDING)]
    return [Setting("inductor", _callback(compile_backend="inductor"), Effect.ROUNDING)]


def _arguments(config: Any, model: type) -> tuple[Any, Collection[str]]:
    """What a module's arguments are set to, and which it has."""
    arguments = {name for name in parameters_of(model) if hasattr(config.model, "init_args")}
    return config.model.init_args if arguments else {}, arguments


def _memory_format(own: Any, arguments: Collection[str]) -> Iterator[Setting]:
    if "channels_last" in arguments:
        given = bool(own.get("channels_last"))
        name = "contiguous" if given else "channels_last"
        yield Setting(name, {"model.init_args.channels_last": not given}, Effect.ROUNDING)
    else:
        yield Setting("channels_last", _callback(channels_last=True), Effect.ROUNDING)


def _precision(trainer: Any, device: torch.device) -> Iterator[Setting]:
    if str(trainer.precision) not in ("32-true", "32", "None"):
        return
    if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        yield Setting("bf16", {"trainer.precision": "bf16-mixed"}, Effect.LEARNING)
    if device.type == "cuda":
        yield Setting("TF32", _callback(float32_precision="high"), Effect.LEARNING)


def _callback(**arguments: Any) -> dict[str, Any]:
    return {f"ComputeSettings.{name}": value for name, value in arguments.items()}
