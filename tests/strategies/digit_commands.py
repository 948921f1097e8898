"""The trainings of `digit_runs.py` as command lines, for tests of features that only the command line has."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from cnnstrategies.data import DigitsDataModule
from cnnstrategies.data.loading import TensorSource
from tests.conftest import PlainCNN

COMMON = [
    "--model.init_args.network=tests.conftest.PlainCNN",
    "--trainer.precision=64-true",
    "--trainer.max_epochs=2",
    "--trainer.num_sanity_val_steps=0",
    "--data.init_args.augment=false",
    "--data.init_args.val_split=0.7565",
    "--trainer.limit_val_batches=3",
    "--checkpoint.monitor=null",
    "--trainer.logger=CSVLogger",
    "--trainer.logger.init_args.save_dir=runs",
]


class GroupedCNN(PlainCNN):
    """A network whose layers timm knows."""

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return the pattern of the layers' names."""
        return {"layers": r"^(\d+)"}


class FewForValidation(DigitsDataModule):
    """Digits with 135 images for validation: two batches, and seven more images, which two ranks cannot share."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.val_source = TensorSource(self.val_source.images[:135], self.val_source.targets[:135])


class OwnSGD(torch.optim.SGD):
    """A user's optimizer, whose constructor takes the parameters only."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0005)


def served(workers: int = 2, **options: Any) -> list[str]:
    """Return the arguments of a run with a parameter server.

    Args:
        workers: Number of workers.
        options: Options of the strategy.
    """
    return [
        "--trainer.strategy.class_path=ParameterServerStrategy",
        f"--trainer.devices={workers}",
        *(
            f"--trainer.strategy.init_args.{name}={value}"
            for name, value in ({"start_method": "fork"} | options).items()
        ),
    ]


def checkpoint(name: str, version: int = 0) -> Path:
    """Return the path of a run's last checkpoint."""
    return Path("runs") / name / f"version_{version}/checkpoints/last.ckpt"


def write_samples(name: str, epoch: int, batch: Any) -> None:
    """Append the samples of a batch to a diary file: epoch and hash of each sample."""
    with Path(f"diary-{name}").open("a") as diary:
        for image in batch[0]:
            print(epoch, hashlib.sha256(image.numpy().tobytes()).hexdigest()[:16], file=diary)


def read_samples(name: str) -> list[tuple[int, str]]:
    """Return epoch and hash of each sample in a diary file."""
    lines = [line.split() for line in Path(f"diary-{name}").read_text().splitlines()]
    return [(int(epoch), sample) for epoch, sample in lines]
