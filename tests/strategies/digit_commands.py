"""The trainings of `digit_runs.py` by the command line, for what only that does."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

COMMON = [
    "--model.init_args.network=conftest.PlainCNN",
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


class EachLayer(torch.optim.SGD):
    """A user's own optimizer: each parameter has a learning rate, and biases are not decayed."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        members = list(params)
        groups = [
            {"params": [one], "lr": 0.1 * number / len(members), "weight_decay": 0.0005 * (one.ndim > 1)}
            for number, one in enumerate(members, start=1)
        ]
        super().__init__(groups, momentum=0.9, nesterov=True)


def served(workers: int = 2, **options: Any) -> list[str]:
    """A parameter server with options of its strategy."""
    return [
        "--trainer.strategy.class_path=ParameterServerStrategy",
        f"--trainer.devices={workers}",
        *(
            f"--trainer.strategy.init_args.{name}={value}"
            for name, value in ({"start_method": "fork"} | options).items()
        ),
    ]


def checkpoint(name: str, version: int = 0) -> Path:
    """A run's last one."""
    return Path("runs") / name / f"version_{version}/checkpoints/last.ckpt"


def write_samples(name: str, epoch: int, batch: Any) -> None:
    """Add those of a batch to a diary."""
    with Path(f"diary-{name}").open("a") as diary:
        for image in batch[0]:
            print(epoch, hashlib.sha256(image.numpy().tobytes()).hexdigest()[:16], file=diary)


def read_samples(name: str) -> list[tuple[int, str]]:
    """Epoch and sample of each that is in a diary."""
    lines = [line.split() for line in Path(f"diary-{name}").read_text().splitlines()]
    return [(int(epoch), sample) for epoch, sample in lines]
