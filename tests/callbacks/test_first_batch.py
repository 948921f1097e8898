"""If the first batches of the processes do not fit together, a warning or an error says so."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)
from torch.utils.data import default_collate as collate

from cnnstrategies.callbacks import FirstBatch, first_batch
from cnnstrategies.strategies import BalancedDDPStrategy, HybridPipelineStrategy, ParameterServerStrategy
from tests.conftest import quiet_trainer

STRATEGIES = {
    "parameter_server": lambda: ParameterServerStrategy(start_method="fork"),
    "hybrid_pipeline": lambda: HybridPipelineStrategy(replicas=[2], microbatches=2, start_method="fork"),
}


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(count):
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 1, 4, 4, generator=generator), torch.arange(count) % 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples(32))


class Shared(Stream):
    def __iter__(self):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return iter([samples(32)[index] for index in range(rank, 32, 2)])


class ByRank(Sampler):
    def __len__(self):
        return 32

    def __iter__(self):
        return iter(random.Random(dist.get_rank()).sample(range(32), 32))


def cut(rows):
    return collate(rows[:3])


LOADERS = {
    "a stream that is not shared": (lambda: DataLoader(Stream(), 4), "0 and 1 have loaded the same first batch"),
    "a stream that is shared": (lambda: DataLoader(Shared(), 4), ""),
    "an own order, and the same": (
        lambda: DataLoader(samples(32), 4, sampler=RandomSampler(samples(32), generator=torch.Generator())),
        "0 and 1 have loaded the same first batch",
    ),
    "a batch of another size": (
        lambda: DataLoader(samples(32), 4, collate_fn=cut),
        "has 6 samples instead of 8 (2 processes x 4)",
    ),
    "another order in each process": (
        lambda: DataLoader(samples(32), 4, sampler=ByRank()),
        "has drawn different orders in different processes",
    ),
    "one small batch": (lambda: DataLoader(samples(6), 4), ""),
}


def warned(monkeypatch, strategy, loader, module=None, steps=2, **options) -> str:
    file = Path("said").resolve()
    monkeypatch.setattr(first_batch, "rank_zero_warn", lambda text: file.write_text(text))
    trainer = quiet_trainer(strategy, 2, max_steps=steps, callbacks=[FirstBatch()], **options)
    trainer.fit(module or Small(), loader)
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("name", LOADERS)
def test_each_process_must_load_a_different_part_of_the_first_batch(name, monkeypatch):
    loader, message = LOADERS[name]
    has_own_sampler = "an own order" in name
    warning = warned(monkeypatch, "ddp_fork", loader(), use_distributed_sampler=not has_own_sampler)
    assert message in warning if message else not warning


def test_another_order_in_each_process_is_refused_where_its_samples_are_dealt(monkeypatch):
    with pytest.raises(
        Exception, match=r"different orders in different processes, .*: give the sampler a generator with the same seed"
    ):
        warned(monkeypatch, BalancedDDPStrategy(start_method="fork"), DataLoader(samples(32), 4, sampler=ByRank()))


class Unequal(Small):
    def train_dataloader(self):
        return DataLoader(samples(32 + 4 * dist.get_rank()), 4)


def test_processes_with_unequal_numbers_of_batches_are_refused(monkeypatch):
    refusal = "process 0 has 8 batches in an epoch, and process 1 has 9: .* --trainer.limit_train_batches=8"
    with pytest.raises(Exception, match=refusal):
        warned(monkeypatch, "ddp_fork", None, Unequal(), use_distributed_sampler=False)
    warned(monkeypatch, "ddp_fork", None, Unequal(), use_distributed_sampler=False, limit_train_batches=8)


class Ends(IterableDataset):
    def __iter__(self):
        return iter(samples(8 + 4 * (dist.is_initialized() and dist.get_rank())))


@pytest.mark.parametrize("limit", [None, 5])
def test_streams_of_unequal_length_are_refused_at_an_end(limit, monkeypatch):
    with pytest.raises(Exception, match="process 0 has 2 batches in an epoch, and process 1 has 3 or more: "):
        warned(monkeypatch, "ddp_fork", DataLoader(Ends(), 4), steps=9, limit_train_batches=limit)
    warned(monkeypatch, "ddp_fork", DataLoader(Ends(), 4), limit_train_batches=2, steps=5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_warns_about_loaders_that_cannot_be_right(strategy, monkeypatch):
    """A batch sampler keeps its batches, and a sampler that gives the same samples to all processes is noticed."""
    batches = BatchSampler(RandomSampler(range(32)), 4, drop_last=False)
    assert not warned(monkeypatch, STRATEGIES[strategy](), DataLoader(samples(32), batch_sampler=batches))
    sampler = DistributedSampler(samples(32), num_replicas=2, rank=0)  # Rank 1 gets the samples of rank 0.
    warning = warned(monkeypatch, STRATEGIES[strategy](), DataLoader(samples(32), 4, sampler=sampler, collate_fn=cut))
    assert ("0 and 1 have loaded" if strategy == "parameter_server" else "has 6 samples instead of 8") in warning
