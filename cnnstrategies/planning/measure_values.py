"""Determine the bytes that a training step's own code sends between the stages of a pipeline.

The step runs in this process by the rules of :mod:`cnnstrategies.placed`, which run each operation where its operands
are. This process has all tensors, so nothing is sent; what the ranks of the first and the last stage would send each
other is counted.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.placed import Places
from cnnstrategies.placed.decision import Place, decide, is_at
from cnnstrategies.placed.operations import Operation, operation_of, tensors_in
from cnnstrategies.placed.parcel import TensorParcel
from cnnstrategies.placed.partial import COPIES
from cnnstrategies.placed.runner import OperationRunner, Operations, distinct
from cnnstrategies.planning.step_values import StepValues

HERE = -1  # Rank of this process, which has the tensors of all stages.
FIRST, LAST = (HERE, 0), (HERE, 1)
BOTH = (HERE, 0, 1)
SAMPLES = 2  # Number of samples of the batch with which the step runs.


def step_values(
    step: Callable[[Any], Any],
    module: nn.Module,
    network: nn.Module,
    batch: Any,
    samples: int,
    small: int,
    sends_with_batch: bool,
    prepare: Callable[[Places], object],
) -> StepValues:
    """Return the bytes of the values that a step sends besides the network's activations.

    The step runs twice, because the first step shows which tensors of a batch the last stage reads. The module changes.

    Args:
        step: Function that returns the loss of a batch.
        module: The module with all parameters that the step uses.
        network: The submodule that is divided.
        batch: Nested containers with tensors of the same number of samples.
        samples: Number of samples of a step.
        small: Largest number of bytes of a tensor of a batch of which all ranks get copies.
        sends_with_batch: Whether tensors of a batch that the last stage reads are sent with the batch, as on CPUs.
        prepare: Function that is called with the rules before the step, such as one that prepares metrics.

    Raises:
        Exception: The step cannot run in this way.
    """
    rows = max((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), default=1)
    places = _CountingPlaces(min(rows, SAMPLES), samples)
    few = tree_map(partial(_few, rows=rows), batch)
    inside = {id(parameter) for parameter in network.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in inside:
            places.mark(parameter, LAST)
    results = _place_results(places, network)
    prepare(places)
    for _ in range(2):
        places.begin()
        with places:
            result = step(_placed(places, few, small, sends_with_batch))
            loss = result["loss"] if isinstance(result, dict) else result
            if isinstance(loss, Tensor) and loss.requires_grad:
                torch.autograd.backward(loss)
                places.settle_gradients(results)
            results.clear()
    counts = places.counts
    return StepValues(
        sum(places.loaded.values()), counts[LAST], counts[FIRST], counts[BOTH] + places.copied, places.joined
    )


class _CountingPlaces(Places):
    """The rules of a process that has all tensors, which counts what the ranks of two stages would send.

    Args:
        rows: Number of samples of the batch.
        samples: Number of samples for which bytes are counted.

    Attributes:
        counts: Bytes that are brought, by the ranks that get them.
        loaded: Bytes of the batch's tensors that are sent with the batch, by name.
        copied: Bytes of the batch's small tensors.
        joined: Bytes of tensors whose rows are brought together on the replicas of the first stage.
    """

    def __init__(self, rows: int, samples: int) -> None:
        super().__init__(HERE, 2, _NoLink())
        self._rows, self._samples = rows, samples
        runner = _CountingRunner(self)
        self._runner, self._operations = runner, Operations(runner)
        self.begin()

    def begin(self) -> None:
        """Begin to count."""
        self.counts = dict.fromkeys((FIRST, LAST, BOTH), 0)
        self.loaded: dict[str, int] = {}
        self.copied = self.joined = 0
        self._divided: set[str] = set()  # Labels of tensors of which each replica has the rows that it has loaded.

    def divide(self, tensor: Tensor, label: str) -> Tensor:
        """Return a tensor of the first stage of which each replica has some rows, as far as the ranks know."""
        self._divided.add(label)
        return self.take(tensor, FIRST, label)

    def is_divided(self, tensor: Tensor) -> bool:
        """Whether each replica of the first stage has some rows of a tensor."""
        return self.label_of(tensor) in self._divided

    def join(self, tensor: Tensor) -> None:
        """Count a divided tensor whose rows are brought together."""
        if self.is_divided(tensor):
            self._divided.remove(self.label_of(tensor))
            self.joined += self.bytes_of(tensor)

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of the elements of a tensor that are sent, with the rows of all samples."""
        (part,) = TensorParcel([tensor], None).pack()
        has_rows = tensor.dim() > 0 and len(tensor) == self._rows
        return part.nbytes * self._samples // self._rows if has_rows else part.nbytes

    def bring_all(self, tensors: Iterable[Tensor], ranks: tuple[int, ...], why: str = "bring") -> dict[int, Tensor]:
        """Count tensors that are not on the given ranks, and return them as tensors of these ranks."""
        tensors = list(tensors)
        self._count(tensors, ranks)
        return super().bring_all(tensors, ranks, why)

    def all_everywhere(self, tensors: Iterable[Tensor], why: str = "read") -> dict[int, Tensor]:
        """Count tensors that not all ranks have, and return them as tensors of all ranks."""
        tensors = list(tensors)
        self._count(tensors, BOTH)
        return super().all_everywhere(tensors, why)

    def _count(self, tensors: Iterable[Tensor], ranks: tuple[int, ...]) -> None:
        with self.local():
            for tensor in {id(tensor): tensor for tensor in tensors}.values():
                if not is_at(self.place_of(tensor), ranks):
                    self.join(tensor)
                    self.counts[ranks] += self.bytes_of(tensor)


