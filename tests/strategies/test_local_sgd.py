"""In the local phase the ranks' weights differ; what is measured and what is left at the end is their average."""

import os
from typing import Any

import torch
import torch.distributed as dist
from conftest import PlainCNN
from lightning.pytorch import Callback, Trainer
from ranks import run_ranks

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies import LocalSGDStrategy


class Same(Callback):
    """Notes after which steps, and in which validations, the ranks' weights are the same."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, bool]] = []

    def note(self, when: str, trainer: Any, module: Any) -> None:
        weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        first, second = trainer.strategy.all_gather(weights)
        self.notes.append((when, torch.equal(first, second)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.note("step", trainer, pl_module)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.note("validation", trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.note("end", trainer, pl_module)


def train() -> list[list[tuple[str, bool]]]:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    notes = []
    for validations in (1, 0):
        same = Same()
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=LocalSGDStrategy(sync_every=1000, start=0),
            callbacks=[same],
            max_epochs=1,
            limit_train_batches=3,
            limit_val_batches=validations,
            num_sanity_val_steps=0,
            barebones=True,
        )
        trainer.fit(ImageClassifier(PlainCNN(), 10), DigitsDataModule())
        notes.append(same.notes)
    return notes


def test_validation_and_the_end_of_fit_see_the_average_of_the_ranks() -> None:
    for with_validation, without in run_ranks(2, train):
        steps = [("step", True), ("step", False), ("step", False)]  # torch's averager begins with an average.
        assert with_validation == [*steps, ("validation", True), ("end", True)]
        assert without == [*steps, ("end", True)]
