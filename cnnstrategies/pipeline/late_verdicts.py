"""Read late whether the gradients of backwards were those of the declared loss, so that no step waits for the device.

The training step and the loss of the package's own modules do not change from batch to batch. After the first step has
shown that it trains the declared loss, later backwards use the gradients of the declared loss at once. The numbers that
show whether these gradients were right are copied to the CPU, and are read as soon as they are there. If they show
other gradients, the run ends with an error, before a checkpoint is saved.
"""

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cnnstrategies.pipeline.gradient_check import LATE_TOLERANCE, GradientComparison


class _Begun(NamedTuple):
    """A comparison whose numbers are on their way to the CPU.

    Attributes:
        comparison: The comparison.
        step: Number of the training step.
        numbers: The numbers, in pinned memory of the CPU.
        arrived: Event of the device after which the numbers are there.
    """

    comparison: GradientComparison
    step: int
    numbers: Tensor
    arrived: Any


class LateVerdicts:
    """Comparisons of backwards whose numbers are read when they have arrived on the CPU.

    Attributes:
        is_settled: Whether all verdicts of this run have been read. All ranks have the same value; only ranks of the
            last stage have comparisons.
    """

    def __init__(self) -> None:
        self.is_settled = True
        self._begun: deque[_Begun] = deque()

    def add(self, comparison: GradientComparison, step: int) -> None:
        """Begin to copy the numbers of a comparison to the CPU.

        Args:
            comparison: The comparison, on the device.
            step: Number of the training step, for the error message.
        """
        numbers = torch.empty(comparison.numbers.shape, dtype=comparison.numbers.dtype, pin_memory=True)
        numbers.copy_(comparison.numbers, non_blocking=True)
        arrived = torch.get_device_module(comparison.numbers.device).Event()
        arrived.record()
        self._begun.append(_Begun(comparison, step, numbers, arrived))

    def failure(self, wait: bool = False) -> str:
        """Return an error message if gradients were not those of the declared loss, and otherwise an empty text.

        Args:
            wait: Whether to wait for the numbers that have not arrived.
        """
        while self._begun and (wait or self._begun[0].arrived.query()):
            comparison, step, numbers, arrived = self._begun.popleft()
            if wait:
                arrived.synchronize()
            verdict = comparison.verdict(numbers.tolist(), LATE_TOLERANCE)
            if verdict.kind == "different":
                return (
                    f"schedule=1f1b: the gradients of training step {step} of this run were not those of the declared "
                    f"loss: {verdict.reason}; the weights are wrong since this step and have not been saved, so set "
                    "schedule: gpipe and continue from the last checkpoint"
                )
        return ""
