"""The user's torch optimizer on the servers."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError

# The update of each element depends only on that element's gradients, so that parts of a tensor can be updated
# separately.
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop",
)  # fmt: skip
StateValue = Tensor | float | int | bool | None


def load_optimizer(path: str) -> type[Optimizer]:
    """Return the optimizer class with a class path.

    Raises:
        ConfigurationError: The class cannot be imported, is not an optimizer, or needs a closure.
    """
    module, _, name = path.rpartition(".")
    try:
        optimizer_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ConfigurationError(
            f"optimizer {path}: the server cannot import it; define it in a module, not in a script or a function"
        ) from None
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigurationError(f"optimizer {path} is not a torch.optim.Optimizer: give the class path of one")
    if issubclass(optimizer_class, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigurationError(
            f"optimizer {path} needs the loss again or sparse gradients, which servers do not have: use another "
            "optimizer, such as SGD or AdamW"
        )
    return optimizer_class


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether an optimizer may work on parts of a tensor, as is known of some of torch's optimizers."""
    return any(optimizer_class is getattr(torch.optim, name) for name in _ELEMENTWISE)


class FusedOptimizer:
    """The user's optimizer on some parameters of a group; it updates the parameters that have a gradient.

    Parameters that are updated together cost one call of the optimizer's ``step``, whose fixed costs exceed those of a
    small parameter. If the user leaves torch's implementation open, the fused one is used, which reads and writes
    memory once: on one core it is 1.5 (SGD with momentum) to 2.4 times (Adam) as fast for 2 MiB, and more for smaller
    tensors.
    """

    def __init__(
        self, optimizer_class: type[Optimizer], parameters: Sequence[nn.Parameter], options: Mapping[str, Any]
    ) -> None:
        # A group may hold options that the constructor does not take: a scheduler's initial_lr, for example.
        accepted = inspect.signature(optimizer_class).parameters
        arguments = {name: tupled(value) for name, value in options.items() if name in accepted}
        self._is_fused = (
            is_elementwise(optimizer_class)
            and "fused" in accepted
            and options.get("fused") is None
            and options.get("foreach") is None
            and not (options.get("capturable") or options.get("differentiable"))
            and all(parameter.is_floating_point() for parameter in parameters)
        )
        if self._is_fused:
            arguments["fused"] = True
        self.optimizer = optimizer_class(parameters, **arguments)

    def step(self, gradients: Sequence[tuple[nn.Parameter, Tensor]], options: Mapping[str, Any]) -> None:
        """Update the parameters that have a gradient, with the group's present hyper-parameters."""
        group = self.optimizer.param_groups[0]
        group.update((name, tupled(option)) for name, option in options.items())
        if self._is_fused:
            group["fused"] = True
            # A fused step of SGD cannot mix parameters with and without a momentum buffer, so first gradients are
            # applied separately.
            state = self.optimizer.state
            first = [pair for pair in gradients if all(value is None for value in state.get(pair[0], {}).values())]
            if 0 < len(first) < len(gradients):
                self._step(first)
                stepped = {id(parameter) for parameter, _ in first}
                gradients = [pair for pair in gradients if id(pair[0]) not in stepped]
        self._step(gradients)

    def _step(self, gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self.optimizer.step()
        for parameter, _ in gradients:
            parameter.grad = None


def tupled(option: Any) -> Any:
    """Return an option as the optimizer expects it: betas are a tuple, of which JSON made a list."""
    return tuple(option) if isinstance(option, list) else option
