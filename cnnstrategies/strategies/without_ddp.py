"""Checks and preparations of strategies that inherit from DDPStrategy without wrapping the module in DDP."""

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from cnnstrategies.errors import ConfigurationError

DEVICE_OPTIONS = frozenset(
    {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
)


def check_keywords(strategy: str, options: Mapping[str, Any]) -> None:
    """Refuse options of DDP that would be accepted without any effect.

    Args:
        strategy: Name of the strategy's class.
        options: The options. The command line passes all options of DDPStrategy and DDP, most with their defaults.

    Raises:
        ConfigurationError: An option has another value than its default, and is not about devices.
    """
    defaults = {**inspect.signature(DistributedDataParallel).parameters, **inspect.signature(DDPStrategy).parameters}
    for name, value in options.items():
        is_default = name in defaults and value == defaults[name].default
        if name not in DEVICE_OPTIONS and not is_default:
            raise ConfigurationError(
                f"{strategy}({name}=...): the strategy has no such option, and does not use DistributedDataParallel; "
                "leave the option out (the reference page lists all options)"
            )


def own_metric_states(module: nn.Module) -> None:
    """Give this process its own copies of the metrics' states.

    torch passes tensors to a spawned process in shared memory. Lightning's launcher copies parameters and buffers, but
    the states of a metric are neither: without these copies every rank would add to the same states.
    """
    for metric in module.modules():
        for name, state in metric.metric_state.items() if isinstance(metric, Metric) else ():
            setattr(metric, name, [part.clone() for part in state] if isinstance(state, list) else state.clone())


def check_optimizer_states(saved: int, needed: int) -> None:
    """Refuse to resume from a checkpoint without the states of all optimizers.

    Args:
        saved: Number of states in the checkpoint.
        needed: Number of optimizers.

    Raises:
        ConfigurationError: The numbers differ.
    """
    if saved != needed:
        raise ConfigurationError(
            f"the checkpoint holds the states of {saved} optimizers, and this run has {needed}: a checkpoint "
            "that is saved after the forked or spawned ranks have ended holds none; resume from one that was saved "
            "during fit, or load the weights alone"
        )
