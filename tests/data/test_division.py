"""Tests of the numbers by which processes recognise that the user's code has divided the data among them."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from cnnstrategies.data.division import (
    StreamComparison,
    describe_batch,
    describe_loader,
    divided_among,
    is_divided,
    same_loaders,
)

pytestmark = pytest.mark.light

SIZE = 48
RANKS = 2


class Noisy(Dataset[Any]):
    """Images with random augmentation by three libraries, and with noise of the data set's own generator."""

    def __init__(self, seed: int, rows: range = range(SIZE)) -> None:
        self.noise = np.random.default_rng(seed)
        self.rows = rows
        self.file: object = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.file = "opened"
        drawn = torch.randn(1).item() + np.random.rand() + random.random()
        return torch.full((4,), drawn), self.noise.random(2), self.rows[index]


class Buckets(BatchSampler):
    """A batch sampler without `super().__init__`, which yields batches of neighbouring samples in a random order."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows) // 4

    def __iter__(self) -> Iterator[list[int]]:
        batches = [self.rows[start : start + 4] for start in range(0, len(self.rows), 4)]
        random.shuffle(batches)
        return iter(batches)


class Endless(Sampler[int]):
    def __init__(self, first: int, step: int) -> None:
        self.first = first
        self.step = step

    def __iter__(self) -> Iterator[int]:
        index = self.first
        while True:
            yield index % SIZE
            index += self.step


def tensors(rows: range = range(SIZE)) -> TensorDataset:
    return TensorDataset(torch.arange(SIZE).float()[list(rows)], torch.arange(SIZE)[list(rows)] % 2)


def of(rank: int) -> range:
    return range(rank, SIZE, RANKS)


# Loaders of a rank that have the same data on all ranks.
WHOLE: dict[str, Callable[[int], DataLoader[Any]]] = {
    "in order": lambda rank: DataLoader(tensors(), 4),
    "shuffled": lambda rank: DataLoader(tensors(), 4, shuffle=True),
    "own generators": lambda rank: DataLoader(
        tensors(), 4, sampler=RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(rank))
    ),
    "subset in random order": lambda rank: DataLoader(
        tensors(), 4, sampler=SubsetRandomSampler(range(9), generator=torch.Generator().manual_seed(rank))
    ),
    "weighted": lambda rank: DataLoader(tensors(), 4, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "batches": lambda rank: DataLoader(
        tensors(), batch_sampler=BatchSampler(RandomSampler(range(SIZE), True, SIZE), 4, False)
    ),
    "buckets": lambda rank: DataLoader(tensors(), batch_sampler=Buckets(list(range(SIZE)))),
    "endless": lambda rank: DataLoader(tensors(), 4, sampler=Endless(0, 1)),
    "noise": lambda rank: DataLoader(Noisy(rank), 4, shuffle=True),
    "one part for all": lambda rank: DataLoader(Subset(tensors(), range(7)), 4),
}
# Loaders of a rank that have different data on each rank.
DIVIDED: dict[str, Callable[[int], DataLoader[Any]]] = {
    "subset": lambda rank: DataLoader(Subset(tensors(), of(rank)), 4),
    "subset of noise": lambda rank: DataLoader(Subset(Noisy(rank), of(rank)), 4, shuffle=True),
    "rows": lambda rank: DataLoader(tensors(of(rank)), 4),
    "rows of noise": lambda rank: DataLoader(Noisy(rank, of(rank)), 4),
    "another length": lambda rank: DataLoader(Noisy(rank, range(40 + rank)), 4),
    "parts": lambda rank: DataLoader(ConcatDataset([tensors(of(rank)), tensors(of(rank))]), 4),
    "indices": lambda rank: DataLoader(tensors(), 4, sampler=SubsetRandomSampler(of(rank))),
    "buckets": lambda rank: DataLoader(tensors(), batch_sampler=Buckets(list(of(rank)))),
    "endless": lambda rank: DataLoader(tensors(), 4, sampler=Endless(rank, RANKS)),
}


def rows_of_ranks(make: Callable[[int], DataLoader[Any]]) -> list[list[float]]:
    rows = []
    for rank in range(RANKS):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(rank)
        before = torch.get_rng_state(), random.getstate()
        rows.append(describe_loader(make(rank)))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
    return rows


@pytest.mark.parametrize("name", WHOLE)
def test_random_orders_and_augmentation_do_not_count_as_divided_data(name: str) -> None:
    assert same_loaders(*rows_of_ranks(WHOLE[name]))


@pytest.mark.parametrize("name", DIVIDED)
def test_divided_data_are_recognised_by_the_sampler_or_by_two_items(name: str) -> None:
    assert not same_loaders(*rows_of_ranks(DIVIDED[name]))


def test_the_comparison_does_not_change_the_loader() -> None:
    """A file that a data set opens with its first item would be shared by all workers that are forked later."""
    dataset, generator = Noisy(0), torch.Generator().manual_seed(3)
    loader = DataLoader(Subset(dataset, range(9)), 4, sampler=SubsetRandomSampler(range(9), generator))
    describe_loader(loader)
    assert dataset.file is None
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())


def test_a_sampler_says_among_how_many_processes_it_divides_the_data() -> None:
    class Repeated(Sampler[int]):
        """A sampler of another library, which does not derive from torch's DistributedSampler."""

        num_replicas = 3

    distributed = DistributedSampler(range(9), num_replicas=4, rank=1)  # type: ignore[arg-type]
    assert divided_among(DataLoader(tensors(), 4)) is None
    assert divided_among(DataLoader(tensors(), 4, sampler=distributed)) == ("DistributedSampler", 4)
    batches = DataLoader(tensors(), batch_sampler=BatchSampler(Repeated(), 4, False))
    assert divided_among(batches) == ("Repeated", 3)
    assert divided_among([1, 2]) is None


