"""A tensor of which each rank of a place has some rows, until an operation needs all rows.

The replicas of a pipeline's first stage load different rows of the images. Usually nothing but the network uses the
images, and each replica needs only rows that it has loaded. So the replicas do not send each other images. The first
operation that needs all rows lets them do this.
"""

from collections.abc import Sequence
from copy import copy, deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cnnstrategies._torch_private import allow_in_lists, tensor_without_storage
from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.placed.operations import operation_of, tensors_in, with_tensors
from cnnstrategies.placed.results import ResultForm
from cnnstrategies.placed.rules import Rule
from cnnstrategies.shares.dealing import turns

if TYPE_CHECKING:
    from cnnstrategies.placed.places import Places
    from cnnstrategies.placed.runner import OperationRunner

# Operations that copy each row by itself. Operations with torch's tag "pointwise" compute each element by itself.
COPIES = ("_to_copy", "clone")


class PartialTensor(ForeignTensor):
    """A tensor of a place whose ranks include this rank, which has some of the rows.

    The rows of the tensor are those of the place's ranks in turn, see :func:`cnnstrategies.shares.turns`.

    Attributes:
        rows: This rank's rows; None if the ranks of the place have brought all rows together.
        counts: Number of rows of each rank of the place.
        whole: The tensor with all rows; None before an operation needs them.
    """

    rows: Tensor | None
    counts: tuple[int, ...]
    whole: Tensor | None
    interpreter: "Places"

    @staticmethod
    def of_rows(
        places: "Places",
        rows: Tensor,
        counts: Sequence[int],
        place: tuple[int, ...],
        stride: Sequence[int],
        label: str = "",
    ) -> "PartialTensor":
        """Create a tensor from this rank's rows. All ranks of the place must call this."""
        shape = (sum(counts), *rows.shape[1:])
        tensor: PartialTensor = tensor_without_storage(PartialTensor, shape, stride, rows.dtype, rows.device)
        tensor.place, tensor.label, tensor.interpreter = place, label, places
        tensor.rows, tensor.counts, tensor.whole = rows, tuple(counts), None
        places.has_partial = True
        return tensor

    def made_whole(self) -> Tensor:
        """Return a tensor with all rows, which stands for this tensor from now on.

        All ranks of the place must call this at the same point of the program.
        """
        if self.rows is not None:
            self.whole = self.interpreter.join_rows(self, self.rows)
            self.rows = None
        assert self.whole is not None
        return self.whole

    def checked_whole(self) -> Tensor:
        """Return :meth:`made_whole`, for the user's code.

        Raises:
            RefusedError: The other ranks do not run the same code now.
        """
        if self.rows is not None and not self.interpreter.active:
            raise RefusedError(
                f"{self!r} has rows on other ranks, but these ranks do not run the same code now: read the value in "
                "the module's step or in a hook of Lightning, and not inside the divided network"
            )
        return self.made_whole()

    def __copy__(self) -> Any:
        """Return a copy with all rows."""
        return copy(self.checked_whole())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with all rows."""
        if id(self) not in memo:
            memo[id(self)] = deepcopy(self.checked_whole(), memo)
        return memo[id(self)]

    def untyped_storage(self) -> Any:
        """Return the storage of the tensor with all rows."""
        return self.checked_whole().untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the tensor with all rows."""
        return self.checked_whole().data_ptr()


allow_in_lists(PartialTensor)


def partial_in(args: Any, kwargs: Any) -> list[PartialTensor]:
    """Return the partial tensors among an operation's arguments."""
    return [tensor for tensor in tensors_in(args, kwargs) if type(tensor) is PartialTensor]


