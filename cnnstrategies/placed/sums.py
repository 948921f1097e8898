"""Sums of gradients over the ranks of a place, which are computed when the program first needs the values.

After a backward, each replica of a stage has the gradients of its own microbatches. The gradients of the whole batch
are the sums over the replicas. A step may have several backwards, so :class:`DeferredSums` lets each replica add the
gradients of all its backwards first, and sums the results over the replicas once.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from cnnstrategies.placed.decision import is_at
from cnnstrategies.placed.operations import Operation

if TYPE_CHECKING:
    from cnnstrategies.placed.places import Places

# Function that replaces tensors by their sums over the ranks of a place. All ranks of the place call it.
SumInPlace = Callable[[Sequence[Tensor]], None]
# Operations that use only the shape, the dtype and the device of an operand.
FORM_ONLY = {"new_empty_strided", "new_empty", "new_zeros", "empty_like", "zeros_like", "ones_like"}


class HasParameters(Protocol):
    """An object, such as a stage, with parameters in the same order on all ranks of a place."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters."""


class DeferredSum:
    """Mark of a storage whose values must still be summed over the ranks of its place.

    Attributes:
        add_up: Function that computes the sums.
    """

    def __init__(self, add_up: SumInPlace) -> None:
        self.add_up = add_up


class DeferredSums:
    """The sums of one rank that have not been computed yet.

    All ranks of a place run the same program, so all of them need a sum at the same point. Autograd's own additions do
    not need the sum: the sum of two gradients is deferred as well. If only one operand of an addition is deferred, only
    the place's first rank adds the other operand, so that the sum over the ranks contains it once. This also keeps the
    replicas' gradients equal if their copies of the other operand differ in the last bit, as they may on GPUs.

    Args:
        places: The rules of this rank.

    Attributes:
        waiting: By id, marks of storages that exist and whose sums have not been computed. Operations of programs that
            defer nothing pay only for the question whether this is empty.
    """

    def __init__(self, places: "Places") -> None:
        self._places = places
        self.waiting: dict[int, weakref.ref[DeferredSum]] = {}
        self._sources: list[weakref.ref[HasParameters]] = []

    def watch(self, source: HasParameters) -> None:
        """From now on, compute the sums of the gradients of an object's parameters together."""
        self._sources.append(weakref.ref(source))

    def defer(self, tensor: Tensor, place: tuple[int, ...], add_up: SumInPlace) -> Tensor:
        """Return a tensor whose values are summed over the ranks of a place later.

        Args:
            tensor: This rank's summand, which is copied if it shares its storage.
            place: The ranks.
            add_up: Function that computes the sums.
        """
        if not _has_own_storage(tensor) or self._places.place_of(tensor) is not None:
            tensor = tensor.clone()
        return self._mark(tensor, place, add_up)

    def settle(self) -> None:
        """Compute the deferred sums of watched parameters' gradients.

        All ranks of the place must call this at the same point of the program.
        """
        if self.waiting:
            sources = [source for reference in self._sources if (source := reference()) is not None]
            self._compute([parameter.grad for source in sources for parameter in source.parameters])

    def settle_for(self, tensors: Sequence[Tensor]) -> None:
        """Compute the deferred sums if the program needs the values of some tensors, of which any is a deferred sum.

        All ranks of the place must call this at the same point of the program.
        """
        if self.waiting and any(self._places.deferred_sum_of(tensor) is not None for tensor in tensors):
            self.settle()
            self._compute(tensors)

    def _compute(self, tensors: Iterable[Tensor | None]) -> None:
        deferred: dict[int, tuple[Tensor, DeferredSum]] = {}
        for tensor in tensors:
            mark = None if tensor is None else self._places.deferred_sum_of(tensor)
            if tensor is not None and mark is not None:
                deferred.setdefault(id(mark), (tensor, mark))
        if deferred:
            with self._places.local(), torch.no_grad():
                _, mark = next(iter(deferred.values()))
                mark.add_up([_whole(tensor.detach()) for tensor, _ in deferred.values()])
            for tensor, _ in deferred.values():
                self._places.mark_sum(tensor, None)

    def run(self, func: Any, operation: Operation, args: Any, kwargs: Any, operands: Sequence[Tensor]) -> Any:
        """Run an operation whose result is a deferred sum, or compute the sums that the operation needs.

        Returns:
            The operation's result; None if the operation has not been run.
        """
        mark = next((mark for operand in operands if (mark := self._places.deferred_sum_of(operand)) is not None), None)
        if mark is None or operation.is_view or operation.name in FORM_ONLY:
            return None
        in_place = operation.name == "add_"
        if (in_place or operation.name == "add") and self._can_add(in_place, args, kwargs):
            return self._add(in_place, args[0], args[1])
        # Autograd copies a gradient to which other code refers, possibly by `copy_`.
        source = args[1] if operation.name == "copy_" else args[0]
        is_copy = operation.name == "clone" or (operation.name == "copy_" and self._can_copy(*args))
        if is_copy and _has_own_storage(source) and self._places.deferred_sum_of(source) is not None:
            place = self._places.place_of(source)
            assert place is not None
            return self._mark(func(*args, **kwargs), place, mark.add_up)
        self.settle_for(operands)
        return None

    def _can_copy(self, target: Tensor, source: Tensor, *_: Any) -> bool:
        """Whether a tensor that gets the values of a deferred sum can be a deferred sum."""
        places = self._places
        return (
            _has_own_storage(target)
            and (target.shape, target.dtype) == (source.shape, source.dtype)
            and places.place_of(target) == places.place_of(source)
        )

    def _can_add(self, in_place: bool, args: Any, kwargs: Any) -> bool:
        """Whether the result of an addition can be a deferred sum, at the place of the deferred operand."""
        if len(args) != 2 or kwargs.get("alpha", 1) != 1 or not all(isinstance(arg, Tensor) for arg in args):
            return False
        first, second = args
        place = self._places.place_of(first if self._places.deferred_sum_of(first) is not None else second)
        return (
            (first.shape, first.dtype) == (second.shape, second.dtype)
            and (not in_place or (_has_own_storage(first) and self._places.place_of(first) == place))
            and all(is_at(self._places.place_of(arg), place) for arg in args)
        )

    def _add(self, in_place: bool, first: Tensor, second: Tensor) -> Tensor:
        of_first, of_second = map(self._places.deferred_sum_of, (first, second))
        mark, deferred = (of_first, first) if of_first is not None else (of_second, second)
        place = self._places.place_of(deferred)
        assert mark is not None
        assert place is not None
        with self._places.local():
            result: Tensor = first if in_place else first + second
            if (of_first is not None and of_second is not None) or self._places.rank == place[0]:
                result = first.add_(second) if in_place else result
            elif result is not deferred:
                result.copy_(deferred)
        return self._mark(result, place, mark.add_up)

    def _mark(self, tensor: Tensor, place: tuple[int, ...], add_up: SumInPlace) -> Tensor:
        mark = DeferredSum(add_up)
        key = id(mark)
        self.waiting[key] = weakref.ref(mark, lambda _: self.waiting.pop(key, None))
        self._places.mark(tensor, place)
        self._places.mark_sum(tensor, mark)
        return tensor


def _has_own_storage(tensor: Tensor) -> bool:
    """Whether a tensor has all elements of its storage, each of them once."""
    return Tensor.untyped_storage(tensor).nbytes() == tensor.nbytes


def _whole(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor's storage."""
    if _has_own_storage(tensor):
        return tensor
    return tensor.as_strided((Tensor.untyped_storage(tensor).nbytes() // tensor.element_size(),), (1,), 0)
