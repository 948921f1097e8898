"""Tests of pipelines with layouts that other tests leave out; ``make test-cases`` runs this file."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.pipeline import test_declared_loss, test_placed_network, test_second_forward, test_stored
from tests.strategies import test_whole_step_compiled

CHECKS: dict[str, Callable[[], None]] = {
    "declared losses, 1-2": partial(test_declared_loss.check_layout, (1, 2), [*test_declared_loss.PROGRAMS]),
    "declared losses, 1-1-1": partial(test_declared_loss.check_layout, (1, 1, 1), [*test_declared_loss.PROGRAMS]),
    "second forwards, 1-1-1": partial(test_second_forward.check_layout, (1, 1, 1)),
    "stored values, 2-1": partial(test_stored.check_layout, (2, 1), list(test_stored.CASES), list(test_stored.CASES)),
    "placed networks": partial(test_placed_network.check_layouts, {("first",): [(1, 1), (1, 2)]}),
    "compiled stages, 1-1": partial(
        test_whole_step_compiled.test_compiled_stages_train_as_one_device, [1, 1], test_whole_step_compiled.STORING
    ),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_layout_trains_as_one_device(check: Callable[[], None]) -> None:
    check()
