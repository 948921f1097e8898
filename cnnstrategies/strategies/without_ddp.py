"""What strategies that wrap nothing in DDP have in common: their arguments, metrics of spawned ranks, checkpoints."""

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from cnnstrategies.errors import ConfigurationError

OF_DEVICES = frozenset({"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"})


def check_keywords(strategy: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments that would be taken, and then do nothing.

    Args:
        given: The arguments. The command line gives all that DDPStrategy and DDP have, most with their own defaults.
    """
    defaults = {**inspect.signature(DistributedDataParallel).parameters, **inspect.signature(DDPStrategy).parameters}
    for name, value in given.items():
        is_default = name in defaults and value == defaults[name].default
        if name not in OF_DEVICES and not is_default:
            raise ConfigurationError(
                f"{strategy}({name}=...): it has no such argument, and no DistributedDataParallel to hand it on to; "
                "its reference page lists all: leave this one out"
            )


def own_metric_states(module: nn.Module) -> None:
    """Give this process its own copy of what the module's metrics have gathered.

    torch hands the tensors of a spawned process over in shared memory. Lightning's launcher copies parameters and
    buffers; the states of a metric are neither, and what one rank adds to them all others would find there.
    """
    for metric in module.modules():
        for name, state in metric.metric_state.items() if isinstance(metric, Metric) else ():
            setattr(metric, name, [one.clone() for one in state] if isinstance(state, list) else state.clone())


def check_optimizer_states(saved: int, needed: int) -> None:
    """Refuse to resume from a checkpoint without the optimizers' states."""
    if saved != needed:
        raise ConfigurationError(
            f"the checkpoint holds the states of {saved} optimizers, and this run has {needed}: one that was saved "
            "after ranks were forked or spawned has none; resume from one that was saved during fit, or load its "
            "weights alone"
        )
