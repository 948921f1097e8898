"""`verify` finds a rank whose data set gives other contents for an index, and not data that are random or divided."""

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import cnnstrategies
from cnnstrategies.verifying import contents
from cnnstrategies.verifying.contents import contents_of, other_contents, shares_data_set


class Samples(Dataset[Any]):
    """Samples with random augmentation.

    Args:
        fault: Kind of the fault of this process; empty for correct samples.
    """

    def __init__(self, fault: str = "") -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(24, 1, 4, 4, generator=generator)
        self.fault = fault
        self.calls = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(4, 4) + float(np.random.rand()) + random.random()
        self.calls += 1
        classes = [2, 0, 1] if self.fault == "classes" else [0, 1, 2]
        image = self.images[index] + noise
        if self.fault == "zeros" or (self.fault == "one file" and index == 3):
            image = torch.zeros(1, 4, 4)
        if self.fault == "counts":
            image += self.calls
        return image, classes[index % 3]


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(16, 3)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(LightningDataModule):
    """Samples that have a fault on rank 1.

    Args:
        fault: Kind of the fault; empty for correct samples.
    """

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        return DataLoader(Samples(self.fault if self.trainer.global_rank == 1 else ""), 4, shuffle=True)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("classes", "rank 1 loads sample 0 with another target (2, and 0 on one device), 16 of 16 compared"),
        ("zeros", "rank 1 loads sample 0 with another image (all 0.0, and other values on one device), 16 of 16"),
        ("", ""),
    ],
)
def test_a_rank_with_other_contents_is_named(fault: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SECONDS", 60.0)  # The machine may be slow.
    verdict = cnnstrategies.verify(Module(), Data(fault), "ddp", steps=2)
    assert verdict.equal == (not fault), verdict
    assert words in str(verdict)
    assert ("with another" in str(verdict)) == bool(fault)


@pytest.mark.light
def test_only_equal_samples_with_other_contents_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SECONDS", 60.0)
    samples = Samples()
    state = torch.get_rng_state()
    alone = contents_of(DataLoader(samples), times=2)
    assert alone is not None
    assert samples.calls == 0, "a worker process loads the samples"
    assert torch.equal(state, torch.get_rng_state())
    assert contents_of(DataLoader(Samples("counts")), times=2) is None
    files, classes, zeros, first, second = (
        json.loads(json.dumps(contents_of(DataLoader(data))))
        for data in (
            Samples("one file"),
            Samples("classes"),
            Samples("zeros"),
            Subset(samples, range(12)),
            Subset(samples, range(12, 24)),
        )
    )
    text = other_contents({0: alone, 1: files}, alone)
    assert text.startswith("rank 1 loads sample 3 with another image (all 0.0, and other values on one device), 1 of ")
    assert other_contents({0: alone, 1: alone}, alone) == ""
    assert other_contents({0: first, 1: second}, alone) == ""
    assert other_contents({0: first, 1: second}, first) == ""
    assert other_contents({0: classes, 1: classes}, alone) == "", "each process draws its data"
    assert other_contents({0: classes, 1: zeros}, alone) == ""
    assert other_contents({0: alone, 1: files}, None) == ""


@pytest.mark.light
def test_data_sets_are_shared_if_a_sampler_divides_them() -> None:
    samples = Samples()
    assert shares_data_set(DataLoader(samples, sampler=DistributedSampler(samples, 2, 1)))
    assert not shares_data_set(DataLoader(samples, sampler=DistributedSampler(samples, 1, 0)))
    assert not shares_data_set(DataLoader(samples, shuffle=True))
