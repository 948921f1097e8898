"""The factories of a configuration (of an optimizer, a scheduler, a layer) can be copied and pickled."""

from collections.abc import Callable
from typing import Any


class Instantiator:
    """Builds the model or the data for Lightning's command line; a copy of it builds without.

    jsonargparse puts what builds the model and the data into every factory that it makes. So whoever holds a factory,
    as a model holds that of its optimizer, holds the command line, with its trainer, processes and locks: weight
    averaging could not copy the model, and each process that is spawned would get all of it once more.

    Args:
        build: Takes a class, its arguments, and ``applied_instantiation_links``, values by their keys.
    """

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        """Build an object; jsonargparse looks for the name ``applied_instantiation_links`` in this signature."""
        return self._build(class_type, *args, applied_instantiation_links=applied_instantiation_links, **kwargs)

    def __reduce__(self) -> tuple[type["Instantiator"], tuple[Callable[..., Any]]]:
        """Leave the command line behind."""
        return type(self), (_build,)


def _build(class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)
