"""Runs that are compared: equal, not equal and since when, or refused; from Python and by the command."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import cnnstrategies
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.placeholders import NotHereError
from cnnstrategies.verifying import runs
from cnnstrategies.verifying.runs import TrainingError


class Data(LightningDataModule):
    """Of 24 samples; with batches of 4 an epoch on two processes has 3 steps."""

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(24, 1, 6, 6, generator=generator)
        targets = torch.randint(3, (24,), generator=generator)
        return DataLoader(TensorDataset(images, targets), 4, shuffle=True)


class Module(LightningModule):
    """With a schedule that is as long as the run, another that counts epochs, and things that are logged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(), nn.Linear(64, 3))
        self.metric = MeanMetric()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.metric(loss)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        assert self.trainer.max_epochs > 0, "schedules that are as long as these are made from it"
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [
            {"scheduler": cycle, "interval": "step"},
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ]


@pytest.mark.parametrize("strategy", ["ddp", "hybrid_pipeline"])
def test_equal_is_said_with_what_was_compared(strategy: str) -> None:
    verdict = cnnstrategies.verify(Module(), Data(), strategy, steps=5)
    assert verdict.equal, verdict
    said = str(verdict)
    assert said.startswith("equal to one device\n")
    for words in ("weights    equal: 6 compared", "schedules  equal: ", "dropout is off (layers: 1)"):
        assert words in said
    if strategy == "ddp":
        assert "5 on 40 samples, 24 of them different, loaded by 2 of 2 processes" in said
        assert "they cover only rank 0's batches: loss, metric_step (set sync_dist=True)" in said


@pytest.mark.light
def test_strategies_are_forked_and_others_are_refused() -> None:
    assert [runs.forked(name) for name in ("ddp", "ddp_fork", "ddp_find_unused_parameters_true")] == [
        "ddp_fork",
        "ddp_fork",
        "ddp_fork_find_unused_parameters_true",
    ]
    with pytest.raises(ConfigurationError, match=r"strategy=fsdp: verify needs .* can fork its processes"):
        cnnstrategies.verify(Module(), Data(), "fsdp")


@pytest.mark.light
def test_refusals_of_any_kind_are_found_in_a_ranks_output() -> None:
    for kind in (ConfigurationError, NotHereError):
        printed = f"Traceback\n{''.join(traceback.format_exception_only(kind('self.model.update: why; remedy')))}"
        found = runs.REFUSAL.search(printed)
        assert found is not None
        assert found[1].strip() == "self.model.update: why; remedy"


class Drifts(Module):
    """From its third step on each process trains on something else, and its batches are noisy."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1e-16 * torch.randn(batch[0].shape), batch[1]

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss * (1 + self.global_rank) if self.global_step > 1 else loss


def test_differences_are_told_after_which_step_and_what() -> None:
    verdict = cnnstrategies.verify(Drifts(), Data(), "ddp", steps=5)
    assert not verdict.equal
    said = str(verdict)
    assert said.startswith("NOT equal to one device\n")
    assert "first difference after step 3: weights: 6 of 6 differ, most strongly net." in said
    assert "unlike one device: random draws (as in dropout) are each process's own" in said
    assert "the training step or a batch hook draws random numbers" in said


class Single(Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch, index) + (self.net(batch[0]) @ torch.zeros(3, 1, dtype=torch.float32)).sum()


def test_what_float64_cannot_train_is_compared_in_float32() -> None:
    verdict = cnnstrategies.verify(Single(), Data(), "ddp", steps=2)
    assert verdict.equal, verdict
    assert (
        "in float32, which is less precise, because the run in float64 failed: RuntimeError: expected m1 and m2"
        in str(verdict)
    )


class Fails(Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        raise ZeroDivisionError("of the user's own")


def test_a_training_that_fails_is_no_verdict() -> None:
    with pytest.raises(TrainingError, match=r"under the strategy:\n(.*\n)*.*ZeroDivisionError: of the user's own"):
        cnnstrategies.verify(Fails(), Data(), "ddp", steps=2)


QUICK = ("verify", "--config=quickstart", "--steps=3", "--model.init_args.network.init_args.widths=[4, 8]")


def test_the_command_exits_as_it_says_and_leaves_nothing(run_cli: Any, tmp_path: Path) -> None:
    short = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.accumulate_grad_batches=2")
    still = "--model.init_args.optimizer.init_args.lr=0.0"
    code, said = run_cli(*QUICK, *short, still)
    assert code == 1, said
    assert "3 on 192 samples, " in said, "of two epochs, for there are to be three steps"
    assert "loaded by 2 of 2 processes" in said
    assert "; 0 weights have changed" in said
    for refused in (
        "--data.init_args.global_batch_size=1",
        "--data.init_args.roots=x",
        "--trainer.strategy=FSDPStrategy",
    ):
        code, said = run_cli(*QUICK, refused)
        assert code == 2, said
        assert said.startswith("cnnstrategies: error: ")
        assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())
