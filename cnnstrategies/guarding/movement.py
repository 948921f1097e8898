"""Search for weights that do not change although they should, or change although they should not."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cnnstrategies.guarding.records import TakenRecords

MARGIN = 1000.0  # Smallest ratio of a step's size to the rounding of a weight for which the weight must change.
ENOUGH = 10  # Number of steps since the last check without which a weight that does not change is not named.


@dataclass(frozen=True)
class WeightState:
    """A parameter at a check.

    Attributes:
        digest: Checksum of its values.
        norm: Norm of its values.
        dtype: Its dtype.
        is_optimized: Whether an optimizer of this process has it.
        has_gradient: Whether it has a gradient.
    """

    digest: int
    norm: float
    dtype: torch.dtype
    is_optimized: bool
    has_gradient: bool


@dataclass(frozen=True)
class Movements:
    """Names of parameters that have changed or not changed since the last check, against what was expected.

    Attributes:
        stuck: They have gradients and an optimizer, but did not change.
        not_optimized: They have gradients, but are in no optimizer, and did not change.
        without_gradient: They are trainable, but had no gradient, and did not change.
        moved_by_optimizer: They are frozen, but an optimizer has changed them.
        written: They are frozen and had not changed before, but have changed.
    """

    stuck: list[str]
    not_optimized: list[str]
    without_gradient: list[str]
    moved_by_optimizer: list[str]
    written: list[str]


class MovementHistory:
    """The parameters of a module at the last check."""

    def __init__(self) -> None:
        self._before: dict[str, WeightState] = {}
        self._constant: dict[str, int] = {}  # Number of checks since which a frozen parameter has not changed.

    def compare(
        self, now: Mapping[str, WeightState], records: TakenRecords, steps: int, sees_gradients: bool
    ) -> Movements:
        """Compare the parameters with those at the last check, and keep them for the next check.

        Args:
            now: States of the parameters by their names.
            records: Records of the steps since the last check.
            steps: Number of these steps.
            sees_gradients: Whether gradients are in the parameters before an optimizer's step.
        """
        result = Movements([], [], [], [], [])
        for name, state in now.items():
            before = self._before.get(name)
            if before is None:
                continue
            has_moved = before.digest != state.digest
            record = records.parameters.get(name)
            if name not in records.trainable:
                self._look_at_frozen(result, name, state, before, has_moved)
                continue
            self._constant.pop(name, None)
            if has_moved:
                continue
            if steps < ENOUGH:
                continue
            if record is not None and record.reach > MARGIN * torch.finfo(state.dtype).eps * state.norm:
                result.stuck.append(name)
            elif record is None and sees_gradients and state.has_gradient and not state.is_optimized:
                result.not_optimized.append(name)
            elif record is None and not state.has_gradient:
                result.without_gradient.append(name)
        self._before = dict(now)
        return result

    def _look_at_frozen(
        self, result: Movements, name: str, state: WeightState, before: WeightState, has_moved: bool
    ) -> None:
        if not has_moved:
            self._constant[name] = self._constant.get(name, 0) + 1
        elif state.is_optimized and state.has_gradient and before.has_gradient:
            result.moved_by_optimizer.append(name)
        elif self._constant.pop(name, 0) >= 2:
            result.written.append(name)
