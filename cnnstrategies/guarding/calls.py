"""Search for steps that a training makes in a wrong way: gradients kept, clipping without effect, wrong schedules.

These errors are the same on all ranks, and a run on one device makes them as well.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies._torch_private import norms_of
from cnnstrategies.recording.steps import StepReader

TOLERANCE = 1e-3  # Relative difference up to which a norm counts as unchanged, or as the limit of clipping.
FEWEST = 4  # Smallest number of steps of which a statement is made.


@dataclass(frozen=True)
class ScheduleState:
    """Progress of a schedule.

    Attributes:
        key: Identity of the schedule.
        made: Number of steps that the schedule has made.
        due: Number of steps that the schedule should have made.
    """

    key: int
    made: int
    due: int


class ScheduleHistory:
    """Progress of schedules at earlier checks."""

    def __init__(self) -> None:
        self._before: dict[int, ScheduleState] = {}

    def wrong(self, states: Sequence[ScheduleState]) -> tuple[int, int] | None:
        """Return the numbers of steps made and due since an earlier check, if a schedule is wrong; otherwise None.

        A schedule is wrong if it has made no step, or at least one and a half times the steps that were due.
        """
        result = None
        for state in states:
            before = self._before.setdefault(state.key, state)
            made, due = state.made - before.made, state.due - before.due
            if due >= FEWEST:
                self._before[state.key] = state
                if made == 0 or 2 * made >= 3 * due:
                    result = result or (made, due)
        return result


class StepCalls(StepReader):
    """Gradients and learning rates at the points of some steps since the last check.

    Nothing is read on the host before :meth:`take`, because a read makes the CPU wait for its device.

    Args:
        optimizers: The optimizers.
        is_held: Function that tells whether this rank has the values of a tensor.
        interval: Number of steps from one recorded step to the next.
        limit: Largest norm of an optimizer's gradients after clipping; None if gradients are not clipped.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], is_held: Callable[[Tensor], bool], interval: int, limit: float | None
    ) -> None:
        self._optimizers, self._is_held, self._interval, self._limit = optimizers, is_held, interval, limit
        self._steps = 0
        self._before: dict[int, Tensor] = {}  # Norms before clipping in the current step, by the optimizers.
        self._has_stepped = False  # Whether an optimizer has made a step since a step has begun.
        self._begun = 0  # Number of the last step that has begun.
        self._begin()

    def _begin(self) -> None:
        self._kept: list[Tensor] = []
        self._clean = 0  # Number of recorded steps without gradients at their beginning.
        self._clipped: list[tuple[Tensor, Tensor]] = []
        self._rates: list[float] = []

    @override
    def before_backward(self, loss: Any) -> None:
        """Record gradients that are left from the step before, in the first backward pass of a step."""
        if self.step == self._begun:
            return
        self._begun = self.step
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._rates.append(
            max((float(group["lr"]) for group in groups if isinstance(group.get("lr"), float)), default=1)
        )
        # Without an optimizer's step, hooks of the user accumulate gradients.
        if self._steps % self._interval == 0 and self._has_stepped:
            norms = [norm for optimizer in self._optimizers if (norm := self._norm(optimizer)) is not None]
            self._kept += norms[:1]
            self._clean += not norms
        self._steps += self._has_stepped or not self._steps
        self._has_stepped = False

    @override
    def before_step(self, optimizer: Optimizer) -> None:
        """Record the norm of an optimizer's gradients before they are clipped."""
        self._before.clear()
        if self._limit is not None and self._steps % self._interval == 0:
            norm = self._norm(optimizer)
            if norm is not None:
                self._before[id(optimizer)] = norm

    @override
    def after_step(self, optimizer: Optimizer) -> None:
        self._has_stepped = True
        before = self._before.pop(id(optimizer), None)
        after = None if before is None else self._norm(optimizer)
        if before is not None and after is not None:
            self._clipped.append((before, after))

    def take(self) -> tuple[bool, float, bool]:
        """Return what was recorded since the last call, and begin again.

        Returns:
            Whether gradients were left in most recorded steps; the smallest norm by which clipping was exceeded without
            an effect, or 0; and whether the learning rate was 0 in all steps.
        """
        kept = torch.stack(self._kept).tolist() if self._kept else []
        count = sum(value > 0 for value in kept)
        clean = self._clean + len(kept) - count  # Lightning sets gradients to None before a validation.
        pairs = torch.stack([torch.stack(pair) for pair in self._clipped]).tolist() if self._clipped else []
        limit = self._limit or 0.0
        exceeding = [
            before
            for before, after in pairs
            if limit * (1 + TOLERANCE) < after < float("inf") and after >= before * (1 - TOLERANCE)
        ]
        stands = len(self._rates) >= FEWEST and max(self._rates) == 0
        excess = min(exceeding) if len(exceeding) >= FEWEST - 1 else 0.0
        self._begin()
        return count >= FEWEST - 1 and count >= 3 * clean, excess, stands

    def _norm(self, optimizer: Optimizer) -> Tensor | None:
        """Return the norm of an optimizer's gradients; None if it has none."""
        parameters: Iterable[nn.Parameter] = (value for group in optimizer.param_groups for value in group["params"])
        gradients = (parameter.grad for parameter in parameters if self._is_held(parameter))
        dense = [value for value in gradients if value is not None and value.layout is torch.strided]
        return torch.linalg.vector_norm(norms_of(dense)) if dense else None