def run_partial(runner: "OperationRunner", func: Any, partial: Sequence[PartialTensor], args: Any, kwargs: Any) -> Any:
    """Run an operation with partial tensors.

    An operation that treats each row by itself runs with the rows that this rank has, and its result is a partial
    tensor. For other operations, the ranks of the place first bring all rows together.

    Args:
        runner: Runs operations on other tensors.
        func: The operation.
        partial: The partial tensors among the operands.
        args: Positional arguments of the operation.
        kwargs: Other arguments of the operation.
    """
    if _is_by_row(runner, func, partial, args, kwargs):
        return _run_by_row(runner, func, partial[0], args, kwargs)
    whole = {id(tensor): tensor.checked_whole() for tensor in partial}
    args, kwargs = with_tensors(lambda tensor: whole.get(id(tensor), tensor), args, kwargs)
    results = runner.run(func, args, kwargs)
    operation = operation_of(func)
    if operation.rule is Rule.RESHAPES or operation.resizes:
        for tensor in partial:
            _follow(tensor)
    return results


def _is_by_row(runner: "OperationRunner", func: Any, partial: Sequence[PartialTensor], args: Any, kwargs: Any) -> bool:
    """Whether an operation computes each row of its result from the same rows of the partial tensors alone."""
    operation, first = operation_of(func), partial[0]
    if not (operation.name in COPIES or torch.Tag.pointwise in func.tags) or len(operation.returns) != 1:
        return False
    if not operation.is_plain or any(t.rows is None or t.counts != first.counts for t in partial):
        return False
    for tensor in tensors_in(args, kwargs):
        if tensor.dim() > first.dim():
            return False
        has_rows = tensor.dim() == first.dim() and tensor.shape[0] != 1
        if type(tensor) is PartialTensor:
            if tensor.dim() < first.dim():
                return False
        elif has_rows or runner.places.place_of(tensor) is not None:
            return False
    return True


def _run_by_row(runner: "OperationRunner", func: Any, first: PartialTensor, args: Any, kwargs: Any) -> PartialTensor:
    form: ResultForm = runner.forms.of(func, args, kwargs)
    row_args, row_kwargs = with_tensors(
        lambda tensor: tensor.rows if type(tensor) is PartialTensor else tensor, args, kwargs
    )
    rows = func(*row_args, **row_kwargs)
    return PartialTensor.of_rows(runner.places, rows, first.counts, first.place, form.stride)


def _follow(tensor: PartialTensor) -> None:
    """Give a partial tensor the shape and strides of the tensor with all rows, which an operation has changed."""
    whole = tensor.whole
    assert whole is not None
    if (tensor.shape, tensor.stride()) != (whole.shape, whole.stride()):
        shape, stride, place = whole.shape, whole.stride(), tensor.place
        tensor.data = ForeignTensor.create(tensor.interpreter, shape, stride, whole.dtype, whole.device, place)


@lru_cache(maxsize=64)
def _positions(counts: tuple[int, ...]) -> list[list[slice]]:
    """Return the positions of each rank's rows, as slices that follow each other."""
    return [_slices(positions) for positions in turns(counts)]


def _slices(positions: Sequence[int]) -> list[slice]:
    """Return ascending positions as slices."""
    slices: list[slice] = []
    start = 0
    while start < len(positions):
        step = positions[start + 1] - positions[start] if start + 1 < len(positions) else 1
        stop = start + 1
        while stop < len(positions) and positions[stop] - positions[stop - 1] == step:
            stop += 1
        slices.append(slice(positions[start], positions[stop - 1] + 1, step))
        start = stop
    return slices


def joined_rows(tensor: Tensor, parts: Sequence[Tensor], counts: tuple[int, ...]) -> Tensor:
    """Return a tensor with all rows.

    Args:
        tensor: A tensor with the shape, strides, dtype and device of the result.
        parts: The rows of each rank.
        counts: Number of rows of each rank.
    """
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    for part, slices in zip(parts, _positions(counts), strict=True):
        start = 0
        for positions in slices:
            target = whole[positions]
            target.copy_(part[start : start + len(target)])
            start += len(target)
    return whole


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()
