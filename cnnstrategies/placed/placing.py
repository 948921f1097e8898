"""Give the parameters and buffers of a module their places, or refuse before a tensor has changed."""

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cnnstrategies._torch_private import is_used_by_torch, storage_users
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.places import Places


class PlacedTensor(NamedTuple):
    """A parameter or buffer with its name and its place."""

    name: str
    place: tuple[int, ...]
    tensor: Tensor


class Derived(NamedTuple):
    """A tensor that is a plain attribute of a module, and that was computed from parameters or shares their memory.

    The old weight normalization and spectral normalization of torch, and its pruning, keep such tensors, and compute
    them again in each forward.
    """

    module: nn.Module
    attribute: str
    label: str
    place: tuple[int, ...]


def place_tensors(places: Places, root: nn.Module, tensors: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> None:
    """Mark tensors on the ranks of their places, and make them foreign on other ranks. All ranks must call this.

    Args:
        places: The rules of this rank.
        root: Module whose attributes may be computed from the tensors.
        tensors: Names, places and tensors of parameters and buffers.

    Raises:
        ConfigurationError: A tensor cannot become foreign. All ranks raise the same error, before a tensor has changed.
    """
    with places.local():
        placed = [PlacedTensor(*item) for item in tensors]
        kept: list[tuple[Derived, Tensor]] = []
        try:
            derived = list(_derived(root, placed))
            kept = _let_go(places, derived)
            reason = next(_reasons(places, placed), "")
            if reason:
                # Tracers, which are reference cycles, may still refer to the tensors.
                gc.collect()
                reason = next(_reasons(places, placed), "")
        except ConfigurationError as error:
            reason = str(error)
        reasons = places.exchange(reason, range(places.world_size), "places")
        if any(reasons):
            for attribute, value in kept:
                vars(attribute.module)[attribute.attribute] = value
            raise ConfigurationError(next(filter(None, reasons)))
        for name, place, tensor in placed:
            places.set_place(tensor, place, name)
        for attribute in derived:
            value = vars(attribute.module)[attribute.attribute]
            if places.rank in attribute.place:
                places.mark(value, attribute.place, attribute.label)
        for attribute, value in kept:
            foreign = places.foreign_like(value, attribute.place, attribute.label)
            vars(attribute.module)[attribute.attribute] = foreign.requires_grad_(value.requires_grad)


def _derived(root: nn.Module, placed: Sequence[PlacedTensor]) -> Iterator[Derived]:
    """Yield the attributes of modules that depend on placed tensors."""
    by_tensor = {id(item.tensor): item for item in placed}
    by_storage = {_storage(item.tensor): item for item in placed if _storage(item.tensor)}
    for path, module in root.named_modules():
        for attribute, value in vars(module).items():
            if not isinstance(value, Tensor) or isinstance(value, ForeignTensor):
                continue
            sources = [by_tensor[id(leaf)] for leaf in _leaves_of(value) if id(leaf) in by_tensor]
            if _storage(value) in by_storage:
                sources.append(by_storage[_storage(value)])
            if not sources:
                continue
            label = f"{path}.{attribute}".lstrip(".")
            if len({source.place for source in sources}) > 1:
                raise ConfigurationError(
                    f"{label} is a tensor that was computed from {sources[0].name} and {sources[-1].name}, which are "
                    "in different stages: compute it where it is used"
                )
            yield Derived(module, attribute, label, sources[0].place)


def _leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of the autograd graph from which a tensor was computed."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


def _let_go(places: Places, derived: Sequence[Derived]) -> list[tuple[Derived, Tensor]]:
    """Replace attributes whose place is not on this rank by copies that are not connected to parameters."""
    kept = []
    for item in derived:
        if places.rank not in item.place:
            value = vars(item.module)[item.attribute]
            copy = value.detach().clone().requires_grad_(value.requires_grad)
            vars(item.module)[item.attribute] = copy
            kept.append((item, copy))
    return kept


def _reasons(places: Places, placed: Sequence[PlacedTensor]) -> Iterator[str]:
    """Yield the reasons for which tensors cannot become foreign on this rank."""
    away = [item for item in placed if places.rank not in item.place and not isinstance(item.tensor, ForeignTensor)]
    for name, _, tensor in away:
        if not tensor.is_leaf:
            yield f"the buffer {name} was computed from parameters: register its value, {name}.detach()"
    for name, _, tensor in away:
        if is_used_by_torch(tensor):
            yield (
                f"{name} is still used by the autograd graph of a result that was computed before the training, or by "
                "a transfer of torch.distributed that has not ended: delete the result or compute it under "
                "torch.no_grad(), and wait for transfers"
            )
    sharing: dict[int, list[PlacedTensor]] = defaultdict(list)
    for item in {id(item.tensor): item for item in placed}.values():
        if _storage(item.tensor):
            sharing[_storage(item.tensor)].append(item)
    for items in sharing.values():
        name, place, tensor = items[0]
        for other in items[1:]:
            if other.place != place:
                yield (
                    f"{name} and {other.name} share their memory, but are in different stages: choose other cuts, or "
                    "give each of them a memory of its own"
                )
        if places.rank not in place and storage_users(tensor) > len(items):
            yield (
                f"{name} shares its memory with a tensor that is not a parameter or buffer of the module, and that "
                "would keep old values: compute views of parameters where they are used"
            )


def _storage(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share their memory; 0 if the memory is not known."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()
