"""Losses that are sums, or means over something other than samples: weights equal one device's weights, in float64."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from cnnstrategies.shares.rebalancing import Balance
from cnnstrategies.strategies import (
    BalancedDDPStrategy,
    CompressedDDPStrategy,
    HybridPipelineStrategy,
    ParameterServerStrategy,
    sample_weights,
)
from cnnstrategies.strategies.loss_comparison import compare_with_parts
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart

SAMPLES, GLOBAL_BATCH, CLASSES = 22, 6, 4
WEIGHTS = torch.tensor([1.0, 2.0, 5.0, 0.5], dtype=torch.float64)


def mask_of(targets: Tensor) -> Tensor:
    """Return a mask that selects very different numbers of pixels for each sample, and at least one pixel."""
    mask = targets != 1
    mask[:, 0, 0] = True
    return mask


def one_hot(targets: Tensor) -> Tensor:
    return F.one_hot(targets, CLASSES).movedim(-1, 1).double()


def flat_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(outputs.log_softmax(1).movedim(1, -1).reshape(-1, CLASSES), targets.flatten(), WEIGHTS)


def quotient(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = mask_of(targets)
    return ((outputs - one_hot(targets)).square().sum(1) * mask).sum() / mask.sum()


def not_nan(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.where(mask_of(targets)[:, None], (outputs - 1).square(), torch.nan).nanmean()


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = mask_of(targets)
    return F.binary_cross_entropy_with_logits(outputs.movedim(1, -1)[mask], one_hot(targets).movedim(1, -1)[mask])


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)(outputs, targets.masked_fill(targets == 2, -100))


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "ignored": lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=3),
    "weighted": weighted,
    "flat": flat_nll,
    "quotient": quotient,
    "binary": binary,
    "selected": lambda outputs, targets: 3 * (outputs - 1).square().sum(1)[mask_of(targets)].mean(),
    "not nan": not_nan,
    "all": lambda outputs, targets: F.mse_loss(outputs, one_hot(targets)),
    "images": lambda outputs, targets: torch.stack([output.square().mean() for output in outputs]).mean(),
}
SUM = {"sum": lambda outputs, targets: 0.01 * F.cross_entropy(outputs, targets, ignore_index=3, reduction="sum")}
ROOT = {"root": lambda outputs, targets: outputs.square().mean().sqrt()}


def meeting(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a mean, after a barrier."""
    dist.barrier()
    return outputs.square().mean()


MEETING = {"meeting": meeting}


