"""Common functions of the strategies that inherit from DDPStrategy but do not use DistributedDataParallel."""

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
    """Refuse options of DDP that have no effect, because the strategy does not use DistributedDataParallel.

    Args:
        strategy: Name of the strategy's class.
        options: Names and values of the options. The command line passes all options of DDPStrategy and of
            DistributedDataParallel, most of them with their default values.

    Raises:
        ConfigurationError: An option is not in `DEVICE_OPTIONS`, and its value is not the default value.
    """
    defaults = {**inspect.signature(DistributedDataParallel).parameters, **inspect.signature(DDPStrategy).parameters}
    for name, value in options.items():
        is_default = name in defaults and value == defaults[name].default
        if name not in DEVICE_OPTIONS and not is_default:
            raise ConfigurationError(
                f"{strategy}({name}=...): the strategy has no such option, because it does not use "
                "DistributedDataParallel; leave the option out (the reference page lists all options)"
            )


def own_metric_states(module: nn.Module) -> None:
    """Give this process its own copies of the states of all metrics in a module.

    torch passes tensors to a spawned process in shared memory. Lightning's launcher copies parameters and buffers out
    of the shared memory, but not the states of metrics. Without this function all ranks would change the same states.
    """
    for metric in module.modules():
        for name, state in metric.metric_state.items() if isinstance(metric, Metric) else ():
            setattr(metric, name, [part.clone() for part in state] if isinstance(state, list) else state.clone())


def check_optimizer_states(saved: int, needed: int) -> None:
    """Refuse to resume from a checkpoint that does not hold the state of each optimizer.

    Args:
        saved: Number of optimizer states in the checkpoint.
        needed: Number of optimizers of this run.

    Raises:
        ConfigurationError: The two numbers differ.
    """
    if saved != needed:
        raise ConfigurationError(
            f"the checkpoint holds the states of {saved} optimizers, but this run has {needed} optimizers: a "
            "checkpoint that was saved after forked or spawned ranks had ended holds no states; resume from a "
            "checkpoint that was saved during fit, or load the weights alone"
        )
