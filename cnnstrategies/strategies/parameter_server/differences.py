"""What own steps change between two outer steps, where a worker makes these on its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


class Differences:
    """Keeps the values that own steps have begun with.

    Servers in mode ``local`` take the workers' differences together, and the worker's connection makes them. One by
    one, as in mode ``async``, they are pushed in the place of gradients, and are made here.

    Args:
        parameters: What is trained, with the servers' values.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [parameter.detach() for parameter in parameters]
        self._begun = [parameter.clone() for parameter in self._parameters]

    def begin(self) -> None:
        """The parameters are the servers' values: own steps begin with these."""
        for begun, parameter in zip(self._begun, self._parameters, strict=True):
            begun.copy_(parameter)

    def take(self, index: int) -> Tensor:
        """How far own steps have taken a parameter, against the direction of a gradient; what follows counts anew."""
        parameter, begun = self._parameters[index], self._begun[index]
        difference = begun - parameter
        begun.copy_(parameter)
        return difference

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While the servers' values come: to these is added what own steps have changed since :meth:`take`.

        That is taken from the next exchange's own difference again, up to rounding.
        """
        moved = [parameter - begun for begun, parameter in zip(self._begun, self._parameters, strict=True)]
        yield
        for begun, parameter, own in zip(self._begun, self._parameters, moved, strict=True):
            begun.copy_(parameter - own)
