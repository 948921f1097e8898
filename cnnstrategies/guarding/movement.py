"""Search for weights that do not change although they should, or change although they should not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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


# Kinds of parameters whose values have changed or not changed against what was expected:
# "stuck": it has gradients and an optimizer, but has not changed.
# "not optimized": it has gradients, but is in no optimizer, and has not changed.
# "without a gradient": it is trainable, but had no gradient, and has not changed.
# "moved by an optimizer": it is frozen, but an optimizer has changed it.
# "written": it is frozen and had not changed before, but has changed, and no other frozen parameter has.
Movement = Literal["stuck", "not optimized", "without a gradient", "moved by an optimizer", "written"]


class MovementHistory:
    """The parameters of a module at the last check."""

    def __init__(self) -> None:
        self._before: dict[str, WeightState] = {}
        self._constant: dict[str, int] = {}  # Number of checks since which a frozen parameter has not changed.

    def compare(
        self, now: Mapping[str, WeightState], records: TakenRecords, steps: int, sees_gradients: bool
    ) -> dict[Movement, list[str]]:
        """Compare the parameters with those at the last check, and keep them for the next check.

        Args:
            now: States of the parameters by their names.
            records: Records of the steps since the last check.
            steps: Number of these steps.
            sees_gradients: Whether gradients are in the parameters before an optimizer's step. Otherwise they are those
                of this rank's samples, and a few weights that do not change are not named.
        """
        result: dict[Movement, list[str]] = {}
        frozen: list[str] = []  # Frozen parameters that have changed.
        for name, state in now.items():
            before = self._before.get(name)
            if before is None:
                continue
            has_moved = before.digest != state.digest
            reach = records.reach.get(name)
            if name not in records.trainable:
                frozen += [name] * has_moved
                self._look_at_frozen(result, name, state, before, has_moved)
                continue
            self._constant.pop(name, None)
            if has_moved or steps < ENOUGH:
                continue
            if reach is not None and reach > MARGIN * torch.finfo(state.dtype).eps * state.norm:
                result.setdefault("stuck", []).append(name)
            elif reach is None and sees_gradients and state.has_gradient and not state.is_optimized:
                result.setdefault("not optimized", []).append(name)
            elif reach is None and not state.has_gradient:
                result.setdefault("without a gradient", []).append(name)
        if not sees_gradients and 2 * len(result.get("stuck", [])) < len(records.reach):
            # A worker sees gradients of its own samples only. Those of all workers may add up to zero, for example for
            # a bias on which a loss of all workers' samples does not depend.
            result.pop("stuck", None)
        if len(frozen) > 1:
            # A memory error changes one parameter. Code that updates an average changes all parameters of a network,
            # maybe in each epoch only, and some averages hardly change: of a bias before batch normalisation, whose
            # gradients are errors of rounding.
            result.pop("written", None)
        self._before = dict(now)
        return result

    def _look_at_frozen(
        self, result: dict[Movement, list[str]], name: str, state: WeightState, before: WeightState, has_moved: bool
    ) -> None:
        if not has_moved:
            self._constant[name] = self._constant.get(name, 0) + 1
        elif state.is_optimized and state.has_gradient and before.has_gradient:
            result.setdefault("moved by an optimizer", []).append(name)
        elif self._constant.pop(name, 0) >= 2:
            result.setdefault("written", []).append(name)
