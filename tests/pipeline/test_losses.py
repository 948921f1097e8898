"""Tests of losses that are computed in parts, one for each microbatch: the gradients equal those of the whole loss."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies import ImageClassifier
from cnnstrategies.pipeline.engine_batch import Batch
from cnnstrategies.pipeline.engine_loss import MeanLoss
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.strategies.differences import has_mean_loss

SPLIT = Split((7, 4), (0, 1, 0, 1, 0))
GENERATOR = torch.Generator().manual_seed(0)
TARGETS = torch.randint(4, (11,), generator=GENERATOR)
TARGETS[SPLIT.global_rows(1)] = 3  # All samples of this microbatch are ignored.
LOGITS = torch.randn(11, 4, generator=GENERATOR, dtype=torch.float64)


def ignoring(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=3)


def ignoring_all(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, torch.full_like(targets, 3), ignore_index=3)


def gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = LOGITS.clone().requires_grad_()
    loss(leaf * 1).backward()
    assert leaf.grad is not None
    return leaf.grad


LOSSES = {
    "mean": MeanLoss(F.cross_entropy),
    "ignored": MeanLoss(ignoring, lambda targets: (targets != 3).sum()),
    "ignored, as a number": MeanLoss(ignoring, lambda targets: int((targets != 3).sum())),
    "all ignored": MeanLoss(ignoring_all, lambda targets: (targets < 0).sum()),
    "all ignored, as a number": MeanLoss(ignoring_all, lambda targets: 0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_loss_have_the_gradients_of_the_whole_loss(name: str) -> None:
    parts = LOSSES[name]
    parts.begin(Batch(SPLIT, None, (), (), (TARGETS,)))

    def in_parts(outputs: Tensor) -> Tensor:
        return torch.stack([parts.part(outputs[SPLIT.global_rows(m)], m) for m in range(SPLIT.microbatches)]).sum()

    expected = gradient(lambda outputs: parts.loss(outputs, TARGETS))
    torch.testing.assert_close(gradient(in_parts), expected.nan_to_num(), rtol=1e-13, atol=1e-15)


def test_an_overridden_loss_counts_as_the_users_loss() -> None:
    class Other(ImageClassifier):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().loss(outputs, targets)

    network = nn.Linear(1, 2)
    assert has_mean_loss(ImageClassifier(network, 2))
    assert not has_mean_loss(Other(network, 2)), "the overridden loss may divide by a different number"
