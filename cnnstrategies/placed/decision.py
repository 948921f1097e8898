"""The decision where an operation runs. A pure function of the operands' places, so that all ranks decide alike."""

from collections.abc import Callable, Sequence

# Ranks that have copies of a tensor, in ascending order. None: all ranks have copies.
Place = tuple[int, ...] | None


class SeveralPlacesError(ValueError):
    """An operation writes tensors of different places, so it cannot run at the place of all of them."""


def is_at(place: Place, ranks: Place) -> bool:
    """Whether a tensor of the given place has a copy on each of the given ranks."""
    if place is None or place == ranks:
        return True
    return ranks is not None and set(ranks) <= set(place)


def decide(places: Sequence[Place], written: Sequence[bool], elements: Callable[[int], int]) -> Place:
    """Return the ranks on which an operation runs. Operands without a copy on these ranks must be sent there.

    An operation runs where the tensors are that it writes. An operation that does not write runs on the ranks that have
    all operands. If no rank has all operands, the operation runs at the place with most elements, because the operands
    of that place need not be sent.

    Args:
        places: Place of each operand.
        written: Whether the operation writes the operand, for each operand.
        elements: Function that returns the number of elements of an operand, from its index.

    Raises:
        SeveralPlacesError: The operation writes tensors of different places.
    """
    owners = {place for place in places if place is not None}
    if not owners:
        return None
    targets = {place for place, is_written in zip(places, written, strict=True) if is_written}
    if len(targets) > 1:
        raise SeveralPlacesError
    if targets:
        return targets.pop()
    if len(owners) == 1:
        return owners.pop()
    common = set.intersection(*map(set, owners))
    if common:
        return tuple(sorted(common))
    sizes = {owner: sum(elements(i) for i, place in enumerate(places) if place == owner) for owner in owners}
    return max(owners, key=lambda owner: (sizes[owner], owner))
