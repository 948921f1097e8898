"""One step's gradients of a node: added up parameter by parameter, as they come."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cnnstrategies.paramserver.combiner.board import Board


class Takes(Protocol):
    """Takes a step's mean gradients; a :class:`~cnnstrategies.paramserver.api.Worker` does."""

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Gradients of a step follow, which are means of so many samples."""

    def push(self, index: int, gradient: Tensor) -> None:
        """A parameter's."""


class StepSum:
    """The mean gradient of a node's workers in one step, weighted by their samples.

    A worker that dies in the step takes part with the gradients that it has given.

    Args:
        step: Its number.
        groups: The hyper-parameters of each parameter group.
        samples: How many samples this worker's own gradients are means of.
        own: Its own gradients, by parameter; more may come.
        boards: Those of the node's other workers.
        alive: Gives the ranks of those that live.
        sums: Memory for each parameter, kept from step to step.
    """

    def __init__(
        self,
        step: int,
        groups: Sequence[Mapping[str, Any]],
        samples: float,
        own: dict[int, Tensor],
        boards: Mapping[int, Board],
        alive: Callable[[], Collection[int]],
        sums: list[Tensor | None],
    ) -> None:
        self.own = own
        self._step = step
        self._groups = groups
        self._samples = samples
        self._boards = boards
        self._alive = alive
        self._sums = sums
        self._weights: dict[int, float] | None = None  # of the others, once all have begun
        self._open = dict.fromkeys(own)  # in the order in which they came

    def add(self, index: int, gradient: Tensor) -> None:
        """Take an own gradient."""
        self.own[index] = gradient
        self._open[index] = None

    def end(self) -> None:
        """No more own gradients come: those of which the others have some are open, too."""
        self._open.update(dict.fromkeys(index for index in range(len(self._sums)) if index not in self.own))

    def advance(self, engine: Takes) -> bool:
        """Push what all have given by now; whether nothing is open."""
        others = {rank: self._boards[rank] for rank in self._alive() if rank in self._boards}
        if self._weights is None:
            if any(board.begun < self._step for board in others.values()):
                return False
            self._weights = {rank: board.samples for rank, board in others.items()}
            engine.begin_step(self._groups, self._samples + sum(self._weights.values()))
        give_more = [board for board in others.values() if board.ended < self._step]
        for index in list(self._open):
            if all(board.has_given(index, self._step) for board in give_more):
                del self._open[index]
                mean = self._mean(index, others.keys())
                if mean is not None:
                    engine.push(index, mean)
        return not self._open

    def _mean(self, index: int, alive: Collection[int]) -> Tensor | None:
        """The mean gradient of a parameter; None if nobody has one."""
        assert self._weights is not None
        given = {rank: weight for rank, weight in self._weights.items() if self._has_given(rank, index)}
        # Who lives and has no gradient counts as one of zeros, as in the mean over the workers of a run.
        total = self._samples + sum(weight for rank, weight in self._weights.items() if rank in alive or rank in given)
        parts = [(self._samples, self.own[index].to("cpu"))] if index in self.own else []
        parts += [(weight, self._boards[rank].gradients[index]) for rank, weight in sorted(given.items())]
        if not parts:
            return None
        if parts[0][0] == total:
            return parts[0][1]
        mean = self._sums[index]
        if mean is None:
            mean = self._sums[index] = torch.empty_like(parts[0][1], memory_format=torch.contiguous_format)
        torch.mul(parts[0][1], parts[0][0] / total, out=mean)
        for weight, gradient in parts[1:]:
            mean.add_(gradient, alpha=weight / total)
        return mean

    def _has_given(self, rank: int, index: int) -> bool:
        return self._boards[rank].has_given(index, self._step)
