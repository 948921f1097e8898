"""Data parallel with compressed gradients."""

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from conftest import PlainCNN
from digit_runs import TRAINER, Digits
from lightning.pytorch import Trainer
from ranks import run_ranks
from torch import Tensor

from cnnstrategies import ImageClassifier
from cnnstrategies.strategies import CompressedDDPStrategy

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
    }
    return {name: trained(strategy) for name, strategy in strategies.items()}


def test_compressed_gradients_stay_close_to_ddps() -> None:
    """For a few steps: what is rounded at first is another run in the end. PowerSGD starts when it is told.

    Were a hook not registered, as Lightning leaves it on CPUs, the weights would be equal.
    """
    states = run_ranks(2, all_of_them)[0]
    exact = states.pop("exact")
    bounds = {
        "fp16": (1e-6, 5e-3),
        "bf16": (1e-5, 5e-2),
        "powersgd, late": (0.0, 1e-9),
        "powersgd": (1e-3, 10.0),
    }
    for name, state in states.items():
        off = max(float((state[key] - value).norm() / value.norm()) for key, value in exact.items())
        assert bounds[name][0] <= off <= bounds[name][1], (name, off)
