"""Training with divided images gives what one process gives, and groups of devices give what DDP gives."""

import torch
from ranks import run_apart, run_ranks
from spatial_programs import PROGRAMS, train_all
from torch import Tensor

from cnnstrategies.strategies import SpatialStrategy

TIMEOUT = 60.0
ALL = tuple(PROGRAMS)


def auto() -> str:
    return "auto"


def ddp() -> str:
    return "ddp"


def two_parts() -> SpatialStrategy:
    return SpatialStrategy(timeout=TIMEOUT)


def check(actual: dict[str, Tensor], expected: dict[str, Tensor], rank: int, text: str) -> None:
    """Check all values of a rank. Only the first rank of a group has predictions."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name.startswith("predicted") and rank % 2:
            assert len(actual[name]) == 0
            continue
        scale = max(1.0, float(value.double().abs().max()))
        torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-12 * scale, msg=f"{text}, {name}")


def test_two_parts_train_as_one_process() -> None:
    reports = run_ranks(2, train_all, two_parts, 2, ALL)
    expected = run_apart(train_all, auto, 1, ALL)
    for rank, report in enumerate(reports):
        for name in ALL:
            check(report[name], expected[name], rank, name)


def test_groups_train_as_ddp() -> None:
    name = "own classifier"
    reports = run_ranks(4, train_all, two_parts, 4, [name])
    expected = run_ranks(2, train_all, ddp, 2, [name])
    for rank, report in enumerate(reports):
        check(report[name], expected[rank // 2][name], rank, name)
