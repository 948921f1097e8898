"""Copies of a divided network, such as a mean teacher: a copy that is called runs as a divided network as well."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from cnnstrategies.placed import RefusedError

if TYPE_CHECKING:
    from cnnstrategies.pipeline.placed_network import PlacedNetwork


def find_copies(root: nn.Module, network: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have the same class as a network, and parameters and buffers of the same names and shapes.

    Modules that share a parameter or buffer with the network, or with a copy that was found before, are left out.

    Args:
        root: Module in which to look for copies, such as the user's module.
        network: The network.
    """
    forms = _forms(network)
    seen = {id(tensor) for tensor in network.state_dict(keep_vars=True).values()}
    for module in root.modules():
        if module is network or type(module) is not type(network) or not forms or _forms(module) != forms:
            continue
        tensors = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
        if not tensors & seen:
            seen |= tensors
            yield module


def _forms(network: nn.Module) -> dict[str, Any]:
    return {
        name: (value.shape, value.dtype)
        for name, value in network.state_dict(keep_vars=True).items()
        if value is not None
    }


class CopiedForward:
    """The ``forward`` of a copy of a divided network until the first call, which divides the copy.

    Many copies are never called, for example copies that only hold averaged weights. A copy that ``copy.deepcopy`` is
    making is found in the argument ``memo`` of ``__deepcopy__``, by the id of the original.

    Args:
        original: The divided network.
        network: The copy; None if it is not known.
        install: Function that sets the attribute ``forward`` of the copy, from the copy as a divided network.
    """

    def __init__(
        self, original: "PlacedNetwork", network: nn.Module | None, install: Callable[["PlacedNetwork"], Any]
    ) -> None:
        self._original, self._network, self._install = original, network, install
        if network is not None:
            original.copies.add(network)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Divide the copy, and return its result. All ranks must call this."""
        network = self._network
        if network is None:
            raise RefusedError(
                f"a copy of {type(self._original.division.network).__name__}, which is divided into stages, was not "
                "made by copy.deepcopy: use copy.deepcopy, or copy the network in __init__"
            )
        vars(network).pop("forward", None)
        self._install(self._original.for_copy(network))
        return network.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopiedForward":
        """Return the ``forward`` of a copy of the copy."""
        return CopiedForward(self._original, memo.get(id(self._network)), self._install)

    def __reduce__(self) -> Any:
        """Pickle the network's own ``forward``."""
        return pickled_forward(self._network)


def pickled_forward(network: nn.Module | None) -> Any:
    """Return a value for ``__reduce__``: the network's own ``forward``, which needs no connections to other stages."""
    if network is None:
        raise RefusedError("a copy of a network that is divided into stages cannot be pickled: save its state_dict()")
    return partial, (type(network).forward, network)


def adopt_copies(root: nn.Module, placed: "PlacedNetwork", install: Callable[["PlacedNetwork"], Any]) -> None:
    """Place the copies of a divided network that were made before the network was divided.

    Args:
        root: Module in which to look for copies.
        placed: The divided network.
        install: See `CopiedForward`.
    """
    for copy in list(find_copies(root, placed.division.network)):
        placed.place_state(copy)
        vars(copy)["forward"] = CopiedForward(placed, copy, install)
