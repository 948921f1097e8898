"""Tests of `verify` from Python and as a command: equal runs, unequal runs with the first difference, refusals."""

import json
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset
from torchmetrics import MeanMetric

import cnnstrategies
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.verifying import runs
from cnnstrategies.verifying.forked_runs import REFUSAL, TrainingError
from cnnstrategies.verifying.loaded_batches import LoadedBatches


class Data(LightningDataModule):
    """Data of 24 samples. With batches of 4, an epoch on two processes has 3 steps."""

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(24, 1, 6, 6, generator=generator)
        targets = torch.randint(3, (24,), generator=generator)
        return DataLoader(TensorDataset(images, targets), 4, shuffle=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """Return a loader with an incomplete batch on each of two processes, and one that is shorter."""
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(10, 1, 6, 6, generator=generator), torch.arange(10) % 3)
        return [DataLoader(data, 4), DataLoader(Subset(data, range(4)), 2)]


class Module(LightningModule):
    """A module with a schedule as long as the run, a second schedule that counts epochs, and logged values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(), nn.Linear(64, 3))
        self.metric = MeanMetric()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = F.cross_entropy(F.dropout(self.net(batch[0]), 0.3, self.training), batch[1])
        self.log("loss", loss)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.metric(loss)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int, dataloader_idx: int) -> None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        assert self.trainer.max_epochs > 0, "schedules as long as the run are made from max_epochs"
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [
            {"scheduler": cycle, "interval": "step"},
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
                "monitor": "val_loss/dataloader_idx_0",
            },
        ]


@pytest.mark.parametrize(("strategy", "steps"), [("ddp", 5), ("hybrid_pipeline", 7)])
def test_a_verdict_of_equality_lists_what_was_compared(strategy: str, steps: int) -> None:
    verdict = cnnstrategies.verify(Module(), Data(), strategy, steps=steps)  # One epoch ends within the steps.
    assert verdict.equal, verdict
    text = str(verdict)
    assert text.startswith("equal to one device\n")
    for words in (
        "weights    equal: 6 compared",
        "schedules  equal: ",
        "dropout is off (layers: 1)",
        "F.dropout, are off",
    ):
        assert words in text
    assert "; validations: 1 on " in text
    if strategy == "ddp":
        assert "validations: 1 on 6 batches" in text, "two processes have two batches and one"
        assert "5 on 40 samples, 24 of them different, loaded by 2 of 2 processes" in text
        assert "they cover only rank 0's batches: loss, metric_step (set sync_dist=True)" in text


@pytest.mark.parametrize("devices", [2, 4])
def test_divided_images_are_compared_with_the_statistics_and_draws_of_a_step(devices: int) -> None:
    verdict = cnnstrategies.verify(Module(), Data(), "spatial", devices=devices, steps=3)
    assert verdict.equal, verdict
    assert ("dropout is off" in str(verdict)) == (devices == 4), "two groups draw their own numbers"
    assert f"3 on {12 * devices // 2} samples" in str(verdict)


class Divided(Data):
    """Data whose loader divides the samples itself, among a number of processes."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.processes = processes

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        dataset = super().train_dataloader().dataset
        sampler = DistributedSampler(dataset, self.processes, self.trainer.global_rank)
        return DataLoader(dataset, 4, sampler=sampler)