class _CountingRunner(OperationRunner):
    """The rules, which decide as ranks that do not have the tensors of all stages."""

    places: _CountingPlaces

    def __init__(self, places: _CountingPlaces) -> None:
        super().__init__(places)
        self._numbers = itertools.count()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation. If it does not compute each row by itself, the rows of divided tensors are joined."""
        divided = [tensor for tensor in tensors_in(args, kwargs) if self.places.is_divided(tensor)]
        is_by_row = bool(divided) and self._is_by_row(func, args, kwargs, divided[0])
        for tensor in () if is_by_row else divided:
            self.places.join(tensor)
        result = super().run(func, args, kwargs)
        if is_by_row and not self.places.is_divided(result):
            return self.places.divide(result, f"rows {next(self._numbers)}")
        return result

    def _is_by_row(self, func: Any, args: Any, kwargs: Any, first: Tensor) -> bool:
        """Whether an operation is one that :func:`.run_partial` runs row by row."""
        operation = operation_of(func)
        is_copy = operation.name in COPIES or torch.Tag.pointwise in func.tags
        return (
            is_copy
            and operation.is_plain
            and len(operation.returns) == 1
            and all(
                self.places.is_divided(tensor)
                if tensor.dim() == first.dim() and tensor.shape[0] != 1
                else tensor.dim() < first.dim() and self.places.place_of(tensor) is None
                for tensor in tensors_in(args, kwargs)
            )
        )

    def place_for(self, operation: Operation, operands: Sequence[Tensor], written: Sequence[Tensor]) -> Place:
        """Return the place where an operation runs.

        Raises:
            SeveralPlacesError: The operation writes tensors of several places.
        """
        places = [self.places.place_of(operand) for operand in operands]
        others = [None if place is None else tuple(rank for rank in place if rank != HERE) for place in places]
        targets = {id(tensor) for tensor in written}
        place = decide(others, [id(operand) in targets for operand in operands], lambda i: distinct(operands[i]))
        return None if place is None else (HERE, *place)


class _NoLink:
    """A link that sends nothing. A process that has all tensors receives nothing."""

    def send(self, target: int, message: bytearray) -> None:
        pass

    def receive(self, source: int) -> bytes:
        raise AssertionError("a process that has all tensors waits for a message")

    def close(self) -> None:
        pass


def _place_results(places: _CountingPlaces, network: nn.Module) -> list[Tensor]:
    """Let a network compute without the rules, with results that are on the last stage and need a gradient.

    Returns:
        A list to which each call of the network adds the tensors of its result.
    """
    forward = network.forward
    results: list[Tensor] = []

    def placed(*args: Any, **kwargs: Any) -> Any:
        with places.local():
            with torch.no_grad():
                result = forward(*args, **kwargs)
            result = places.mark(tree_map(_leaf, result), LAST)
        results.extend(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    vars(network)["forward"] = placed
    return results


def _placed(places: _CountingPlaces, batch: Any, small: int, sends_with_batch: bool) -> Any:
    """Return a batch with its tensors where the ranks would have them, and count those that are sent with it."""
    numbers = itertools.count()

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name, size = f"tensor {next(numbers)} of a batch", places.bytes_of(leaf)
        if size <= small:
            places.copied += size
            return leaf.clone()
        readers = places.readers.setdefault(name, set()) if sends_with_batch else set()
        if not readers:
            return places.divide(leaf.clone(), name)
        places.loaded[name] = size
        return places.mark(leaf.clone(), BOTH, name)

    return tree_map(placed, batch)


def _few(leaf: Any, rows: int) -> Any:
    """Return the first samples of a tensor with a row for each sample; other values as they are."""
    return leaf[:SAMPLES] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows else leaf


def _leaf(value: Any) -> Any:
    """Return a tensor of a result as a tensor that a loss gets; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_() if copy.is_floating_point() else copy
