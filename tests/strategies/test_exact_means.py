"""Logged means over ranks with different numbers of samples equal the means of one process, in float64."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from cnnstrategies.strategies import BalancedDDPStrategy, ParameterServerStrategy
from cnnstrategies.strategies.exact_means import average_exactly, widened
from tests.conftest import quiet_trainer

SAMPLES = (7, 45, 359)  # With batches of 4, all ranks have the same number of batches, and some ranks fewer samples.
NAMES = ("epoch", "both_epoch", "constant")


def values_of(samples: int) -> Tensor:
    return torch.linspace(-1.0, 3.0, samples, dtype=torch.float64) ** 2


class Logs(LightningModule):
    """Module that logs means of each data set. Rank r evaluates every world-th sample, beginning with sample r."""

    def validation_step(self, batch: list[Tensor], index: int, dataloader_idx: int) -> None:
        mean = batch[0].mean()
        self.log("epoch", mean, sync_dist=True)
        self.log("both", mean, sync_dist=True, on_step=True, on_epoch=True)
        self.log("constant", torch.ones_like(mean), sync_dist=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return [
            DataLoader(Subset(TensorDataset(values_of(samples)), range(rank, samples, world)), 4) for samples in SAMPLES
        ]


@pytest.mark.parametrize(("make", "world"), [(DDPStrategy, 2), (BalancedDDPStrategy, 3), (ParameterServerStrategy, 3)])
def test_epoch_means_over_ranks_equal_the_means_of_all_samples(make: Callable[..., Strategy], world: int) -> None:
    strategy = make(start_method="fork")
    trainer = quiet_trainer(
        strategy=strategy, devices=world, accelerator="cpu", precision="64-true", use_distributed_sampler=False
    )
    if make is DDPStrategy:
        average_exactly(trainer)  # The command line calls this for every strategy.
    logged: dict[str, float] = {}
    for results in trainer.validate(Logs(), verbose=False):
        logged |= results
    for number, samples in enumerate(SAMPLES):
        expected = values_of(samples).mean().item()
        measured = [logged[f"{name}/dataloader_idx_{number}"] for name in NAMES]
        assert measured == pytest.approx([expected, expected, 1.0], rel=1e-12), f"{samples} samples on {world} ranks"


def test_a_spawned_rank_averages_integers_exactly() -> None:
    """Spawned ranks get the strategy as a pickle."""
    trainer = quiet_trainer(strategy="ddp_spawn", devices=2, accelerator="cpu")
    average_exactly(trainer)
    strategy = pickle.loads(pickle.dumps(trainer.strategy))
    assert strategy.reduce(torch.tensor(3)).dtype == torch.float64, "there is no process group, and thus only this rank"


def test_lightning_may_copy_the_reduction_without_the_strategy() -> None:
    trainer = quiet_trainer(strategy="ddp_fork", devices=2, accelerator="cpu")
    average_exactly(trainer)
    assert copy.deepcopy(trainer.strategy.reduce) is trainer.strategy.reduce


@pytest.mark.parametrize("operation", ["mean", "avg", "AVG", torch.distributed.ReduceOp.AVG])
def test_only_means_of_integers_are_widened(operation: Any) -> None:
    integers, floats = torch.tensor([3, 4]), torch.tensor([3.0])
    assert widened(integers, operation).dtype == torch.float64
    assert widened(floats, operation) is floats
    assert widened("text", operation) == "text"
    assert widened(integers, "sum") is integers
