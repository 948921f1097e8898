"""Tests of batches that are distributed one by one: any sampler's samples occur once, or the sampler is refused."""

import random
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, Subset, SubsetRandomSampler

from cnnstrategies.data.division import describe_loader
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.loaders import items_of
from cnnstrategies.shares.samplers import ShuffledBatches
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.checks import check_dispatch
from cnnstrategies.strategies.parameter_server.loader import BatchDispatch, check_data, check_order
from cnnstrategies.strategies.share_options import by_shares

CHOSEN = range(5, 38)  # An odd number of samples, which two workers cannot share equally.


class Shuffled(Sampler[int]):
    """A sampler that shuffles with the generators of NumPy and Python."""

    def __len__(self) -> int:
        return len(CHOSEN)

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(CHOSEN).tolist()
        return iter(random.sample(order, len(order)))


def in_worker(rank: int, sampler: Sampler[int], batch: int = 4) -> BatchSampler:
    """Return the batch sampler that Lightning makes from a user's sampler."""
    return BatchSampler(DistributedSamplerWrapper(sampler, num_replicas=2, rank=rank, shuffle=False), batch, False)


@pytest.mark.light
@pytest.mark.parametrize("make", [lambda: SubsetRandomSampler(CHOSEN), Shuffled])
def test_all_workers_draw_the_same_order_of_an_epoch(make):
    """The workers' random states differ before, and drawing the order does not change them."""
    orders = []
    for rank in range(2):
        for seed in (torch.default_generator.manual_seed, np.random.seed, random.seed):
            seed(rank)
        before = torch.get_rng_state()
        orders.append([items_of(in_worker(rank, make()), epoch) for epoch in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1], "each epoch has a different order"
    for epoch in orders[0]:
        assert sorted(sample for batch in epoch for sample in batch) == list(CHOSEN)


@pytest.mark.light
def test_unbatched_samples_of_a_users_generator_are_each_drawn_once():
    """A user's generator would give each rank a different order, so that some samples would occur twice, some never."""
    sampler = SubsetRandomSampler(CHOSEN, generator=torch.Generator().manual_seed(0))
    wrapped = DistributedSamplerWrapper(sampler, num_replicas=2, rank=1, shuffle=False)
    assert sorted(items_of(wrapped, 0)) == list(CHOSEN)
    assert len(list(wrapped)) == len(CHOSEN) // 2 + 1, "the sampler is unchanged"


@pytest.mark.light
def test_all_batches_of_a_divided_sampler_are_distributed():
    """Each sample occurs once. In the last batch, two ranks have no sample and repeat the third rank's sample."""
    batches = ShuffledBatches(49, 16, 0, 3, 1, drop_last=False)
    samples = [sample for batch in items_of(batches, 0) for sample in batch.indices]
    assert sorted(samples) == list(range(49))
    assert (batches.rank, batches.num_replicas) == (1, 3)


@pytest.mark.light
def test_samples_that_a_sampler_drops_are_not_divided():
    progress = SimpleNamespace(current=SimpleNamespace(ready=0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer: Any = SimpleNamespace(training=True, accumulate_grad_batches=1, fit_loop=loop, train_dataloader=None)
    sampler = DistributedSampler(range(10), num_replicas=3, rank=0, shuffle=False, drop_last=True)  # type: ignore[arg-type]
    loader = by_shares(DataLoader(range(10), 2, sampler=sampler), trainer, ShareHistory([1, 1, 1]))  # type: ignore[arg-type]
    assert list(loader.batch_sampler) == [[0, 3], [6]]


@pytest.mark.light
def test_a_sampler_without_a_common_order_is_refused():
    def check(sampler: Sampler[int], other_value: int | None = None) -> None:
        group: Any = SimpleNamespace(
            gather=lambda value, name: {0: value, 1: value if other_value is None else other_value}
        )
        check_order(in_worker(0, sampler), group)

    check(SubsetRandomSampler(CHOSEN))
    with pytest.raises(
        ConfigurationError,
        match="SubsetRandomSampler returns the samples of an epoch in a different order in each call",
    ):
        check(SubsetRandomSampler(CHOSEN, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(
        ConfigurationError,
        match="SubsetRandomSampler returns the samples of an epoch in a different order in each worker",
    ):
        check(SubsetRandomSampler(CHOSEN), other_value=1)


@pytest.mark.light
def test_a_data_set_that_differs_from_worker_to_worker_is_refused():
    data: Any = torch.arange(12)
    first, second = (Subset(data, range(rank, 12, 2)) for rank in range(2))
    row = describe_loader(DataLoader(first))
    group: Any = SimpleNamespace(gather=lambda value, name: {0: row, 1: value})
    check_data(Subset(data, range(0, 12, 2)), group)
    with pytest.raises(ConfigurationError, match=r"each worker has a different data set, .* `data_dispatch: static`"):
        check_data(second, group)


@pytest.mark.light
def test_one_loader_is_distributed_and_several_are_refused():
    data: Any = range(8)
    strategy: Any = SimpleNamespace(rank=0, gather=lambda value, name: {0: value})
    dispatch = BatchDispatch(strategy)
    trainer: Any = SimpleNamespace(fit_loop=SimpleNamespace(epoch_progress=None))
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    dispatch.loader(loader, trainer)
    with pytest.raises(ConfigurationError, match=r"several loaders \(CombinedLoader\)"):
        dispatch.loader(loader, trainer)


COUNTED: list[tuple[dict[str, Any], str]] = [
    ({"val_check_interval": 0.5}, r"val_check_interval=0\.5: .*use 1\.0"),
    ({"max_steps": 11}, "max_steps=11: .*use max_epochs"),
    ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1: "),
    ({"max_time": timedelta(hours=1)}, r"Timer with interval='step' \(max_time\): .*interval: epoch"),
    ({"callbacks": [ModelCheckpoint(every_n_train_steps=5)]}, "ModelCheckpoint with every_n_train_steps=5: "),
    ({"callbacks": [ModelCheckpoint(train_time_interval=timedelta(1))]}, "train_time_interval=1 day.* every_n_epochs"),
]


def test_options_that_count_steps_are_refused_if_workers_steps_differ():
    def check(dispatch: str, **more: Any) -> None:
        strategy = ParameterServerStrategy(mode="async", data_dispatch=dispatch)  # type: ignore[arg-type]
        trainer = Trainer(accelerator="cpu", logger=False, **{"max_epochs": 1, "enable_progress_bar": False, **more})
        check_dispatch(trainer, strategy.options)

    check("dynamic", callbacks=[ModelCheckpoint()])
    check("dynamic", fast_dev_run=2)
    for arguments, message in COUNTED:
        check("static", **arguments)
        with pytest.raises(ConfigurationError, match=message):
            check("dynamic", **arguments)
