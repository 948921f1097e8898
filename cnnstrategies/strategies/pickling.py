"""A short error message for runs whose objects cannot be passed to spawned ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pickle import PicklingError
from typing import Any

import torch

from cnnstrategies._lightning_private import MultiProcessingLauncher, check_start, forks_on_cpu
from cnnstrategies.errors import ConfigurationError


@contextmanager
def explaining_pickling(start_method: str) -> Iterator[None]:
    """Return a context that replaces errors of pickling by a ConfigurationError with a remedy.

    Args:
        start_method: Method by which the ranks are started. Only ``spawn`` pickles the trainer and the module.
    """
    try:
        yield
    except (PicklingError, AttributeError, TypeError) as error:
        if start_method != "spawn" or "pickle" not in str(error).lower():
            raise
        raise ConfigurationError(
            f"start_method=spawn passes the module, its optimizer and its data to new processes, and one of these "
            f"objects cannot be passed ({error}): replace lambdas and local functions and classes by ones at the top "
            "level of a module, or use the strategy's name that ends in _fork"
        ) from None


def explain_pickling(launcher: Any, start_method: str, device: torch.device) -> None:
    """Make a launcher of Lightning that spawns or forks ranks explain why it cannot. Other launchers are not changed.

    Args:
        launcher: The launcher.
        start_method: Method by which the ranks are started.
        device: Device of this process. After CUDA was used, forked ranks cannot use it.
    """
    if isinstance(launcher, MultiProcessingLauncher):
        vars(launcher)["launch"] = partial(_launch, launcher, start_method, device)


def _launch(launcher: Any, start_method: str, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    check_start(start_method, device)
    with explaining_pickling(start_method), forks_on_cpu(device):
        return type(launcher).launch(launcher, *args, **kwargs)