class Net(nn.Module):
    """A small network with one head for each loss. Heads are trained by their own loss alone."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Conv2d(3, CLASSES, 3, padding=1) for name in names})

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {name: head(images) for name, head in self.heads.items()}


class Segmenter(LightningModule):
    """A module whose loss is the sum of some losses."""

    def __init__(self, losses: dict[str, Loss] = LOSSES) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.losses = losses
        self.net = Net(list(losses)).double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        outputs = self.net(batch[0])
        return sum((loss(outputs[name], batch[1]) for name, loss in self.losses.items()), torch.zeros(()))

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(SAMPLES, 3, 4, 4, generator=generator, dtype=torch.float64)
        # Samples have very different numbers of pixels of each class. Some have no valid pixel.
        bounds = torch.rand(SAMPLES, 1, 1, generator=generator) * CLASSES
        targets = (torch.rand(SAMPLES, 4, 4, generator=generator) * bounds + bounds * 0.7).long().clamp(max=CLASSES - 1)
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        data = TensorDataset(images, targets)
        sampler = DistributedSampler(data, ranks["num_replicas"], ranks["rank"], seed=7)
        return DataLoader(data, GLOBAL_BATCH // ranks["num_replicas"], sampler=sampler)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def trained(module: Callable[[], LightningModule], strategy: Any = "auto", world: int = 1, **options: Any) -> Any:
    """Train in a process of its own, and return the weights."""

    def run() -> dict[str, Tensor]:
        created = module()
        quiet_trainer(strategy, world, max_epochs=1, **options).fit(created)
        return dict(created.net.state_dict())

    return run_apart(run)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        error = float((actual[name] - value).norm() / value.norm())
        assert error <= 1e-12, f"{name}: relative error {error:.1e}"


balanced = partial(BalancedDDPStrategy, start_method="fork")
served = partial(ParameterServerStrategy, start_method="fork")
# PowerSGD compresses no gradients in the first steps.
uncompressed = partial(CompressedDDPStrategy, "powersgd", start_method="fork")


@pytest.mark.parametrize(
    ("strategy", "accumulated"),
    [(partial(balanced, shares=[1, 2]), 3), (served, 1), (uncompressed, 1)],
    ids=["ddp_balanced", "servers", "ddp_powersgd"],
)
def test_each_mean_of_a_loss_has_its_own_divisor(strategy, accumulated):
    """Gradients of ``ignore_index``, class weights and masks, in one loss, and with gradient accumulation."""
    options = {"accumulate_grad_batches": accumulated}
    assert_equal(trained(Segmenter, strategy(), 2, **options), trained(Segmenter, **options))


@pytest.mark.parametrize(
    "strategy",
    [partial(balanced, shares=[1, 3]), partial(served, shares=[1, 3]), served, uncompressed],
    ids=["ddp_balanced", "servers", "servers with equal shares", "ddp_powersgd"],
)
def test_a_sum_is_the_sum_over_the_global_batch(strategy):
    module, options = partial(Segmenter, SUM), {"accumulate_grad_batches": 2}
    assert_equal(trained(module, strategy(), 2, **options), trained(module, **options))


def test_a_pipelines_replicas_with_unequal_shares_have_the_weights_of_the_whole_batch():
    """A pipeline finds each microbatch's weight itself, for sums and for each output's own mean."""
    module = partial(Segmenter, LOSSES | SUM)
    pipeline = HybridPipelineStrategy(replicas=[2], shares=[1, 2], microbatches=3, start_method="fork")
    assert_equal(trained(module, pipeline, 2), trained(module))


def test_unequal_shares_are_refused_for_a_loss_that_is_neither_a_mean_nor_a_sum():
    why = r"the loss of Segmenter.training_step is neither a mean nor a sum over the samples of a batch"
    with pytest.raises(AssertionError, match=rf"{why}, so unequal shares \(1, 2\) .*: set shares: equal"):
        trained(partial(Segmenter, ROOT), balanced(shares=[1, 2]), 2)


class Stays(Callback):
    """A callback that notes whether the measured shares can change."""

    def on_train_end(self, trainer, pl_module):
        balances = [callback for callback in trainer.callbacks if isinstance(callback, Balance)]
        print("can deal:", [balance.can_deal() for balance in balances])


def test_measured_shares_stay_equal_for_such_a_loss(capfd, monkeypatch):
    """If the comparison is not possible, shares may change, and a warning gives the reason."""
    monkeypatch.setattr(sample_weights, "rank_zero_info", print)
    monkeypatch.setattr(sample_weights, "rank_zero_warn", print)
    for losses in (ROOT, MEETING):
        trained(partial(Segmenter, losses), balanced(shares="auto"), 2, callbacks=[Stays()])
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "Shares stay equal: the loss of Segmenter.training_step is neither" in line]
    warning = (
        "the loss of Segmenter.training_step is taken for a mean over samples, because a batch could not be compared"
    )
    assert [
        line
        for line in lines
        if warning in line and "the step calls a collective of torch.distributed (barrier); if" in line
    ]
    assert [line for line in lines if line.startswith("can deal")] == ["can deal: [False]"] * 2 + [
        "can deal: [True]"
    ] * 2


# The comparison of a batch with its parts

KIND_OF: dict[str, tuple[str, Loss]] = {
    "cross_entropy": ("terms", F.cross_entropy),
    "a mean": ("mean", lambda outputs, targets: outputs.square().mean()),
    "a mean of means": (
        "mean",
        lambda outputs, targets: torch.stack(
            [F.cross_entropy(output[None], target[None]) for output, target in zip(outputs, targets, strict=True)]
        ).mean(),
    ),
    "a sum": ("sum", lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum")),
    "a sum, scaled": ("sum", lambda outputs, targets: outputs.square().sum() / torch.tensor(50.0)),
    "a root": ("neither", lambda outputs, targets: outputs.square().mean().sqrt()),
    "a sum and a mean": ("neither", lambda outputs, targets: outputs.sum() + outputs.square().mean()),
    "a mean and a product": (
        "neither",
        lambda outputs, targets: F.cross_entropy(outputs, targets) * outputs.square().mean(),
    ),
    "overlap": (
        "neither",
        lambda outputs, targets: 1 - (outputs.sigmoid() * (targets == 1)[:, None]).sum() / outputs.sigmoid().sum(),
    ),
    "random": ("unknown", lambda outputs, targets: (outputs * torch.rand(())).square().mean()),
    "random numbers of Python": ("unknown", lambda outputs, targets: (outputs * random.random()).square().mean()),
    "random numbers of NumPy": ("unknown", lambda outputs, targets: (outputs * np.random.random()).square().mean()),
    "nothing": ("unknown", lambda outputs, targets: (outputs * 0).sum()),
    "an error": ("unknown", lambda outputs, targets: F.cross_entropy(outputs[:1], targets)),
}  # fmt: skip


class Layers(LightningModule):
    """A module with layers whose outputs for a sample depend on the batch or on random numbers, and with hooks."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.loss_of = loss
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, CLASSES, 3)
        ).to(dtype)
        self.seen: list[int] = []
        self.net[0].register_forward_hook(lambda layer, inputs, outputs: self.seen.append(len(outputs)))
        self.gradients: list[Tensor] = []
        self.net[0].weight.register_hook(self.gradients.append)
        self.steps = 0
        self.trainer = SimpleNamespace(loggers=[])  # type: ignore[assignment]

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        self.steps += 1
        assert self.training
        batch[0].mul_(2)
        self.net[4].bias.data.mul_(1.5)
        loss = self.loss_of(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.gradients.append(loss)
        self.trainer.noted = True
        return {"loss": loss}


def batch_of(samples: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, 6, 6, generator=generator, dtype=dtype)
    return [images, torch.randint(CLASSES, (samples, 2, 2), generator=generator)]


def everything(module: Layers, batch: list[Tensor]) -> Any:
    """Return all that a comparison must not change."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = [parameter.grad for parameter in module.parameters()]
    random_states = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    rest = (
        module.seen,
        module.gradients,
        module.steps,
        vars(module.trainer),
        [child.training for child in module.modules()],
    )
    return repr((state, gradients, random_states, rest, batch))


@pytest.mark.light
@pytest.mark.parametrize("samples", [7, 2, 1])
@pytest.mark.parametrize("name", KIND_OF)
def test_a_loss_is_told_from_its_gradients_and_nothing_is_disturbed(name, samples):
    kind, loss = KIND_OF[name]
    module, batch = Layers(loss), batch_of(samples)
    torch.set_printoptions(threshold=10000, precision=17)  # For `everything`.
    before = everything(module, batch)
    comparison = compare_with_parts(module, batch, 0)
    if samples > 1 or kind not in ("neither", "unknown"):
        assert comparison.kind == kind, comparison
    assert everything(module, batch) == before
    assert bool(comparison.reason) == (comparison.kind == "unknown")


@pytest.mark.light
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["cross_entropy", "a mean", "a sum", "a root"])
def test_a_loss_is_told_in_every_dtype(name, dtype):
    kind, loss = KIND_OF[name]
    assert compare_with_parts(Layers(loss, dtype), batch_of(9, dtype), 0).kind == kind
