"""The guard's notes about batches of equal images, and about targets that are all equal."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cnnstrategies.guarding.constant_batches import RECORDED, SMALLEST, ConstantBatches

CHECKS = 12


def images(batch: int = SMALLEST) -> Tensor:
    return torch.randn(batch, 1, 4, 4)


def notes(batches: list[Any], own_targets: bool = False) -> list[tuple[bool, int]]:
    """Return what is noted in checks, if the loss gets the batch's targets, or targets of its own."""
    records, results = ConstantBatches(), []
    for _ in range(CHECKS):
        for batch in batches:
            records.begin_batch(batch, 0)
            scores, targets = torch.randn(len(batch[1]), 3, requires_grad=True), batch[-1]
            loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64) if own_targets else targets)
            records.before_backward(0.5 * loss)
        results.append(records.take())
    return results


def targets(*values: int, count: int = SMALLEST) -> Tensor:
    return torch.tensor(values).repeat(count)[:count]


@pytest.mark.light
def test_only_batches_of_equal_images_are_named() -> None:
    torch.manual_seed(0)
    equal, mixed = (torch.ones(SMALLEST, 1, 4, 4), targets(0, 1)), (images(), targets(0, 1))
    assert notes([equal] * RECORDED) == [(True, 0)] * CHECKS
    one_other = torch.ones(SMALLEST, 1, 4, 4)
    one_other[-1, 0, 3, 3] = 0
    for batches in ([*[equal] * (RECORDED - 1), mixed], [equal] * (RECORDED - 1), [mixed] * RECORDED):
        assert notes(batches) == [(False, 0)] * CHECKS
    assert notes([(one_other, targets(0, 1))] * RECORDED) == [(False, 0)] * CHECKS
    assert notes([(torch.ones(SMALLEST - 1, 1, 4, 4), targets(0, 1, count=7))] * RECORDED) == [(False, 0)] * CHECKS


@pytest.mark.light
def test_many_equal_targets_are_named_if_the_loss_gets_them() -> None:
    torch.manual_seed(0)
    single, other = [(images(), targets(2))] * RECORDED, [(images(), targets(1, 2))]
    # 32 targets between two checks. After 256 of them, the next step shows whether the loss gets them.
    counts = [32 * (check + 1) if check >= 8 else 0 for check in range(CHECKS)]
    assert notes(single) == [(False, count) for count in counts]
    for batches, own_targets in ((single, True), (other * RECORDED, False), ([*other, *single[1:]], False)):
        assert notes(batches, own_targets) == [(False, 0)] * CHECKS
