"""The inputs of a network: the names of its forward's tensors, and what a call passes for them."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.microbatches import Images


def network_inputs(network: nn.Module) -> list[str]:
    """Return the names of the tensors that a network's forward takes.

    The arguments without a default are assumed to be tensors. If all arguments have a default, only the first argument
    is assumed to be a tensor.

    Raises:
        ConfigurationError: An argument without a default is keyword-only.
    """
    arguments = list(inspect.signature(network.forward).parameters.values())
    needed = [
        argument
        for argument in arguments
        if argument.default is argument.empty and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    ]
    if any(argument.kind is argument.KEYWORD_ONLY for argument in needed):
        raise ConfigurationError(
            f"{type(network).__name__}.forward takes the argument {needed[-1].name!r} by keyword only: a network that "
            "is cut into stages takes its tensors by position; remove the * before the argument"
        )
    return [argument.name for argument in needed] or [argument.name for argument in arguments[:1]] or ["images"]


def inputs_of_call(
    signature: inspect.Signature, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], bool]:
    """Return what a call passes for a network's inputs, and whether the call changes other arguments as well.

    Args:
        signature: Signature of the network's forward.
        names: Result of :func:`network_inputs`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        TypeError: The call does not fit the signature.
    """
    arguments = signature.bind(*args, **kwargs).arguments
    inputs = [_only(arguments.pop(name, None)) for name in names]
    options = {name: signature.parameters[name].default for name in arguments}
    has_others = any(isinstance(value, Tensor) or value != options[name] for name, value in arguments.items())
    return inputs, has_others


def as_images(inputs: Sequence[Any]) -> Images:
    """Return inputs as a network's images: a tuple if the network takes several."""
    images: Images = inputs[0] if len(inputs) == 1 else tuple(inputs)
    return images


def _only(value: Any) -> Any:
    """Return an argument; of a variable number of arguments, the only one."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
