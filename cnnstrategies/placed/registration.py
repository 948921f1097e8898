"""Give parameters their places when modules register them, so that a rank needs no memory for other ranks' parameters.

The code that then initialises the parameters follows the rules: a foreign parameter keeps no values, but each rank's
random generator advances as on one device. A parameter that is computed from parameters of other ranks gets its values
from these ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from cnnstrategies.placed.places import Places


class PlannedParameter(NamedTuple):
    """Name and place of a parameter that will be registered."""

    name: str
    place: tuple[int, ...]


@contextmanager
def register_at_places(places: Places, planned: Sequence[PlannedParameter | None]) -> Iterator[list[torch.Size]]:
    """Return a context in which the rules hold, and in which parameters get their places when they are registered.

    All ranks must register the same parameters in the same order. Parameters that are not planned, and those that are
    computed from placed parameters, stay as they are.

    Args:
        places: The rules of this rank.
        planned: The parameters in the order in which modules register them.

    Yields:
        The shapes of the parameters that have been registered, in order. The shape of a lazy parameter is empty.
    """
    shapes: list[torch.Size] = []

    def register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        target = planned[len(shapes)] if len(shapes) < len(planned) else None
        shapes.append(torch.Size() if is_lazy(parameter) else parameter.shape)
        if target is None or places.place_of(parameter) is not None:
            return
        with places.local():
            # The user's code may keep another tensor with the same storage. All ranks must know its place.
            places.take(parameter.detach(), target.place, target.name)
            places.set_place(parameter, target.place, target.name)

    handle = register_module_parameter_registration_hook(register)
    try:
        with places:
            yield shapes
    finally:
        handle.remove()
