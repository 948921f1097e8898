"""A network, and a callback that makes one rank fail, for processes that are started as a user does."""

import os
import signal
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.conv(images)).flatten(1))


def fail(*_: object) -> None:
    raise ValueError("this layer does not like the batch")


class Fault(Callback):
    """In the middle of the second epoch, one rank does what the environment says."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        kind, rank = os.environ["FAULT"].split()
        if trainer.current_epoch != 1 or batch_idx != 3 or trainer.global_rank != int(rank):
            return
        if kind == "exception":
            (pl_module.network.head if int(rank) else pl_module.network.conv).register_forward_pre_hook(fail)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "asleep":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # It takes ten seconds to end one that does not hear it.
            time.sleep(1000)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
