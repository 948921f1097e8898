"""Operations on lists, such as those of an optimizer with ``foreach``: each index at the place of its own tensors."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cnnstrategies.placed.decision import Place, is_at
from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.operations import Operation
from cnnstrategies.placed.rules import Rule

if TYPE_CHECKING:
    from cnnstrategies.placed.runner import OperationRunner


def run_rows(runner: "OperationRunner", func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
    """Run an operation on lists. All tensors with one index form a row, which has its own place.

    A row with tensors of several places is brought to one place first, as for an operation without lists. Tensors that
    are not in a list, such as a clipping factor, are sent to all ranks.
    """
    places = runner.places
    rows = Rows(operation, args, kwargs)
    destinations = rows.common_places(places.places_of)
    if destinations is None:
        destinations = [runner.place_for(operation, *rows.row(index)) for index in range(rows.count)]
        rows.replace(_moved(runner, operation, rows, destinations))
    distinct = set(destinations)
    shared = [tensor for tensor in rows.shared() if not _serves(places.place_of(tensor), distinct)]
    if shared:
        rows.replace(places.all_everywhere(shared, operation.name))
    if distinct <= {None}:
        return func(*rows.args, **rows.kwargs)
    if operation.rule is Rule.FINITE:
        return _check_finite(runner, func, rows, destinations)
    local_places = {place for place in distinct if place is None or places.rank in place}
    here = [index for index, place in enumerate(destinations) if place in local_places]
    results: list[Any] = [None] * rows.count
    if here:
        row_args, row_kwargs = rows.arguments(here)
        for index, result in zip(here, func(*row_args, **row_kwargs) or (), strict=False):
            results[index] = result
    if not operation.returns:
        return None
    if operation.rule is Rule.NORMS and len(distinct) > 1:
        return _shared_norms(runner, func, operation, rows, destinations, results)
    for index in here:
        place = destinations[index]
        if place is not None:
            places.mark(results[index], place)
    elsewhere = [index for index, place in enumerate(destinations) if place not in local_places]
    if elsewhere:
        row_args, row_kwargs = rows.arguments(elsewhere)
        for index, form in zip(elsewhere, runner.forms.of(func, row_args, row_kwargs), strict=True):
            place = destinations[index]
            assert place is not None
            device = rows.row(index)[0][0].device
            results[index] = ForeignTensor.create(places, form.shape, form.stride, form.dtype, device, place)
    return results


class Rows:
    """An operation's arguments, of which some are lists of equal length.

    Attributes:
        count: Length of the lists.
        first: The first list.
        args: Positional arguments.
        kwargs: Other arguments.
    """

    def __init__(self, operation: Operation, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = list(args), dict(kwargs)
        # A fused optimizer only writes gradients if it unscales them. Otherwise a gradient may be at another place than
        # its parameter.
        written = [key for key in operation.written if key[1] != "grads"]
        self._written = {*(position for position, _ in written), *(name for _, name in written)}
        self.first: Sequence[Tensor] = args[0]
        self.count = len(self.first)

    def common_places(self, places_of: Callable[[Sequence[Tensor]], list[Place]]) -> list[Place] | None:
        """Return the place of each row; None if a row has tensors of several places."""
        lists = [value for _, value in self._items() if self._is_list(value)]
        first, *others = [
            places_of(tensors) for tensors in lists if all(isinstance(tensor, Tensor) for tensor in tensors)
        ]
        return first if all(other == first for other in others) else None

    def _is_list(self, value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == self.count

    def _items(self) -> list[tuple[Any, Any]]:
        return [*enumerate(self.args), *self.kwargs.items()]

    def row(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors with an index, and those among them that the operation writes."""
        lists = [(key, value) for key, value in self._items() if self._is_list(value)]
        row = [(key, value[index]) for key, value in lists if isinstance(value[index], Tensor)]
        return [tensor for _, tensor in row], [tensor for key, tensor in row if key in self._written]

    def shared(self) -> list[Tensor]:
        """Return the tensors that are not in a list."""
        return [value for _, value in self._items() if isinstance(value, Tensor)]

    def replace(self, copies: dict[int, Tensor]) -> None:
        """Replace tensors by their copies, which are given by the id of the tensor."""

        def replaced(value: Any) -> Any:
            if isinstance(value, Tensor):
                return copies.get(id(value), value)
            if isinstance(value, (list, tuple)):
                return [copies.get(id(item), item) if isinstance(item, Tensor) else item for item in value]
            return value

        if copies:
            self.args = [replaced(value) for value in self.args]
            self.kwargs = {name: replaced(value) for name, value in self.kwargs.items()}

    def arguments(self, indices: Sequence[int]) -> tuple[list[Any], dict[str, Any]]:
        """Return the operation's arguments with the given rows only."""

        def chosen(value: Any) -> Any:
            return [value[index] for index in indices] if self._is_list(value) else value

        return [chosen(value) for value in self.args], {name: chosen(value) for name, value in self.kwargs.items()}


