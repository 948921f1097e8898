"""The guard's note about a softmax before a loss that applies softmax, and about similar losses."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cnnstrategies.guarding.losses import wrong_input

TARGETS = torch.tensor([0, 2, 1, 1])
MASKS = TARGETS.reshape(1, 2, 2)


def softmax_twice(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores.softmax(1), TARGETS)


@pytest.mark.light
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (softmax_twice, "applies softmax"),
        (lambda x: 0.1 * x.square().mean() + F.cross_entropy(x.softmax(1), TARGETS, label_smoothing=0.1), "softmax"),
        (lambda x: F.cross_entropy(x.softmax(1).T.clone().reshape(1, 3, 2, 2), MASKS), "applies softmax"),
        (lambda x: F.nll_loss(x.softmax(1), TARGETS), "is nll_loss of the result of softmax"),
        (lambda x: F.binary_cross_entropy_with_logits(x.sigmoid(), torch.ones(4, 3)), "applies sigmoid"),
        (lambda x: F.cross_entropy(x, TARGETS), ""),
        (lambda x: F.nll_loss(x.log_softmax(1), TARGETS), ""),
        (lambda x: F.cross_entropy(x.log_softmax(1), TARGETS), ""),
        (lambda x: F.cross_entropy(x.softmax(1) @ torch.ones(3, 3), TARGETS), ""),
        (lambda x: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"), ""),
        (lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(4, 3)), ""),
        (lambda x: F.cross_entropy(x.detach().softmax(1), TARGETS), ""),
    ],
)
def test_only_probabilities_in_place_of_scores_are_named(loss: Callable[[Tensor], Tensor], words: str) -> None:
    fault, _ = wrong_input(loss(torch.randn(4, 3, requires_grad=True))) or ("", "")
    assert words in fault
    assert bool(words) == bool(fault)


@pytest.mark.light
def test_what_is_not_a_loss_is_accepted() -> None:
    assert [wrong_input(value) for value in (None, 1.0, torch.ones(()), {"loss": torch.ones(())})] == [None] * 4
