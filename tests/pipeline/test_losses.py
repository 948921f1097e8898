"""Tests of losses that microbatches compute in parts: gradients equal the whole loss's, or the loss is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_apart
from simulated_cuda import simulate
from simulated_gpu import DEVICE
from torch import Tensor, nn

from cnnstrategies import ImageClassifier
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch
from cnnstrategies.pipeline.losses import MeanLoss, WeighedLoss
from cnnstrategies.pipeline.microbatches import CPU, Split
from cnnstrategies.pipeline.probes import Rows
from cnnstrategies.strategies.hybrid_pipeline.steps import has_mean_loss

SPLIT = Split((7, 4), (0, 1, 0, 1, 0))
GENERATOR = torch.Generator().manual_seed(0)
TARGETS = torch.randint(4, (11,), generator=GENERATOR)
TARGETS[SPLIT.global_rows(1)] = 3  # All samples of this microbatch are ignored.
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


def in_parts(
    loss: Callable[[Outputs, Tensor], Tensor], kind: Any = None, thorough: bool = True
) -> dict[str, Tensor | None]:
    def part_of(outputs: Outputs, rows: Rows | None) -> Tensor:
        return loss(outputs, TARGETS if rows is None else TARGETS[rows[CPU]])

    parts = kind or WeighedLoss(part_of)
    parts.thorough = thorough
    parts.begin(Batch(SPLIT, None, (), (), (TARGETS,), ()))

    def whole(leaves: Outputs) -> Tensor:
        rows = [SPLIT.global_rows(microbatch) for microbatch in range(5)]
        return torch.stack(
            [
                parts.part({name: leaf[positions] for name, leaf in leaves.items()}, m)
                for m, positions in enumerate(rows)
            ]
        ).sum()

    return gradients(whole)


def highest() -> Tensor:
    return outputs()["value"][SPLIT.global_rows(0)].max()


def is_real(o: Outputs) -> Tensor:
    return torch.isin(o["value"].detach(), outputs()["value"])


def ignoring(o: Outputs, y: Tensor) -> Tensor:
    return F.cross_entropy(o["logits"], y, ignore_index=3)


def nothing(outputs: Outputs, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], torch.full_like(targets, 3), ignore_index=3)


LOSSES = {
    "ignored": (ignoring, None),
    "ignored, counted": (ignoring, MeanLoss(ignoring, lambda targets: (targets != 3).sum())),
    "all ignored, counted": (nothing, MeanLoss(nothing, lambda targets: (targets < 0).sum())),
    "all ignored, counted as a number": (nothing, MeanLoss(nothing, lambda targets: 0)),
    "class weights": (lambda o, y: F.cross_entropy(o["logits"], y, weight=WEIGHTS), None),
    "several": (lambda o, y: 2 * ignoring(o, y) + (o["value"] - y).abs().sum(), None),
    "in place": (lambda o, y: o["value"].sub_(y).square_().mean(), None),
    "a hinge that some reach": (lambda o, y: F.relu(o["value"] - y + 1).mean(), None),
    "a hinge that the first microbatch does not reach": (lambda o, y: F.relu(o["value"] - highest()).mean(), None),
    "infinite for outputs that are made up": (lambda o, y: (o["value"] / (is_real(o) | (y == 3))).mean(), None),
}


@pytest.mark.parametrize("thorough", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_loss_have_the_gradients_of_the_whole_loss(name: str, thorough: bool) -> None:
    loss, kind = LOSSES[name]
    actual = in_parts(loss, kind, thorough)
    for output, expected in gradients(lambda leaves: loss(leaves, TARGETS)).items():
        if expected is not None:
            torch.testing.assert_close(actual[output], expected, rtol=1e-13, atol=1e-15)
        elif (gradient := actual[output]) is not None:
            assert not gradient.any()


def test_a_loss_runs_once_for_each_microbatch_and_once_for_the_batch() -> None:
    rows: list[int] = []

    def counted(outputs: Outputs, targets: Tensor) -> Tensor:
        rows.append(len(targets))
        return ignoring(outputs, targets)

    in_parts(counted, thorough=False)
    first, *others = SPLIT.sizes
    assert rows == [11, first, *(size + 2 for size in others)]


def dice(o: Outputs, y: Tensor) -> Tensor:
    probabilities, classes = o["logits"].sigmoid(), F.one_hot(y, 4)
    return 1 - 2 * (probabilities * classes).sum() / (probabilities + classes).sum()


def contrastive(o: Outputs, y: Tensor) -> Tensor:
    return F.cross_entropy(o["logits"] @ o["logits"].T, torch.arange(len(y)))


def sure_ones(o: Outputs, y: Tensor) -> Tensor:
    sure = o["logits"].detach().amax(1) > 0.5
    return (F.cross_entropy(o["logits"], y, reduction="none") * sure).sum() / sure.sum().clamp(min=1)


def normalised(o: Outputs, y: Tensor) -> Tensor:
    return F.mse_loss((o["value"] - o["value"].mean()) / o["value"].std(), y.double())


def random_pairs(o: Outputs, y: Tensor) -> Tensor:
    return F.cross_entropy(o["logits"], y[torch.randperm(len(y))])


def constrained(o: Outputs, y: Tensor) -> Tensor:
    if not is_real(o).all():
        raise ValueError("value must be one of these\nand is not")
    return o["value"].mean()


@pytest.mark.parametrize("loss", [dice, contrastive, random_pairs, normalised])
def test_a_loss_that_compares_samples_is_refused_in_any_step(loss: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match="not made of losses of its samples"):
        in_parts(loss, thorough=False)


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
def test_a_loss_that_microbatches_cannot_compute_is_refused(loss: Any, message: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match=message):
        in_parts(loss)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**16)])
def test_parts_of_a_loss_have_the_gradients_of_the_whole_loss_under_autocast(dtype: torch.dtype, scale: float) -> None:
    prototypes = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))

    def loss(o: Outputs, y: Tensor) -> Tensor:
        return F.cross_entropy(o["logits"] @ prototypes, y, weight=WEIGHTS.float())

    def part_of(outputs: Outputs, rows: Rows | None) -> Tensor:
        return loss(outputs, TARGETS if rows is None else TARGETS[rows[CPU]])

    leaves = [outputs()["logits"].to(dtype).requires_grad_() for _ in range(2)]
    parts = WeighedLoss(part_of)
    parts.begin(Batch(SPLIT, None, (), (), (TARGETS,), ()))
    with torch.autocast("cpu", dtype):
        whole = loss({"logits": leaves[0]}, TARGETS)
        each = [parts.part({"logits": leaves[1][SPLIT.global_rows(m)]}, m) for m in range(5)]
    torch.testing.assert_close(torch.stack(each).nansum(), whole.detach(), rtol=0.01, atol=0)
    for part in (whole, *each):
        (part * scale).backward()
    expected, actual = (leaf.grad for leaf in leaves)
    assert expected is not None
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_an_error_of_the_loss_is_raised_unchanged() -> None:
    def broken(outputs: Outputs, targets: Tensor) -> Tensor:
        raise ZeroDivisionError("of the user's own")

    with pytest.raises(ZeroDivisionError):
        in_parts(broken)


def test_an_overridden_loss_counts_as_the_users_loss() -> None:
    class Other(ImageClassifier):
        def loss(self, outputs: Any, targets: Tensor) -> Tensor:
            return super().loss(outputs, targets)

    network = nn.Linear(1, 2)
    assert has_mean_loss(ImageClassifier(network, 2))
    assert not has_mean_loss(Other(network, 2)), "the overridden loss may divide by a different number"


def on_a_device(at_once: bool) -> tuple[list[int], float, str]:
    """Train with a loss that compares samples, except in the first microbatch, until the loss is refused.

    Returns:
        The number of times that the host waits in each part, the sum of the gradient at the refusal, and the error.
    """
    with simulate():
        targets, compares = TARGETS.to(DEVICE.name), torch.ones(11, 1)
        compares[SPLIT.global_rows(0)] = 0
        compares = compares.to(DEVICE.name)

        def part_of(outputs: Outputs, rows: Rows | None) -> Tensor:
            samples = torch.arange(11, device=DEVICE.name) if rows is None else rows[DEVICE.name]
            probabilities, classes = outputs["logits"].sigmoid() * compares[samples], F.one_hot(targets[samples], 4)
            return 1 - 2 * (probabilities * classes).sum() / (1 + probabilities.sum() + classes.sum())

        parts = WeighedLoss(part_of)
        parts.thorough, parts.at_once = False, at_once
        leaf = outputs()["logits"].to(DEVICE.name).requires_grad_()
        waits: list[int] = []
        for _ in range(2):
            parts.begin(Batch(SPLIT, None, (), (), (targets,), ()))
            for m in range(5):
                rows = SPLIT.global_rows(m, device=DEVICE.name)
                with DEVICE.waits_inside() as waits_of_part:
                    try:
                        part = parts.part({"logits": leaf[rows]}, m)
                    except ConfigurationError as error:
                        return [*waits, sum(waits_of_part.values())], float(leaf.grad.abs().sum()), str(error)
                part.backward()
                waits.append(sum(waits_of_part.values()))
    return waits, 0.0, ""


@pytest.mark.parametrize(("at_once", "waits"), [(True, [2, 1]), (False, [1, 0, 0, 0, 0, 1])])
def test_a_loss_refused_in_a_later_microbatch_waits_rarely_and_trains_nothing(at_once: bool, waits: list[int]) -> None:
    waited, trained, error = run_apart(on_a_device, at_once)
    assert waited == waits
    assert trained == 0
    assert "not made of losses of its samples" in error