def _serves(place: Place, destinations: Iterable[Place]) -> bool:
    """Whether a tensor of a place is on all ranks on which rows run."""
    return all(is_at(place, destination) for destination in destinations)


def _moved(
    runner: "OperationRunner", operation: Operation, rows: Rows, destinations: Sequence[Place]
) -> dict[int, Tensor]:
    """Bring tensors to the places of their rows, in one message for each pair of places."""
    copies: dict[int, Tensor] = {}
    for destination in sorted(set(destinations), key=lambda place: place or ()):
        tensors = [
            tensor
            for index, place in enumerate(destinations)
            if place == destination
            for tensor in rows.row(index)[0]
            if not is_at(runner.places.place_of(tensor), destination)
        ]
        if destination is None:
            copies |= runner.places.all_everywhere(tensors, operation.name)
        else:
            copies |= runner.places.bring_all(tensors, destination, operation.name)
    return copies


def _shared_norms(
    runner: "OperationRunner",
    func: Any,
    operation: Operation,
    rows: Rows,
    destinations: Sequence[Place],
    norms: list[Tensor],
) -> list[Tensor]:
    """Return the norms of all rows on all ranks, after one message from each place.

    Args:
        runner: The rules of this rank.
        func: The operation.
        operation: Facts about the operation.
        rows: The operation's arguments.
        destinations: Place of each row.
        norms: The norms of the rows whose place includes this rank; None for other rows.
    """
    places = runner.places
    groups: dict[tuple[tuple[int, ...], torch.dtype, torch.device], list[int]] = {}
    for index, (place, tensor) in enumerate(zip(destinations, rows.first, strict=True)):
        if place is not None:
            groups.setdefault((place, tensor.dtype, tensor.device), []).append(index)
    together: list[Tensor] = []
    for (place, _, device), indices in groups.items():
        if places.rank in place:
            together.append(places.mark(torch.stack([norms[index] for index in indices]), place))
        else:
            row_args, row_kwargs = rows.arguments(indices[:1])
            dtype = runner.forms.of(func, row_args, row_kwargs)[0].dtype
            together.append(ForeignTensor.create(places, (len(indices),), (1,), dtype, device, place))
    copies = places.all_everywhere(together, operation.name)
    for tensor, indices in zip(together, groups.values(), strict=True):
        for index, norm in zip(indices, copies[id(tensor)].unbind(), strict=True):
            norms[index] = norm
    return norms


def _check_finite(runner: "OperationRunner", func: Any, rows: Rows, destinations: Sequence[Place]) -> None:
    """Unscale each rank's gradients, and tell all ranks whether an element on any rank is not finite."""
    places = runner.places
    (gradients, flag, scale), _ = rows.arguments(range(rows.count))
    result = flag
    for place in sorted(set(destinations), key=lambda place: place or ()):
        chosen = [gradient for gradient, other in zip(gradients, destinations, strict=True) if other == place]
        part = flag.clone()
        if not any(isinstance(gradient, ForeignTensor) for gradient in chosen):
            func(chosen, part, scale)
        if place is not None:
            part = places.everywhere(places.give(part, place), "finite")
        result = result.maximum(part)
    flag.copy_(result)