@pytest.mark.parametrize("strategy", ["ddp", "hybrid_pipeline"])
def test_runs_on_cpus_need_no_cuda(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are forked after a package has asked CUDA for the GPUs cannot use CUDA, which torch then says."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert cnnstrategies.verify(Module(), Data(), strategy, steps=2).equal


def test_a_run_that_leaves_out_samples_of_an_epoch_is_not_equal() -> None:
    verdict = cnnstrategies.verify(Module(), Divided(4), "ddp", steps=3)
    assert not verdict.equal
    assert "an epoch leaves out 12 of 24 samples, because the loader gives them to other processes" in str(verdict)
    verdict = cnnstrategies.verify(Module(), Divided(2), "hybrid_pipeline", steps=3)
    assert verdict.equal, verdict
    assert "3 on 24 samples, 24 of them different, loaded by 1 of 2 processes" in str(verdict)


class Repeated(Data):
    """Data whose processes load all samples: in the same order, or each in its own order."""

    def __init__(self, seeds: tuple[int, int]) -> None:
        super().__init__()
        self.seeds = seeds

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        generator = torch.Generator().manual_seed(self.seeds[self.trainer.global_rank])
        return DataLoader(super().train_dataloader().dataset, 4, shuffle=True, generator=generator)


@pytest.mark.parametrize(
    ("seeds", "words"),
    [((1, 1), "processes 0 and 1 load the same batches"), ((1, 2), "an epoch loads 48 samples, and 24 in one process")],
)
def test_processes_that_load_the_same_samples_are_not_equal(seeds: tuple[int, int], words: str) -> None:
    verdict = cnnstrategies.verify(Module(), Repeated(seeds), "ddp", steps=3, use_distributed_sampler=False)
    assert not verdict.equal
    assert words in str(verdict)


class NotValidated(Module):
    """A module without schedules, which would need validations."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_one_device_does_not_validate_if_the_strategy_does_not() -> None:
    verdict = cnnstrategies.verify(NotValidated(), Data(), "ddp", steps=4, limit_val_batches=0)
    assert verdict.equal, verdict
    assert "validations" not in str(verdict)


class OwnEpoch(DistributedSampler[Any]):
    """Sampler that divides the order of another epoch on each rank."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch + self.rank)


class OwnOrders(Divided):
    """Data whose processes divide different orders from the first batch on."""

    def train_dataloader(self) -> DataLoader[Any]:
        loader = super().train_dataloader()
        sampler = OwnEpoch(loader.dataset, self.processes, loader.sampler.rank)  # type: ignore[attr-defined]
        return DataLoader(loader.dataset, 4, sampler=sampler)


def test_processes_that_divide_different_orders_leave_out_samples() -> None:
    verdict = cnnstrategies.verify(Module(), OwnOrders(2), "ddp", steps=3)
    assert not verdict.equal
    assert re.search(r"an epoch leaves out \d+ of 24 samples, .* \(set_epoch and seed must be equal\)", str(verdict))


class Stream(IterableDataset[Any]):
    """Stream of every k-th sample of a data set, beginning with the sample of this rank."""

    def __init__(self, dataset: Any, rank: int, step: int) -> None:
        self.samples = Subset(dataset, range(rank, len(dataset), step))

    def __iter__(self) -> Iterator[Any]:
        return iter([self.samples[index] for index in range(len(self.samples))])


class Streamed(Data):
    """Data that is a stream. In a run of several processes, the stream skips the samples of two more processes."""

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(Stream(super().train_dataloader().dataset, rank, world if world == 1 else world + 2), 4)


def test_a_run_that_leaves_out_a_part_of_a_stream_is_not_equal() -> None:
    verdict = cnnstrategies.verify(Module(), Streamed(), "ddp", steps=3)
    assert not verdict.equal
    assert "an epoch leaves out 12 of 24 samples" in str(verdict)


@pytest.mark.light
def test_samples_that_no_rank_loads_are_counted(tmp_path: Path) -> None:
    def load(rank: int, count: int | None, drawn: Any = None) -> None:
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        (tmp_path / str(rank) / "loaded.json").write_text(json.dumps({"count": count, "drawn": drawn}))
        for batch in range(3):
            torch.save(torch.full((4, 2), batch), tmp_path / str(rank) / f"{batch}.pt")

    for rank in range(2):
        load(rank, 12)
    assert LoadedBatches(tmp_path, [2, 4]).left_out(48) == (24, 48)
    assert LoadedBatches(tmp_path, [2, 4]).left_out(24) == (0, 24)
    assert LoadedBatches(tmp_path, [2, 4]).left_out(None) is None, "the number in one process is not known"
    # Lightning's own sampler over a part of the data has drawn all samples of the part.
    load(0, 12, {"indices": list(range(12)), "size": 12, "allowed": 0})
    assert LoadedBatches(tmp_path, [2, 4]).left_out(48) == (24, 48)
    # A stream's samples are those of the first epoch's two batches.
    for rank in range(2):
        load(rank, None)
    assert LoadedBatches(tmp_path, [2, 4]).left_out(20) == (4, 20)
    assert LoadedBatches(tmp_path, []).left_out(20) is None, "no epoch has ended"


@pytest.mark.light
def test_strategies_are_forked_and_others_are_refused() -> None:
    assert [runs.forked(name) for name in ("ddp", "ddp_fork", "ddp_find_unused_parameters_true")] == [
        "ddp_fork",
        "ddp_fork",
        "ddp_fork_find_unused_parameters_true",
    ]
    with pytest.raises(ConfigurationError, match=r"strategy=fsdp: verify needs .* can fork its processes"):
        cnnstrategies.verify(Module(), Data(), "fsdp")
    assert [runs.accepts_start_method(kind) for kind in (DDPStrategy, FSDPStrategy)] == [True, False]


@pytest.mark.light
def test_refusals_are_recognised_in_a_ranks_output() -> None:
    error = ConfigurationError("self.model.update: why; remedy")
    match = REFUSAL.search(f"Traceback\n{''.join(traceback.format_exception_only(error))}")
    assert match is not None
    assert match[1].strip() == "self.model.update: why; remedy"


class Drifts(Module):
    """A module with noisy batches, whose processes weight their losses differently from the third step on."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 1e-16 * torch.randn(batch[0].shape), batch[1]

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss * (1 + self.global_rank) if self.global_step > 1 else loss


def test_a_verdict_of_inequality_names_the_first_step_and_the_values() -> None:
    verdict = cnnstrategies.verify(Drifts(), Data(), "ddp", steps=5)
    assert not verdict.equal
    text = str(verdict)
    assert text.startswith("NOT equal to one device\n")
    assert "first: parameter gradient of net.4.bias, step 3, rank 0: differs by " in text
    assert "of its size, where rounding explains " in text
    assert "likely cause: the loss: the mean of the processes' losses is not the loss of all samples" in text
    assert "unlike one device: random draws (as in dropout) are each process's own" in text
    assert "the training step or a batch hook draws random numbers" in text


class Single(Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch, index) + (self.net(batch[0]) @ torch.zeros(3, 1, dtype=torch.float32)).sum()


def test_a_module_that_float64_cannot_train_is_compared_in_float32() -> None:
    verdict = cnnstrategies.verify(Single(), Data(), "ddp", steps=2)
    assert verdict.equal, verdict
    assert (
        "in float32, which is less precise, because the run in float64 failed: RuntimeError: expected m1 and m2"
        in str(verdict)
    )


class Fails(Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        raise ZeroDivisionError("of the user's own")


def test_a_failing_training_raises_an_error_instead_of_a_verdict() -> None:
    with pytest.raises(TrainingError, match=r"under the strategy:\n(.*\n)*.*ZeroDivisionError: of the user's own"):
        cnnstrategies.verify(Fails(), Data(), "ddp", steps=2)


QUICK = ("verify", "--config=quickstart", "--steps=3", "--model.init_args.network.init_args.widths=[4, 8]")


def test_the_commands_exit_status_matches_its_verdict_and_no_file_is_left(run_cli: Any, tmp_path: Path) -> None:
    short = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.accumulate_grad_batches=2")
    still = "--model.init_args.optimizer.init_args.lr=0.0"
    code, output = run_cli(*QUICK, *short, still)
    assert code == 1, output
    assert "3 on 192 samples, " in output, "an epoch has two steps, so three steps need two epochs"
    assert "loaded by 2 of 2 processes" in output
    assert "; 0 weights have changed" in output
    for argument in (
        "--data.init_args.global_batch_size=1",
        "--data.init_args.roots=x",
        "--trainer.strategy=FSDPStrategy",
    ):
        code, output = run_cli(*QUICK, argument)
        assert code == 2, output
        assert output.startswith("cnnstrategies: error: ")
        assert output.count("\n") == 1
    assert not list(tmp_path.iterdir())
