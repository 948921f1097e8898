"""The user's torch optimizer on slices."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError

# Each element's update depends on that element's gradients only, so a part of a tensor can be updated by itself.
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop",
)  # fmt: skip
StateValue = Tensor | float | int | bool | None


def load_optimizer(path: str) -> type[Optimizer]:
    """The optimizer class with a class path.

    Raises:
        ConfigurationError: There is none, or it needs a closure.
    """
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ConfigurationError(
            f"optimizer {path}: the server cannot import it; define it in a module, not in a script or a function"
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigurationError(f"optimizer {path} is not a torch.optim.Optimizer: name one")
    if issubclass(kind, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigurationError(
            f"optimizer {path} needs the loss again or sparse gradients, which servers do not have: use SGD, AdamW or "
            "another one"
        )
    return kind


def is_elementwise(path: str) -> bool:
    """Whether an optimizer may work on parts of a tensor: true of those of torch.optim that are known to."""
    return _is_known(load_optimizer(path))


def _is_known(kind: type[Optimizer]) -> bool:
    return any(kind is getattr(torch.optim, name) for name in _ELEMENTWISE)


class SharedOptimizer:
    """The user's optimizer on some slices of a parameter group.

    Those that are updated together cost one call of its ``step``, whose fixed costs outweigh a small slice's own. Where
    the user leaves open which of torch's implementations is used it is the fused one, which reads and writes memory
    once: on one core 1.5 (SGD with momentum) to 2.4 times (Adam) as fast for a slice of 2 MiB, more for small ones.

    Args:
        kind: Its class.
        values: The slices' values by key; updated in place.
        options: The group's hyper-parameters.
    """

    def __init__(self, kind: type[Optimizer], values: Mapping[int, Tensor], options: Mapping[str, Any]) -> None:
        self._parameters = {
            key: nn.Parameter(value, requires_grad=value.is_floating_point()) for key, value in values.items()
        }
        # A group may hold options that the constructor does not take: a scheduler's initial_lr, for example.
        accepted = inspect.signature(kind).parameters
        arguments = {name: tupled(value) for name, value in options.items() if name in accepted}
        self._is_fused = (
            _is_known(kind)
            and "fused" in accepted
            and options.get("fused") is None
            and options.get("foreach") is None
            and not (options.get("capturable") or options.get("differentiable"))
            and all(parameter.is_floating_point() for parameter in self._parameters.values())
        )
        if self._is_fused:
            arguments["fused"] = True
        self._optimizer = kind(list(self._parameters.values()), **arguments)

    def step(self, gradients: Mapping[int, Tensor], options: Mapping[str, Any]) -> None:
        """One update of some slices, with the given hyper-parameters."""
        group = self._optimizer.param_groups[0]
        group.update((name, tupled(option)) for name, option in options.items())
        if self._is_fused:
            group["fused"] = True
            # A fused step of SGD takes either first gradients or later ones.
            first = [key for key in gradients if all(part is None for part in self.state(key).values())]
            if 0 < len(first) < len(gradients):
                self._step({key: gradients[key] for key in first})
                gradients = {key: gradient for key, gradient in gradients.items() if key not in first}
        self._step(gradients)

    def _step(self, gradients: Mapping[int, Tensor]) -> None:
        updated = [self._parameters[key] for key in gradients]
        for parameter, gradient in zip(updated, gradients.values(), strict=True):
            parameter.grad = gradient.view(parameter.shape)
        self._optimizer.step()
        for parameter in updated:
            parameter.grad = None

    def state(self, key: int) -> dict[str, StateValue]:
        """A slice's state by name; tensors of the slice's shape, or scalars."""
        return dict(self._optimizer.state.get(self._parameters[key], {}))

    def set_state(self, key: int, name: str, value: StateValue) -> None:
        """Replace one part of a slice's state."""
        self._optimizer.state[self._parameters[key]][name] = value


def tupled(option: Any) -> Any:
    """Betas are a tuple; JSON made a list of them."""
    return tuple(option) if isinstance(option, list) else option
