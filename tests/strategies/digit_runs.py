"""Short trainings on the digits by a Trainer, to be compared: by the command line they would cost twice as much."""

import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from conftest import PlainCNN
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from ranks import run_apart
from torch import nn

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.data.loading import TensorSource

ADAMW = partial(torch.optim.AdamW, lr=0.002)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


class Digits(DigitsDataModule):
    """With 70 images for validation: those of a batch, and six more."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.val_source = TensorSource(self.val_source.images[:70], self.val_source.targets[:70])


# Without batch normalisation, whose statistics are those of a microbatch; in float64, so that the order of summation
# leaves no trace. 5 batches of 64 and one of 30 samples, which is fewer than two microbatches times 16, and even:
# DDP takes the mean of its ranks' means, which equals the mean over the batch only where their shares are equal.
TRAINER = {
    "accelerator": "cpu",
    "precision": "64-true",
    "max_epochs": 2,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 5,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def train(
    name: str,
    strategy: Any = "auto",
    devices: int = 1,
    network: Callable[[], nn.Module] = PlainCNN,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What a checkpoint holds at the end of a training in a process of its own.

    Args:
        name: The folder, with ``last.ckpt`` and ``metrics.csv``.
        strategy: The Trainer's; one that starts its processes by fork.
        devices: Processes.
        network: Makes the network.
        model: Of :class:`~cnnstrategies.ImageClassifier`.
        data: Of the digits.
        callbacks: Of the Trainer.
        ckpt_path: Where it goes on from.
        **options: Of the Trainer.
    """
    folder = Path(name).resolve()

    def run() -> None:
        seed_everything(1, verbose=False)
        saved = ModelCheckpoint(folder, save_top_k=0, save_last=True)
        trainer = Trainer(
            strategy=strategy,
            devices=devices,
            callbacks=[*callbacks, saved],
            logger=CSVLogger(folder.parent, folder.name, version=""),
            **TRAINER | options,  # type: ignore[arg-type]
        )
        decays = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=2)
        own = {"optimizer": SGD, "lr_scheduler": decays, "label_smoothing": 0.05} | (model or {})
        images = Digits(**{"global_batch_size": 64, "augment": False, "val_split": 0.7565} | (data or {}))
        trainer.fit(ImageClassifier(network(), 10, **own), images, ckpt_path=ckpt_path and str(ckpt_path))

    run_apart(run)
    return load(name)


def load(name: str, file: str = "last.ckpt") -> dict[str, Any]:
    """What a checkpoint in a training's folder holds."""
    held: dict[str, Any] = torch.load(Path(name, file), weights_only=True)
    return held


def logged(name: str) -> list[dict[str, float]]:
    """What a training has logged."""
    with Path(name, "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def assert_same_run(actual: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-9) -> None:
    """Weights, optimizer and scheduler state of two checkpoints."""
    assert list(actual["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        error = float((actual["state_dict"][name] - value).norm() / value.norm())
        assert error <= rtol, f"{name}: relative error {error:.1e}"
    for got, wanted in zip(actual["optimizer_states"], expected["optimizer_states"], strict=True):
        assert got["param_groups"] == wanted["param_groups"]
        assert got["state"].keys() == wanted["state"].keys()
        for index, state in wanted["state"].items():
            for key, value in state.items():
                assert torch.allclose(
                    torch.as_tensor(got["state"][index][key]), torch.as_tensor(value), rtol=1e3 * rtol
                )
    assert actual["lr_schedulers"] == expected["lr_schedulers"]
    assert actual["global_step"] == expected["global_step"]
