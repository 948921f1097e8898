"""What a trace fixes: a network whose forward is not the same each time is refused, and not trained as it once was."""

import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError

_PLAIN = (int, float, str, bytes, type(None))  # bool is an int


class Contexts:
    """The contexts in which tracing began: operations inside of others would be traced without them."""

    def __init__(self) -> None:
        self._began = _contexts()

    def check(self, where: str) -> None:
        """Refuse an operation in a context of the network's own.

        Args:
            where: What computes there.

        Raises:
            ConfigurationError: A context is another one.
        """
        for name, now in _contexts().items():
            if now != self._began[name]:
                raise ConfigurationError(
                    f"{where} computes under {name}, which a network that is cut into stages loses: use "
                    ".detach() on the values, set the precision for the whole run, or use strategy ddp"
                )
        if _is_checkpointed():
            raise ConfigurationError(
                f"{where} is under torch.utils.checkpoint, which a network that is cut into stages loses: leave it out "
                "(set_grad_checkpointing(False) in timm) and set the pipeline's activation_checkpointing"
            )


def _is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint is among the callers."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _contexts() -> dict[str, Any]:
    return {
        "torch.no_grad or torch.enable_grad": torch.is_grad_enabled(),
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cpu"),
            torch.get_autocast_dtype("cuda"),
        ),
    }


@contextmanager
def same_each_time(network: nn.Module) -> Iterator[None]:
    """Run a network's forward inside: it must decide nothing by chance, and change none of its modules' attributes.

    Raises:
        ConfigurationError: It does; what it did this once would be done in every step.
    """
    name = type(network).__name__
    numbers, attributes = _random_states(), _attributes(network)
    yield
    for library, before, now in zip(("random", "torch", "numpy.random"), numbers, _random_states(), strict=True):
        if not _equal(before, now):
            raise ConfigurationError(
                f"{name}.forward draws random numbers with {library} to decide what it does: cut into stages, it would "
                "do the same in every step; draw them with a layer such as nn.Dropout or torchvision.ops."
                "StochasticDepth, or use strategy ddp"
            )
    for path, value in _attributes(network).items():
        if attributes.get(path, network) != value:
            raise ConfigurationError(
                f"{name}.forward changes the attribute {path!r}: cut into stages, it would keep the value that it has "
                "now; make it a buffer and a tensor operation, or use strategy ddp"
            )


class Traced(nn.Module):
    """Has the place of a module whose own code was traced: its plain attributes are constants of the graph."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what a module needs, but none of the traced module's attributes.

        Raises:
            ConfigurationError: The network would not see the change.
        """
        if not name.startswith("_") and not isinstance(value, nn.Module | Tensor) and name not in self.__dict__:
            raise ConfigurationError(
                f"{name} = {value!r} is set on a part of the network that is cut into stages, which has the value of "
                "the beginning in its graph: make it a buffer that is changed in place, or use strategy ddp"
            )
        super().__setattr__(name, value)


def _random_states() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()[1:3]


def _equal(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor):
        return torch.equal(before, now)
    if before is not None and not isinstance(before[0], int):  # numpy's
        return bool((before[0] == now[0]).all()) and before[1] == now[1]
    return bool(before == now)


def _attributes(network: nn.Module) -> dict[str, Any]:
    """The plain attributes of all modules by path."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in network.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name != "training"
    }
