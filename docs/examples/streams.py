"""A data module whose training samples are a stream: the lines of a text file, one digit in each line.

The stream does not know how many processes and loader workers read it.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from cnnstrategies.data import DigitsDataModule

Sample = tuple[Tensor, int]


class Lines(IterableDataset[Sample]):
    """Images of 8 x 8 pixels with their classes, from a file with 64 grey values and a class in each line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Sample]:
        with self.path.open() as file:
            for line in file:
                *pixels, target = map(int, line.split())
                yield torch.tensor(pixels, dtype=torch.float32).view(1, 8, 8) / 255, target


class LinesData(LightningDataModule):
    """Data module of the files ``train.txt`` and ``val.txt`` in a folder, which it writes if they are missing."""

    image_shape = (1, 8, 8)

    def __init__(self, root: Path = Path("digits"), batch_size: int = 32, num_workers: int = 2) -> None:
        super().__init__()
        self.root, self.options = root, {"batch_size": batch_size, "num_workers": num_workers}

    def prepare_data(self) -> None:
        if (self.root / "val.txt").exists():
            return
        self.root.mkdir(parents=True, exist_ok=True)
        digits = DigitsDataModule()
        digits.setup("fit")
        for part, source in (("train", digits.train_source), ("val", digits.val_source)):
            images, targets = source.fetch(list(range(len(source))))
            rows = torch.cat([images.flatten(1).long(), targets[:, None]], dim=1).tolist()
            (self.root / f"{part}.txt").write_text("\n".join(" ".join(map(str, row)) for row in rows))

    def train_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(Lines(self.root / "train.txt"), **self.options)

    def val_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(Lines(self.root / "val.txt"), **self.options)
