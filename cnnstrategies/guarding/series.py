"""Search for values of a loss or of a gradient's norm that are not finite, or far above their history."""

import math
from collections.abc import Sequence

import torch

DEVIATIONS = 10.0  # Robust standard deviations of the logarithm from the history's median.
WARM_UP = 200  # Usual number of values before the first comparison.
KEPT = 1000  # Number of values in a history.
RAISED = 1.1  # Factor of the learning rate from which on losses and gradients may grow by design.


def first_not_finite(values: Sequence[tuple[int, float]], may_skip: bool) -> int | None:
    """Return the step of the first value that is not finite; None if there is none.

    Args:
        values: Steps and values.
        may_skip: Whether a gradient scaler skips steps whose gradients are not finite. Then only values count of which
            more than half are not finite.
    """
    wrong = [step for step, value in values if not math.isfinite(value)]
    if not wrong or (may_skip and (2 * len(wrong) <= len(values) or len(values) < 60)):
        return None
    return wrong[0]


class ValueHistory:
    """History of a positive value, which finds a value far above the history.

    A spike is more than ten robust standard deviations above the median of the logarithms, and above all earlier values
    by a factor. Values that are large by design, as with a penalty in every sixteenth step, have been as large before.

    Args:
        factor: Smallest ratio of a spike to the largest earlier value.
        warm_up: Number of values before the first comparison.
    """

    def __init__(self, factor: float, warm_up: int = WARM_UP) -> None:
        self._least, self._warm_up = math.log(factor), warm_up
        self.reset()

    def reset(self) -> None:
        """Forget all values, because a change of the training by design may change later values."""
        self._logarithms = torch.zeros(0, dtype=torch.float64)

    def first_spike(self, values: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
        """Return the step of the first spike and its ratio to the median; None if there is none. Add the values."""
        positive = [(step, value) for step, value in values if 0 < value < math.inf]
        logarithms = torch.tensor([value for _, value in positive], dtype=torch.float64).log()
        spike, history = None, self._logarithms
        if len(history) >= self._warm_up and positive:
            median = history.median()
            deviation = 1.4826 * (history - median).abs().median()
            limit = max(float(median + DEVIATIONS * deviation), float(history.max()) + self._least)
            above = (logarithms > limit).nonzero().flatten().tolist()
            if above:
                spike = positive[above[0]][0], math.exp(min(float(logarithms[above[0]] - median), 700.0))
        self._logarithms = torch.cat([history, logarithms])[-KEPT:]
        return spike
