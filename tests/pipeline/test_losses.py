"""The parts of a loss add up to the gradients of the whole, or the loss is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies import ImageClassifier
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch
from cnnstrategies.pipeline.losses import MeanLoss, WeighedLoss
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.strategies.hybrid_pipeline.steps import has_mean_loss

SPLIT = Split((7, 4), (0, 1, 0, 1, 0))
GENERATOR = torch.Generator().manual_seed(0)
TARGETS = torch.randint(4, (11,), generator=GENERATOR)
TARGETS[SPLIT.global_rows(1)] = 3  # A microbatch in which all are ignored.
WEIGHTS = torch.tensor([1.0, 3.0, 0.1, 0.0], dtype=torch.float64)

Outputs = dict[str, Tensor]


def outputs() -> Outputs:
    generator = torch.Generator().manual_seed(1)
    shapes = {"logits": (11, 4), "value": (11,), "unused": (11, 2)}
    return {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}


def gradients(loss: Callable[[Outputs], Tensor]) -> dict[str, Tensor | None]:
    leaves = {name: value.requires_grad_() for name, value in outputs().items()}
    loss({name: leaf * 1 for name, leaf in leaves.items()}).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def in_parts(loss: Callable[[Outputs, Tensor], Tensor], kind: Any = None) -> dict[str, Tensor | None]:
    def part_of(outputs: Outputs, microbatch: int | None) -> Tensor:
        return loss(outputs, TARGETS if microbatch is None else TARGETS[SPLIT.global_rows(microbatch)])

    parts = kind or WeighedLoss(part_of)
    parts.begin(Batch(SPLIT, None, (), (), (TARGETS,), ()), range(5))

    def whole(leaves: Outputs) -> Tensor:
        rows = [SPLIT.global_rows(microbatch) for microbatch in range(5)]
        return torch.stack(
            [parts.part({name: leaf[own] for name, leaf in leaves.items()}, m) for m, own in enumerate(rows)]
        ).sum()

    return gradients(whole)


def ignoring(o: Outputs, y: Tensor) -> Tensor:
    return F.cross_entropy(o["logits"], y, ignore_index=3)


LOSSES = {
    "ignored": (ignoring, None),
    "ignored, counted": (ignoring, MeanLoss(ignoring, lambda targets: (targets != 3).sum())),
    "class weights": (lambda o, y: F.cross_entropy(o["logits"], y, weight=WEIGHTS), None),
    "several": (lambda o, y: 2 * ignoring(o, y) + (o["value"] - y).abs().sum(), None),
    "in place": (lambda o, y: o["value"].sub_(y).square_().mean(), None),
    "a hinge that some reach": (lambda o, y: F.relu(o["value"] - y + 1).mean(), None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_parts_have_the_gradients_of_the_whole(name: str) -> None:
    loss, kind = LOSSES[name]
    actual = in_parts(loss, kind)
    for output, expected in gradients(lambda leaves: loss(leaves, TARGETS)).items():
        if expected is not None:
            torch.testing.assert_close(actual[output], expected, rtol=1e-13, atol=1e-15)
        elif (found := actual[output]) is not None:
            assert not found.any()


def dice(o: Outputs, y: Tensor) -> Tensor:
    probabilities, classes = o["logits"].sigmoid(), F.one_hot(y, 4)
    return 1 - 2 * (probabilities * classes).sum() / (probabilities + classes).sum()


def contrastive(o: Outputs, y: Tensor) -> Tensor:
    return F.cross_entropy(o["logits"] @ o["logits"].T, torch.arange(len(y)))


def sure_ones(o: Outputs, y: Tensor) -> Tensor:
    sure = o["logits"].detach().amax(1) > 0.5
    return (F.cross_entropy(o["logits"], y, reduction="none") * sure).sum() / sure.sum().clamp(min=1)


def random_pairs(o: Outputs, y: Tensor) -> Tensor:
    return F.cross_entropy(o["logits"], y[torch.randperm(len(y))])


def constrained(o: Outputs, y: Tensor) -> Tensor:
    if not torch.isin(o["value"].detach(), outputs()["value"]).all():
        raise ValueError("value must be one of these\nand is not")
    return o["value"].mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (dice, "not made of losses of its samples: .* use a loss of single samples, or strategy ddp"),
        (contrastive, "not made of losses of its samples"),
        (random_pairs, "not made of losses of its samples"),
        (sure_ones, "depends on what the network returns"),
        (lambda o, y: o["logits"].detach().sum(), "does not depend on what the network returns"),
        (constrained, r"made-up outputs \(ValueError: value must be one of these\)"),
    ],
)
def test_what_microbatches_do_not_tell_is_refused(loss: Any, message: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match=message):
        in_parts(loss)


def test_an_error_of_the_loss_itself_is_left_as_it_is() -> None:
    def broken(outputs: Outputs, targets: Tensor) -> Tensor:
        raise ZeroDivisionError("of the user's own")

    with pytest.raises(ZeroDivisionError):
        in_parts(broken)


def test_of_two_methods_that_of_the_subclass_counts() -> None:
    class Other(ImageClassifier):
        def loss(self, outputs: Any, targets: Tensor) -> Tensor:
            return super().loss(outputs, targets)

    network = nn.Linear(1, 2)
    assert has_mean_loss(ImageClassifier(network, 2))
    assert not has_mean_loss(Other(network, 2)), "it may divide by something else"
