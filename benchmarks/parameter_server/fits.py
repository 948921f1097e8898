"""Fits for the benchmarks: Lightning's Trainer in processes of its own, with the times of every rank's steps."""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.networks import SmallCNN

sys.path.append(str(Path(__file__).parents[1] / "pipeline"))  # hosts, networks, ranks

WARM_UP = 5
TIME_LIMIT = 900


@dataclass(frozen=True)
class Fit:
    """When each rank ended its batches.

    Attributes:
        ends: For each rank the times of its batches' ends, on the machine's clock, in seconds.
        samples: For each rank the samples of each batch.
    """

    ends: list[list[float]]
    samples: list[list[int]]

    def seconds_per_step(self) -> float:
        """Mean over the ranks, without the first steps."""
        spans = [(ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP) for ends in self.ends]
        return sum(spans) / len(spans)

    def samples_per_second(self) -> float:
        """Over all ranks, from the first moment at which all have warmed up to the first end of one."""
        start = max(ends[WARM_UP - 1] for ends in self.ends)
        stop = min(ends[-1] for ends in self.ends)
        done = [
            count
            for ends, samples in zip(self.ends, self.samples, strict=True)
            for end, count in zip(ends, samples, strict=True)
            if start < end <= stop
        ]
        return sum(done) / (stop - start)


class Clock(Callback):
    """Notes the end of each batch, in a file for each rank.

    Args:
        folder: Where the files go.
        slow_rank: A rank that sleeps after each batch for three times as long as it took: a quarter of the speed.
    """

    def __init__(self, folder: Path, slow_rank: int | None = None) -> None:
        self.folder = folder
        self.slow_rank = slow_rank
        self.notes: list[tuple[float, int]] = []
        self.began = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self.began = time.process_time()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the end; the slow rank sleeps first. Its own computing counts, not its waiting for others."""
        if trainer.global_rank == self.slow_rank:
            time.sleep(3 * (time.process_time() - self.began))
        self.notes.append((time.time(), len(args[1][1])))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was noted."""
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(self.notes))


# Otherwise its hooks would count as hooks of a user, which may look at weights between steps: see observer_hooks.py.
Clock.__module__ = "cnnstrategies.clock"


def data(size: int, classes: int, samples: int, batch_size: int) -> DataLoader[Any]:
    """Random images (3, size, size)."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, size, size, generator=generator)
    targets = torch.randint(classes, (samples,), generator=generator)
    return DataLoader(TensorDataset(images, targets), batch_size, shuffle=True, drop_last=True)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def digits_classifier(widths: Sequence[int], epochs: int) -> ImageClassifier:
    """The quickstart's model for the digits, its optimizer and schedule, with so many channels."""
    return ImageClassifier(
        SmallCNN(10, widths=widths),
        10,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.0005),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        label_smoothing=0.05,
    )


def fit(
    strategy: Callable[[], Any],
    make: Callable[[], nn.Module],
    classes: int,
    loader: Callable[[], DataLoader[Any]],
    workers: int = 2,
    epochs: int = 1,
    slow_rank: int | None = None,
    callbacks: Sequence[Callback] = (),
    precision: Any = "32-true",
) -> Fit:
    """Train in a forked process, whose ranks are forked too."""

    def train(folder: Path) -> None:
        trainer = Trainer(
            accelerator="cpu",
            devices=workers,
            strategy=strategy(),
            precision=precision,
            max_epochs=epochs,
            callbacks=[Clock(folder, slow_rank), *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(ImageClassifier(make(), classes, optimizer=sgd), loader())

    return in_fork(train, workers)[0]


def in_fork(train: Callable[[Path], None], workers: int, time_limit: float = TIME_LIMIT) -> tuple[Fit, str]:
    """Call a function that trains in a forked process, and return the times of the fit and the output.

    Args:
        train: Function of the folder to which the callback :class:`Clock` of each rank writes its notes.
        workers: Number of ranks.
        time_limit: Seconds that the process may take.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        process = multiprocessing.get_context("fork").Process(target=_call, args=(train, folder))
        process.start()
        process.join(time_limit)
        output = (folder / "output").read_text()
        if process.exitcode != 0:
            raise SystemExit(f"the fit ended with {process.exitcode}:\n{output[-4000:]}")
        notes = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]
    times = [[end for end, _ in rank] for rank in notes]
    return Fit(times, [[count for _, count in rank] for rank in notes]), output


def _call(train: Callable[[Path], None], folder: Path) -> None:
    with (folder / "output").open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(output.fileno(), stream.fileno())
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    train(folder)
