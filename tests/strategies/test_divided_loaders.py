"""Loaders that the user's code divides among all ranks: a pipeline trains on all of the data, as one process does."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import quiet_trainer

SIZE = 48
LAYOUTS = {"two stages": [1, 1], "three ranks": [2, 1]}


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        image = torch.sin(torch.arange(4, dtype=torch.float64) + index)
        return image, torch.tensor(index % 2), torch.tensor(index)


class Stream(IterableDataset[Any]):
    """A stream of the samples that a function gives to this rank; the images may have random noise."""

    def __init__(self, part: Callable[[], tuple[int, int]], noise: float = 0.0) -> None:
        self.part = part
        self.noise = noise

    def __iter__(self) -> Iterator[Any]:
        rank, world = self.part()
        for index in range(rank, SIZE, world):
            image, target, number = Samples()[index]
            yield image + self.noise * torch.randn(4), target, number


def by_group() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def by_environment() -> tuple[int, int]:
    return int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD"])


def alone() -> tuple[int, int]:
    return 0, 1


class Recorder(LightningModule):
    """Module that records the numbers of the samples in each batch, and the loaders from which they come."""

    NAMES = (
        "sampler",
        "subset",
        "rows",
        "stream by the group",
        "stream by the environment",
        "stream by the trainer",
        "whole",
        "whole, shuffled",
    )

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.seen: dict[int, list[int]] = defaultdict(list)

    def loaders(self) -> dict[str, DataLoader[Any]]:
        os.environ |= {"LOCAL_RANK": str(self.trainer.global_rank), "WORLD": str(self.trainer.world_size)}
        samples, part = Samples(), (self.trainer.global_rank, self.trainer.world_size)
        torch.manual_seed(part[0])  # Each rank draws other numbers.
        mine = Subset(samples, range(*part[:1], SIZE, part[1]))
        numbers = torch.arange(part[0], SIZE, part[1])
        rows = TensorDataset(torch.zeros(len(numbers), 4, dtype=torch.float64), numbers % 2, numbers)
        return {
            "sampler": DataLoader(samples, 4, sampler=DistributedSampler(samples, shuffle=False)),
            "subset": DataLoader(mine, 4),
            "rows": DataLoader(rows, 4, shuffle=True),
            "stream by the group": DataLoader(Stream(by_group), 4, num_workers=1),
            "stream by the environment": DataLoader(Stream(by_environment), 4),
            "stream by the trainer": DataLoader(Stream(lambda: part), 4),
            "whole": DataLoader(
                samples, 4, sampler=DistributedSampler(samples, **self.trainer.distributed_sampler_kwargs)
            ),
            "whole, shuffled": DataLoader(samples, 4, shuffle=self.trainer.strategy.placement.replicas[0] == 1),
        }

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return list(self.loaders().values())

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(), batch_size=4, sampler=DistributedSampler(Samples(), shuffle=False))

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loaders()["sampler"]

    def validation_step(self, batch: list[Tensor], index: int, dataloader_idx: int = 0) -> None:
        self.net(batch[0])
        self.seen[dataloader_idx] += batch[2].tolist()

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.net(batch[0])
        return batch[2]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_validation_end(self) -> None:
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            Path("seen.json").write_text(json.dumps(list(self.seen.values())))


class Rows(BasePredictionWriter):
    """Writer that checks that Lightning's indices are those of the predicted rows."""

    def write_on_batch_end(self, trainer: Trainer, module: Any, prediction: Any, indices: Any, *rest: Any) -> None:
        if trainer.is_global_zero:
            assert prediction.tolist() == indices
            with Path("predicted").open("a") as file:
                print(*indices, file=file)


def trainer_of(replicas: list[int], **options: Any) -> Trainer:
    strategy = HybridPipelineStrategy(replicas=replicas, cuts=["0"], start_method="fork")
    return quiet_trainer(strategy, sum(replicas), precision="64-true", **options)


@pytest.mark.parametrize("name", [pytest.param("two stages", marks=pytest.mark.cluster), "three ranks"])
def test_each_sample_is_evaluated_once_however_the_data_are_divided(name: str) -> None:
    """With the Trainer's defaults, Lightning would divide a loader's data again by a sampler of its own."""
    module = Recorder()
    trainer_of(LAYOUTS[name], callbacks=[Rows("batch")]).validate(module, verbose=False)
    for kind, seen in zip(Recorder.NAMES, json.loads(Path("seen.json").read_text()), strict=True):
        assert Counter(seen) == Counter(range(SIZE)), kind


def test_predictions_of_a_divided_loader_have_their_indices() -> None:
    trainer_of([2, 1], callbacks=[Rows("batch")]).predict(Recorder())
    assert sorted(map(int, Path("predicted").read_text().split())) == list(range(SIZE))


def test_a_divided_loader_trains_the_weights_of_one_process() -> None:
    module = Recorder()
    trainer_of([1, 1], max_epochs=2, limit_val_batches=0).fit(module)
    expected = Recorder().double()
    loader, optimizer = DataLoader(Samples(), 8), expected.configure_optimizers()
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            expected.training_step(batch, 0).backward()
            optimizer.step()
    for name, parameter in module.net.named_parameters():
        torch.testing.assert_close(
            parameter, dict(expected.net.named_parameters())[name], rtol=1e-5, atol=1e-7, check_dtype=False
        )


def test_a_sampler_for_another_number_of_processes_is_refused() -> None:
    samples = Samples()
    loader = DataLoader(samples, 4, sampler=DistributedSampler(samples, num_replicas=5, rank=0))
    with pytest.raises(Exception, match=r"DistributedSampler has num_replicas=5: .* 2 processes in all; leave"):
        trainer_of([1, 1]).validate(Recorder(), loader)
