"""What ``tune`` can try with a configuration."""

import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.settings import Setting


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
    """What is tried on top of the fastest of these: to compile each combination would take most of the time.

    Args:
        config: The parsed configuration.
        model: The module's class.
    """
    own, arguments = _arguments(config, model)
    if "compile_backend" in arguments:
        given = own.get("compile_backend")
        value = None if given else "inductor"
        return [Setting(value or "not compiled", {"model.init_args.compile_backend": value}, Effect.ROUNDING)]
    return [Setting("inductor", _callback(compile_backend="inductor"), Effect.ROUNDING)]


def _arguments(config: Any, model: type) -> tuple[Any, Collection[str]]:
    """What a module's arguments are set to, and which it has."""
    arguments = {name for name in inspect.signature(model).parameters if hasattr(config.model, "init_args")}
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
