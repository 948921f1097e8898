"""Unequal and changing shares under the whole step: the module trains as on one device."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cnnstrategies import ConfigurationError
from cnnstrategies.placed import ForeignTensor
from cnnstrategies.placed.partial import PartialTensor
from cnnstrategies.runtime import stopwatch
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.loading import PlacedLoader
from tests.conftest import PlainCNN, quiet_trainer
from tests.runner.ranks import run_apart, run_ranks
from tests.strategies.digit_runs import assert_same_run, logged, train
from tests.strategies.whole_step_cases import CASES
from tests.strategies.whole_step_cases.base import Block
from tests.strategies.whole_step_cases.checking import check
from tests.strategies.whole_step_cases.running import differences

BATCH, SAMPLES = 12, 45  # The last batch has 9 samples.


class Statistics(nn.Module):
    """Updates the running statistics of the whole batch, and returns its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        return x


class Images(LightningModule):
    """Normalises its images, and reads them in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        layers = [Statistics(3), nn.Conv2d(3, 8, 5, 4), nn.ReLU(), Block(), Statistics(8)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
        self.history: list[float] = []
        self.runs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        self.runs.append((type(images), placement_of(self.trainer.strategy)))
        outputs = self.net((images - 0.5) * 2)
        loss = F.cross_entropy(outputs, labels)
        if batch_idx == 2:
            self.history += [images.mean().item(), images[0, 0, 0, 0].item(), outputs[3, 0].item()]
            loss = loss + 0.1 * (self.net(images.flip(0)) - outputs.flip(0)).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("correct", (self.net(images).argmax(1) == labels).double().sum(), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Delayed(Images):
    """Runs the backwards of two batches after the second one. The shares may have changed in between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.losses[0] + self.losses[1])
            optimizer.step()
            self.losses = []


def placement_of(strategy: Any) -> Any:
    return strategy.timed_stages.placement.runs if isinstance(strategy, HybridPipelineStrategy) else None


