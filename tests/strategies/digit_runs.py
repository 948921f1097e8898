"""Short trainings on the digits with a Trainer, for comparisons: the command line would take twice as long."""

import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.data.loading import TensorSource
from tests.conftest import PlainCNN
from tests.runner.ranks import run_apart

ADAMW = partial(torch.optim.AdamW, lr=0.002)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


class Digits(DigitsDataModule):
    """Digits with 70 images for validation: one batch and six more images."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.val_source = TensorSource(self.val_source.images[:70], self.val_source.targets[:70])


# The network has no batch normalisation, whose statistics would cover a microbatch only. In float64 the order of
# summation does not matter. An epoch has 5 batches of 64 samples and one batch of 30. 30 is less than two microbatches
# of 16 samples, and even: DDP takes the mean of its ranks' means, which equals the mean over the batch only if the
# ranks have equal shares.
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
    """Train in a separate process and return the contents of the last checkpoint.

    Args:
        name: Folder for ``last.ckpt`` and ``metrics.csv``.
        strategy: Strategy of the Trainer; it must start its processes by fork.
        devices: Number of processes.
        network: Function that makes the network.
        model: Arguments of :class:`~cnnstrategies.ImageClassifier`.
        data: Arguments of the digits.
        callbacks: Callbacks of the Trainer.
        ckpt_path: Checkpoint to resume from.
        **options: Further arguments of the Trainer.
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
        module_options = {"optimizer": SGD, "lr_scheduler": decays, "label_smoothing": 0.05} | (model or {})
        images = Digits(**{"global_batch_size": 64, "augment": False, "val_split": 0.7565} | (data or {}))
        trainer.fit(ImageClassifier(network(), 10, **module_options), images, ckpt_path=ckpt_path and str(ckpt_path))

    run_apart(run)
    return load(name)


def load(name: str, file: str = "last.ckpt") -> dict[str, Any]:
    """Return the contents of a checkpoint in a training's folder."""
    checkpoint: dict[str, Any] = torch.load(Path(name, file), weights_only=True)
    return checkpoint


def logged(name: str) -> list[dict[str, float]]:
    """Return the rows of a training's log; each row maps names to values."""
    with Path(name, "metrics.csv").open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def assert_same_run(actual: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-9) -> None:
    """Assert that two checkpoints have equal weights, optimizer states and scheduler states.

    Args:
        actual: The checkpoint to check.
        expected: The checkpoint to compare with.
        rtol: Largest relative error of a weight's norm.
    """
    assert list(actual["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        error = float((actual["state_dict"][name] - value).double().norm() / value.double().norm())
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
