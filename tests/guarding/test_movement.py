"""Weights that do not change although they have gradients."""

import pytest
import torch

from cnnstrategies.guarding.movement import ENOUGH, MovementHistory, WeightState
from cnnstrategies.guarding.records import TakenRecords


def state(digest: int) -> WeightState:
    return WeightState(digest, 1.0, torch.float32, is_optimized=True, has_gradient=True)


@pytest.mark.light
@pytest.mark.parametrize(("sees_gradients", "stuck"), [(True, 1), (True, 3), (False, 0), (False, 3)])
def test_a_bias_whose_gradients_cancel_between_workers_is_not_named(sees_gradients: bool, stuck: int) -> None:
    """One of three weights may stand still under a parameter server. If all of them do, their steps are lost."""
    names = ["conv.weight", "conv.bias", "head.bias"]
    history, reach = MovementHistory(), dict.fromkeys(names, 1.0)
    records = TakenRecords([], [], reach, set(names), (0.1, 0.1), [])
    history.compare({name: state(0) for name in names}, records, 0, sees_gradients)
    moving = names[: len(names) - max(stuck, 1)]
    now = {name: state(int(name in moving)) for name in names}
    moved = history.compare(now, records, ENOUGH, sees_gradients)
    assert moved == ({"stuck": names[-stuck:]} if stuck else {})
