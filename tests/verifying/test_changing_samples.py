"""``verify`` names a data set that changes its samples when they are read, and validation samples that are random."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from cnnstrategies.verifying.loaders import lines_about_samples


class Stored(Dataset[Any]):
    """Data set of an array that it reads in a way that is tested."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.images = np.ones((4, 3), np.float32)
        self.cache: dict[int, Any] = {}
        self.filled = torch.zeros(4, 3)
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        if self.way == "in place":
            image -= 0.1
        if self.way == "random":
            return torch.from_numpy(image) + torch.rand(3, generator=self.generator)
        if self.way == "cached":
            self.cache[index], self.filled[index] = image, torch.from_numpy(image)
        if self.way == "fails":
            raise OSError("the file is missing")
        return image


@pytest.mark.light
@pytest.mark.parametrize(
    ("train", "validation", "words"),
    [
        ("plain", "plain", []),
        ("cached", "cached", []),
        ("random", "plain", []),
        ("fails", "fails", []),
        ("in place", "plain", ["training data changes the stored data"]),
        ("plain", "random", ["validation data has other values each time"]),
    ],
)
def test_only_changed_data_and_random_validations_are_named(train: str, validation: str, words: list[str]) -> None:
    before = torch.get_rng_state()
    lines = lines_about_samples(DataLoader(Subset(Stored(train), [0, 1])), [DataLoader(Stored(validation))])
    assert [word in line for word, line in zip(words, lines, strict=True)] == [True] * len(words)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.light
@pytest.mark.parametrize("loaders", [None, [], DataLoader(TensorDataset(torch.zeros(2, 1)))])
def test_loaders_without_a_fault(loaders: Any) -> None:
    stream: list[Tensor] = [torch.zeros(1)]
    assert lines_about_samples(stream, loaders) == []