class NewShares(Callback):
    """Changes the shares in the middle of an epoch, from a batch on that no rank has drawn."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        shares = trainer.strategy.batch_shares if hasattr(trainer.strategy, "batch_shares") else None
        if shares is not None and batch_idx == 0:
            shares.change(0, 3 if isinstance(module, Delayed) else 2, (1.0, 4.0, 1.5))


def loader(count: int, size: int, replicas: int, rank: int) -> DataLoader[Any]:
    """Return the loader of one of the first stage's replicas, in order. Other ranks load nothing."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(count, 3, 32, 32, dtype=torch.float64, generator=generator)
    data = TensorDataset(images, torch.randint(5, (count,), generator=generator))
    sampler: Any = DistributedSampler(data, replicas, rank % replicas, shuffle=False)
    return DataLoader(data, size // replicas, sampler=sampler)


def fit(
    replicas: Sequence[int], kind: type[Images], options: dict[str, Any], trainer_options: dict[str, Any]
) -> dict[str, Any]:
    """Train on one device, or on the ranks of a pipeline if there are replicas."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module, strategy, devices, rank = kind(), "auto", 1, 0
    if replicas:
        devices, rank = sum(replicas), dist.get_rank()
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(devices)}
        strategy = HybridPipelineStrategy(replicas=list(replicas), cuts=["2"], timeout=30.0, **options)
    loading = replicas[0] if replicas else 1
    trainer = quiet_trainer(strategy, devices, max_epochs=1, callbacks=[NewShares()], **trainer_options)
    trainer.fit(module, loader(SAMPLES, BATCH, loading, rank), loader(14, 8, loading, rank))
    result = {name: value.detach().clone() for name, value in module.state_dict().items()}
    result |= {name: value.detach().clone() for name, value in trainer.callback_metrics.items()}
    return {"tensors": {**result, "history": torch.tensor(module.history)}, "runs": module.runs}


@pytest.mark.parametrize(
    ("replicas", "kind", "options", "trainer_options"),
    [
        ([2, 1], Images, {"shares": [3, 1, 1], "microbatches": 5}, {}),
        pytest.param([2, 1], Delayed, {"shares": [3, 1, 1], "microbatches": 5}, {}, marks=pytest.mark.cluster),
        pytest.param([1, 2], Images, {"shares": [1, 1, 3], "microbatches": 4}, {}, marks=pytest.mark.cluster),
        pytest.param(
            [2, 1],
            Images,
            {"shares": "auto", "initial_shares": [1, 2, 1], "microbatches": 6},
            {"accumulate_grad_batches": 2},
            marks=pytest.mark.cluster,
        ),
    ],
)
def test_any_shares_train_as_on_one_device(
    replicas: list[int], kind: type[Images], options: dict[str, Any], trainer_options: dict[str, Any]
) -> None:
    """Running statistics, a smaller last batch, validation, and shares that change in the middle of an epoch."""
    expected = run_apart(fit, (), kind, {}, trainer_options)
    results = run_ranks(sum(replicas), fit, replicas, kind, options, trainer_options)
    for rank, result in enumerate(results):
        assert differences(expected["tensors"], result["tensors"]) == {}, f"rank {rank}"
        in_stage = rank < replicas[0]
        large = PartialTensor if in_stage and replicas[0] > 1 else torch.Tensor if in_stage else ForeignTensor
        assert {kind for kind, _ in result["runs"]} == {large}
        assert [runs for _, runs in result["runs"]] == [runs for _, runs in results[0]["runs"]]
    runs = [tuple(runs[replicas.index(2)]) for _, runs in results[0]["runs"]]
    change = 3 if kind is Delayed else 2
    assert len(set(runs[:change])) == len(set(runs[change:])) == 1
    assert runs[0] != runs[change]


class SlowStage(Callback):
    """A callback that makes one replica of the first stage slow, on a simulated clock.

    Args:
        slow: Function of the step that says whether rank 1 is slow.
    """

    def __init__(self, slow: Callable[[int], bool]) -> None:
        self.slow, self.now, self.trainer = slow, 0.0, None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.now, self.trainer = 0.0, trainer
        stopwatch.time = SimpleNamespace(perf_counter=lambda: self.now)

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        clocks = trainer.strategy.timed_stages.times.clocks["forward"]
        if self not in clocks:
            clocks.append(self)  # After the clock that measures.

    def begin(self) -> None:
        trainer: Any = self.trainer
        slow = trainer.global_rank == 1 and self.slow(trainer.global_step)
        self.now += 0.1 if trainer.global_rank == 2 else 3.0 if slow else 1.0

    def end(self) -> None:
        pass

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = torch.tensor(self.now, dtype=torch.float64)
        dist.all_reduce(now, op=dist.ReduceOp.MAX)
        self.now = now.item()  # All ranks wait for the slowest rank.


@pytest.mark.cluster
def test_a_slow_replica_gets_fewer_microbatches_until_it_is_fast_again() -> None:
    data = {"global_batch_size": 20, "num_workers": 1}  # A loading worker loads ahead.
    common: dict[str, Any] = {"data": data, "max_epochs": 2, "limit_train_batches": 17, "limit_val_batches": 0}
    common["network"] = lambda: PlainCNN().double()

    def run(name: str, *more: Any, **options: Any) -> Any:
        slow = SlowStage(lambda step: step < 17)
        strategy = HybridPipelineStrategy(
            replicas=[2, 1], cuts=["2"], microbatches=9, shares="auto", start_method="fork", timeout=60.0
        )
        return train(name, strategy, 3, callbacks=[slow, *more], **{**common, **options})

    whole = run("whole", ModelCheckpoint("cut", "cut-{step}", every_n_train_steps=18, save_top_k=-1))
    share_rows = [row for row in logged("whole") if "shares/rank_1" in row]
    assert [share_rows[0][f"shares/rank_{rank}"] for rank in range(3)] == [7, 2, 9]
    assert share_rows[0]["shares/predicted_gain"] > 0.03
    assert any(row["shares/gain"] > 0.03 for row in logged("whole") if "shares/gain" in row)
    assert share_rows[-1]["shares/rank_1"] > 2, "the replica is fast again"
    assert_same_run(whole, train("one", **common), 1e-12)
    assert_same_run(run("gone on", ckpt_path=Path("cut/cut-step=18.ckpt").resolve()), whole, 1e-12)


def test_shares_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="initial_shares"):
        HybridPipelineStrategy(stages=2, shares=[1, 2], initial_shares=[1, 2])


# Programs that use the images in several ways.
USES = (
    "adversarial_images",
    "cutmix",
    "blurred_images",
    "moco",
    "declared_loss",
    "declared_adversarial",
    "several_crops",
)


@pytest.mark.cluster
def test_programs_may_use_tensors_whose_rows_are_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of the first stage keep the rows of all tensors, also of small ones such as the labels."""
    monkeypatch.setattr(PlacedLoader.__init__, "__defaults__", (0, False))
    check([replace(CASES[name], epochs=1) for name in USES], [2, 1])
