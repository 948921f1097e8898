"""Choose the network that a pipeline divides, and call it as a divided network where this is possible."""

import inspect
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import has_own_forward
from cnnstrategies.pipeline.network_copies import CopiedForward, pickled_forward
from cnnstrategies.pipeline.network_inputs import as_images, inputs_of_call, network_inputs
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.stage_runner import StageRunner

WHOLE = ""  # Path of a network that is the module itself.


def find_network(module: LightningModule, named: str | None) -> str:
    """Return the path of the submodule that a pipeline divides.

    The submodule is the one that the user has named, or else that of the module's attribute ``divided_submodule``. By
    default it is the child with all parameters of the module, or
    with all trainable parameters. If there is no such child, it is the module itself if the module has a ``forward`` of
    its own, and otherwise the child with the most parameters. Parameters outside the divided network are in the last
    stage.

    Args:
        module: The module.
        named: Path of the submodule; None for the default.

    Raises:
        ConfigurationError: The module has no such submodule, or no child has parameters.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    if named is None:
        named = getattr(module, "divided_submodule", None)
    if named is not None:
        if not named or named not in modules:
            close = [path for path in modules if path and path.count(".") <= named.count(".")]
            raise ConfigurationError(
                f"submodule={named!r}: {type(module).__name__} has no submodule of this name; it has "
                f"{', '.join(close[:8])}"
            )
        return named
    everything = set(module.parameters())
    trainable = {parameter for parameter in everything if parameter.requires_grad}
    children = {name: set(child.parameters()) for name, child in module.named_children()}
    for wanted in (everything, trainable):
        for name, parameters in children.items():
            if wanted and wanted <= parameters:
                return name
    if everything and has_own_forward(module):
        return WHOLE
    largest = max(children, key=lambda name: sum(p.numel() for p in children[name]), default=WHOLE)
    if largest == WHOLE or not children[largest]:
        raise ConfigurationError(
            f"a pipeline divides one submodule of {type(module).__name__}, and no submodule has parameters: create the "
            "network in __init__ or configure_model (setup runs in each process, after the ranks look for it)"
        )
    return largest


def module_at(module: LightningModule, path: str) -> nn.Module:
    """Return the submodule at a path of :func:`find_network`."""
    return module if path == WHOLE else module.get_submodule(path)


class DividedForward:
    """The ``forward`` of a divided network, until :meth:`remove`.

    A call with tensors alone, one row of each for each sample, runs the stages. Other calls, and calls of
    `torch.func.functional_call` with other parameters, run the network's own code, whose operations then follow the
    rules for placed tensors: the results are the same, but without microbatches. The first such call warns of this.
    """

    def __init__(self, placed: PlacedNetwork) -> None:
        self.placed = placed
        self.network = placed.division.network
        self._has_warned = False
        self._parameters: object = None  # Result of `Division.parameters` in the last call that was divided.
        self._inputs = network_inputs(self.network)
        self._network_forward = self.network.forward
        self._signature = inspect.signature(self._network_forward)
        vars(self.network)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's result for a batch. All ranks must call this."""
        images = self._images(args, kwargs)
        if images is not None and not self._has_replaced_parameters():
            return self.placed(images)
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{type(self.network).__name__} is called with other values than tensors with one row for each sample, "
                "or with other parameters: such calls run without microbatches, one stage at a time"
            )
        return self._network_forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the attribute ``forward`` of a copy of the network, which is divided as well."""
        return CopiedForward(self.placed, memo.get(id(self.network)), DividedForward)

    def __reduce__(self) -> Any:
        """Pickle the network's own ``forward``."""
        return pickled_forward(self.network)

    @property
    def runners(self) -> list[StageRunner]:
        """This rank's stages of the network and of its copies."""
        forwards = [vars(network).get("forward") for network in self.placed.copies]
        return [self.placed.runner, *(f.placed.runner for f in forwards if isinstance(f, DividedForward))]

    def remove(self) -> None:
        """Give the network and its copies their own ``forward`` back."""
        for network in (self.network, *self.placed.copies):
            vars(network).pop("forward", None)

    def _images(self, args: Any, kwargs: Any) -> Any:
        """Return the network's inputs, a tuple if there are several; None if the call is of another kind."""
        inputs, has_others = inputs_of_call(self._signature, self._inputs, args, kwargs)
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if has_others or any(value is None for value in inputs) or not tensors:
            return None
        rows = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
        if len(rows) > 1 or not rows.pop():
            return None
        return as_images(inputs)

    def _has_replaced_parameters(self) -> bool:
        """Whether other tensors are in the places of parameters, as during `torch.func.functional_call`."""
        parameters = self.placed.division.parameters()
        if parameters is self._parameters:
            return False
        has_replaced = not all(isinstance(parameter, nn.Parameter) for parameter in self.network.parameters())
        self._parameters = None if has_replaced else parameters
        return has_replaced


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the tensors of all parameters and buffers of a module, each tensor once."""
    seen: set[int] = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