def batch(first: int, rows: int, noise: float = 0.0, target: int | None = None) -> list[Tensor]:
    numbers = torch.arange(first, first + rows)
    return [numbers.float() + noise, numbers % 7 if target is None else torch.full_like(numbers, target)]


def compared(*steps: list[list[Tensor] | None]) -> list[bool | None]:
    """Compare the batches of ranks 0 and 1, which load in any case, with those of ranks 2 and 3."""
    comparison = StreamComparison([0, 1], [2, 3])
    return [comparison.add([describe_batch(batch) for batch in step]) for step in steps] + [comparison.decide()]


class Repeats(SequentialSampler):
    """Like torchvision's RASampler, which gives all ranks the same samples if it repeats each once for each rank."""

    def __init__(self, number: int) -> None:
        super().__init__(range(SIZE))
        self.num_replicas = number


def test_a_sampler_for_all_processes_counts_as_divided_data_whatever_it_yields() -> None:
    data = TensorDataset(torch.arange(SIZE))
    loaders = [DataLoader(data, 4, sampler=Repeats(number)) for number in (RANKS, 1)]
    loaders += [DataLoader(data, 4), DataLoader(Subset(data, range(8)), 4)]
    other = describe_loader(loaders[2])
    assert [is_divided(loader, RANKS, lambda row: [row, other]) for loader in loaders] == [True, False, False, True]
    assert not is_divided(loaders[0], 1, lambda row: [row])


def test_streams_are_compared_by_their_first_batches() -> None:
    large, small = batch(0, 64), batch(0, 8)
    assert compared([large] * 4) == [False, False], "all ranks have the same batch"
    assert compared([batch(0, 64), batch(64, 64), batch(64, 64), batch(0, 64)]) == [False, False], "two parts"
    assert compared([batch(64 * rank, 64) for rank in range(4)]) == [True, True]
    assert compared([large, large, large, None]) == [True, True], "another number of batches"
    noisy = [batch(0, 64, noise=rank) for rank in range(4)]
    assert compared(noisy) == [False, True], "the targets are equal, so each rank draws its own augmentation"
    assert compared([small] * 4) == [None, False], "too few samples to be sure"
    assert compared([small] * 4, [None] * 4) == [None, None, False], "all ranks have the same few batches"
    several = [[batch(8 * step, 8, noise=rank) for rank in range(4)] for step in range(8)]
    assert compared(*several)[:8] == [None] * 7 + [False]
    constant = [batch(64 * rank, 64, target=1) for rank in range(4)]
    assert compared(constant) == [None, True], "equal targets do not say anything if all targets are equal"
