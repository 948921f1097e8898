"""Checks that a forward which runs again for its backward computes what the first forward has computed."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cnnstrategies._torch_private import writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.combining import is_near, tolerance

_COMPARED = 64  # Largest number of elements of a tensor that are compared.


def some_elements(tensor: Tensor) -> Tensor:
    """Return copies of some elements of a tensor."""
    elements = tensor.detach().flatten()
    return elements[:: max(1, len(elements) // _COMPARED)].clone()


def differ(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether a result of the second forward is another one, beyond rounding.

    Args:
        pairs: :func:`some_elements` of a result of the first forward, and the same result of the second one.
    """
    return any(
        not is_near(some_elements(second), first, tolerance(first.dtype, first.device)) for first, second in pairs
    )


def versions_of(arguments: Any) -> list[int]:
    """Return how often each tensor in nested containers has been changed in place."""
    return [writes(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def check_parameters(parameters: Iterable[tuple[str, nn.Parameter, int]], remedy: str) -> None:
    """Check that no parameter has changed since the first forward.

    Args:
        parameters: Names, parameters, and how often each had been changed in place when the first forward began.
        remedy: What the user can do instead of a step after the backward of all losses.

    Raises:
        ConfigurationError: A parameter has changed, so the forward cannot be repeated.
    """
    for name, parameter, version in parameters:
        if writes(parameter) != version:
            raise ConfigurationError(
                f"the parameter {name} was changed after the network's forward and before the backward, in which the "
                f"forward has to run again: call the optimizer's step after the backward of all losses, or {remedy}"
            )
