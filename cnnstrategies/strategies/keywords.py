"""Which arguments of Lightning's DDPStrategy mean something to a strategy that wraps nothing in DDP."""

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from cnnstrategies.errors import ConfigurationError

OF_DEVICES = frozenset({"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"})


def check_keywords(strategy: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments that would be taken, and then do nothing.

    Args:
        strategy: Its name.
        given: The arguments. The command line gives all that DDPStrategy and DDP have, most with their own defaults.

    Raises:
        ConfigurationError: One of them is none of the strategy's, or is for DDP's wrapper, of which there is none.
    """
    defaults = {**inspect.signature(DistributedDataParallel).parameters, **inspect.signature(DDPStrategy).parameters}
    for name, value in given.items():
        is_default = name in defaults and value == defaults[name].default
        if name not in OF_DEVICES and not is_default:
            raise ConfigurationError(
                f"{strategy}({name}=...): it has no such argument, and no DistributedDataParallel to hand it on to; "
                "its reference page lists all: leave this one out"
            )
