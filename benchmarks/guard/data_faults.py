"""Faults of loaders and samplers: samples that are repeated or left out, and orders that do not change."""

from collections.abc import Iterator
from typing import Any

import torch
from programs import BATCH, Data, Program, fault, own_rank, program
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Subset

TRAINCHECK, USER = "TrainCheck", "user"


class Divided(Data):
    """Data whose samples are divided among ranks by a DistributedSampler.

    Args:
        ranks: Number of ranks among which samples are divided.
        rank: Rank whose samples are loaded; None for this process's rank.
        sampler: Class of the sampler.
    """

    def __init__(self, ranks: int = 2, rank: int | None = None, sampler: type = DistributedSampler) -> None:
        super().__init__()
        self.ranks, self.rank, self.sampler = ranks, rank, sampler

    def train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        ranks = min(self.ranks, self.trainer.world_size) if self.ranks == 2 else self.ranks
        rank = own_rank() if self.rank is None else self.rank
        return DataLoader(self.dataset, BATCH, sampler=self.sampler(self.dataset, ranks, rank))


def divided() -> Program:
    """Return a program that divides its samples itself."""
    made = program()
    made.data = Divided()
    return made


@fault(TRAINCHECK, divided, step=1)
def same_shard_on_all_ranks(program: Program) -> None:
    """All ranks load the first rank's samples."""
    program.data = Divided(rank=0)


class Unchanging(DistributedSampler[Any]):
    """Sampler whose order is the same in each epoch, as if nobody called `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        """Ignore the epoch."""


@fault(USER, divided, step=7)
def sampler_without_set_epoch(program: Program) -> None:
    """The order of samples is the same in each epoch."""
    program.data = Divided(sampler=Unchanging)


class OwnOrder(Data):
    """Data that each rank shuffles with a seed of its own, without dividing it."""

    def train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        generator = torch.Generator().manual_seed(own_rank())
        return DataLoader(self.dataset, BATCH, shuffle=True, generator=generator)


@fault(USER, step=1)
def other_seed_of_a_sampler(program: Program) -> None:
    """Each rank draws its own order of all samples."""
    program.data = OwnOrder()
    program.trainer["use_distributed_sampler"] = False


class RepeatingLoader(DataLoader[Any]):
    """Loader that returns each second batch twice, in place of the next one."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return the batches."""
        batch = None
        for number, following in enumerate(super().__iter__()):
            batch = following if number % 2 == 0 else batch
            yield batch


class Repeats(Data):
    """Data with a loader that repeats batches."""

    def train_dataloader(self) -> Any:
        """Return the batches."""
        return RepeatingLoader(
            self.dataset, BATCH, sampler=DistributedSampler(self.dataset, self.trainer.world_size, own_rank())
        )


@fault(TRAINCHECK, divided, step=2)
def loader_that_repeats_batches(program: Program) -> None:
    """The loader returns each second batch twice."""
    program.data = Repeats()


class Replaced(Data):
    """Data whose samples are drawn with replacement."""

    def train_dataloader(self) -> Any:
        """Return the batches."""
        return DataLoader(self.dataset, BATCH, sampler=RandomSampler(self.dataset, replacement=True))


@fault(USER, step=1)
def samples_drawn_with_replacement(program: Program) -> None:
    """Samples are drawn with replacement by mistake, so that some are missing in an epoch."""
    program.data = Replaced()


class Stream(IterableDataset[Any]):
    """Stream of the samples of a data set.

    Args:
        dataset: The data set.
        divides: Whether each rank skips the samples of the other ranks.
    """

    def __init__(self, dataset: Any, ranks: int, divides: bool) -> None:
        self.samples = Subset(dataset, range(own_rank() * divides, len(dataset), ranks if divides else 1))

    def __iter__(self) -> Iterator[Any]:
        """Return the samples."""
        return iter([self.samples[index] for index in range(len(self.samples))])


class Streamed(Data):
    """Data that is a stream.

    Args:
        divides: Whether each rank skips the samples of the other ranks.
    """

    def __init__(self, divides: bool = True) -> None:
        super().__init__()
        self.divides = divides

    def train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return DataLoader(Stream(self.dataset, self.trainer.world_size, self.divides), BATCH)


def streamed() -> Program:
    """Return a program with a stream."""
    made = program()
    made.data = Streamed()
    return made


@fault(USER, streamed, step=1)
def stream_that_is_not_divided(program: Program) -> None:
    """All ranks read the whole stream."""
    program.data = Streamed(divides=False)


class Uneven(Data):
    """Data whose last batch is smaller on rank 1."""

    def train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        ranks = self.trainer.world_size
        size = len(self.dataset) - (3 if own_rank() == ranks - 1 else 0)
        return DataLoader(Subset(self.dataset, range(own_rank(), size, ranks)), BATCH)


@fault(TRAINCHECK, step=6)
def incomplete_batch_counted_like_a_complete_one(program: Program) -> None:
    """The last batch of one rank is smaller, and DDP's mean counts the ranks alike."""
    program.data = Uneven()
    program.trainer["use_distributed_sampler"] = False
