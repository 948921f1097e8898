"""Data parallel as the package has it: on a global batch, with compressed gradients, and with local steps."""

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from conftest import PlainCNN
from digit_runs import TRAINER, Digits
from lightning.pytorch import Callback, Trainer
from ranks import run_ranks
from torch import Tensor

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies import CompressedDDPStrategy, LocalSGDStrategy

State = dict[str, Tensor]


def as_rank() -> None:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": "2"}


def trained(strategy: Any) -> State:
    """The weights after an epoch, of which each step is one without momentum."""
    torch.manual_seed(1)
    model = ImageClassifier(PlainCNN(), 10, optimizer=partial(torch.optim.SGD, lr=0.1))
    options = {**TRAINER, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(devices=2, strategy=strategy, **options)
    trainer.fit(model, Digits(global_batch_size=64, augment=False, val_split=0.7565))
    return {name: value.clone() for name, value in model.state_dict().items()}


def all_of_them() -> dict[str, State]:
    as_rank()
    strategies: dict[str, Any] = {
        "exact": "ddp",
        "fp16": CompressedDDPStrategy("fp16"),
        "bf16": CompressedDDPStrategy("bf16"),
        "powersgd, late": CompressedDDPStrategy("powersgd", powersgd_start=1000),
        "powersgd": CompressedDDPStrategy("powersgd", powersgd_start=2),
        "averaged in each step": LocalSGDStrategy(start=3, sync_every=1),
        "averaged seldom": LocalSGDStrategy(start=3, sync_every=50),
    }
    return {name: trained(strategy) for name, strategy in strategies.items()}


def test_compressed_stays_close_and_local_steps_equal_ddp() -> None:
    """For a few steps: what is rounded at first is another run in the end. PowerSGD starts when it is told.

    Averaging the weights after a step without momentum is averaging the gradients before it. Were a hook not
    registered, as Lightning leaves it on CPUs, the weights would be equal.
    """
    states = run_ranks(2, all_of_them)[0]
    exact = states.pop("exact")
    bounds = {
        "fp16": (1e-6, 5e-3), "bf16": (1e-5, 5e-2), "powersgd, late": (0.0, 1e-9), "powersgd": (1e-3, 10.0),
        "averaged in each step": (0.0, 1e-9), "averaged seldom": (1e-3, 10.0),
    }  # fmt: skip
    for name, state in states.items():
        off = max(float((state[key] - value).norm() / value.norm()) for key, value in exact.items())
        assert bounds[name][0] <= off <= bounds[name][1], (name, off)


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


def noted() -> list[list[tuple[str, bool]]]:
    as_rank()
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
    for with_validation, without in run_ranks(2, noted):
        steps = [("step", True), ("step", False), ("step", False)]  # torch's averager begins with an average.
        assert with_validation == [*steps, ("validation", True), ("end", True)]
        assert without == [*steps, ("end", True)]
