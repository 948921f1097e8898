"""All of torch's samplers and ten samplers of users' own work under a pipeline and under the parameter server."""

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from cnnstrategies.divided_batches import DividedBatches, takes_sampler
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy
from tests.conftest import quiet_trainer

SIZE = 24
BATCHES = 3 * SIZE // 4  # Batches of each loader at most, which are those of the sampler that repeats.
SAMPLES = TensorDataset(torch.arange(SIZE * 4, dtype=torch.float64).view(SIZE, 4), torch.arange(SIZE))


class Weighted(Sampler[int]):
    """Draws even samples three times as often as odd ones."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(random.choices(range(SIZE), [3 - 2 * (index % 2) for index in range(SIZE)], k=SIZE))


class Repeated(Sampler[int]):
    """Yields each sample three times in a row, as for repeated augmentation."""

    def __len__(self) -> int:
        return 3 * SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(index for index in range(SIZE) for _ in range(3))


class Batches(BatchSampler):
    """Base class of the batch samplers below; it does not call `super().__init__`, so there is no `sampler`."""

    def __init__(self, size: int = 4) -> None:
        self.size = size

    def __len__(self) -> int:
        return SIZE // self.size

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(start, start + self.size)) for start in range(0, SIZE, self.size)])


class Buckets(Batches):
    """Batches of neighbouring samples, in a random order."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(list(super().__iter__()), len(self)))


class Bags(Batches):
    """Batches of different sizes, of which each is the bag of one patient."""

    def __iter__(self) -> Iterator[list[int]]:
        bounds = [0, 1, 7, 12, 20, 21, 24]
        return iter([list(range(*pair)) for pair in itertools.pairwise(bounds)])


class EndlessBatches(Batches):
    def __len__(self) -> int:
        raise TypeError("endless")

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.cycle(list(super().__iter__()))


class CountedEndlessBatches(EndlessBatches):
    """Endless batches with the length of an epoch, after which one device stops to load."""

    def __len__(self) -> int:
        return SIZE // self.size

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(super().__iter__()):
            assert number < 100, "the sampler is asked for more batches than it has"
            yield batch


class Classes(Sampler[list[int]]):
    """Batches of one class each; a sampler of lists that does not derive from BatchSampler."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(first, SIZE, 8)) for first in range(8)])


class WithSampler(BatchSampler):
    """Calls `super().__init__`, but its constructor does not take a sampler, so Lightning cannot build it again."""

    def __init__(self, size: int) -> None:
        super().__init__(SequentialSampler(range(SIZE)), size, drop_last=False)


def loaders() -> dict[str, DataLoader[Any]]:
    samplers: dict[str, Any] = {
        "sequential": SequentialSampler(SAMPLES),
        "random": RandomSampler(SAMPLES),
        "random with replacement": RandomSampler(SAMPLES, replacement=True, num_samples=SIZE),
        "subset": SubsetRandomSampler(range(SIZE // 2)),
        "weighted by torch": WeightedRandomSampler([1.0] * SIZE, SIZE),
        "weighted": Weighted(),
        "repeated": Repeated(),
    }
    batches: dict[str, Any] = {
        "batches of torch": BatchSampler(RandomSampler(SAMPLES), 4, False),
        "batches": Batches(),
        "buckets": Buckets(),
        "bags": Bags(),
        "endless batches": EndlessBatches(),
        "endless batches with a length": CountedEndlessBatches(),
        "classes": Classes(),
        "with a sampler": WithSampler(4),
        "a list of batches": list(Batches()),
    }
    made = {name: DataLoader(SAMPLES, batch_size=4, sampler=sampler) for name, sampler in samplers.items()}
    return made | {name: DataLoader(SAMPLES, batch_sampler=sampler) for name, sampler in batches.items()}


# Loaders whose samples are random draws, or endless: only their number is compared.
DRAWN = {"random with replacement", "weighted by torch", "weighted", "endless batches", "subset"}


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
        self.seen: dict[int, list[list[int]]] = defaultdict(list)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return list(loaders().values())

    def validation_step(self, batch: list[Tensor], index: int, dataloader_idx: int) -> None:
        self.net(batch[0])
        self.seen[dataloader_idx].append(batch[1].tolist())

    def on_validation_end(self) -> None:
        Path(f"seen{self.trainer.global_rank}.json").write_text(json.dumps(self.seen))


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "hybrid_pipeline": lambda: HybridPipelineStrategy(replicas=[1, 1], cuts=["0"], start_method="fork"),
    "parameter_server": lambda: ParameterServerStrategy(start_method="fork"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_sampler_loads_what_one_device_loads(strategy: str) -> None:
    module = Recorder().double()
    quiet_trainer(STRATEGIES[strategy](), 2, limit_val_batches=BATCHES).validate(module, verbose=False)
    ranks = [json.loads(Path(f"seen{rank}.json").read_text()) for rank in range(2)]
    for number, (name, loader) in enumerate(loaders().items()):
        loaded = [batch for rank in ranks[: 1 if strategy == "hybrid_pipeline" else 2] for batch in rank[str(number)]]
        samples = Counter(sample for batch in loaded for sample in batch)
        if name == "endless batches":
            assert len(loaded) == BATCHES * len(ranks[: 1 if strategy == "hybrid_pipeline" else 2])
        elif name == "endless batches with a length":
            assert samples == Counter(range(SIZE))
        elif name in DRAWN:
            assert samples.total() == sum(len(batch[1]) for batch in loader), name
        else:
            assert samples == Counter(sample for batch in loader for sample in batch[1].tolist()), name


@pytest.mark.light
def test_batches_are_divided_in_turn_and_repeated_if_a_rank_has_none() -> None:
    batches = [[number] for number in range(8)]
    parts = [list(DividedBatches(batches, 3, rank)) for rank in range(3)]
    assert parts == [[[0], [3], [6]], [[1], [4], [7]], [[2], [5], [0]]]
    assert [len(DividedBatches(batches, 3, rank)) for rank in range(3)] == [3, 3, 3]
    endless = DividedBatches(EndlessBatches(), 2, 1)
    assert next(iter(endless)) == [4, 5, 6, 7]
    assert list(DividedBatches(CountedEndlessBatches(), 2, 1)) == list(Batches())[1::2]


@pytest.mark.light
def test_all_ranks_draw_the_same_random_batches_and_each_epoch_others() -> None:
    epochs = []
    for epoch in range(2):
        parts = []
        for rank in range(2):
            random.seed(rank)
            divided = DividedBatches(Buckets(), 2, rank)
            divided.set_epoch(epoch)
            parts.append(list(divided))
        assert sorted(sample for part in parts for batch in part for sample in batch) == list(range(SIZE))
        epochs.append(parts)
    assert epochs[0] != epochs[1]


@pytest.mark.light
def test_lightning_divides_the_sampler_of_a_batch_sampler_that_takes_one() -> None:
    assert takes_sampler(BatchSampler(SequentialSampler(SAMPLES), 4, False))
    assert not any(map(takes_sampler, [Batches(), WithSampler(4), Classes(), list(Batches())]))
