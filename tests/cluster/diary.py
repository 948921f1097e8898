"""A callback for runs on several hosts: when each step was made, and what the weights are at the end."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

SECONDS = 0.03  # of each step, at least


class Diary(Callback):
    """Writes a line for each step into ``diary-RANK``, and one at the end."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the time."""
        time.sleep(SECONDS)
        self._write(trainer, f"{time.monotonic()}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the weights."""
        weights = torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()])
        self._write(trainer, f"end {weights.double().sum().item()!r} {weights.double().norm().item()!r}")

    @staticmethod
    def _write(trainer: Trainer, line: str) -> None:
        with Path(f"diary-{trainer.global_rank}").open("a") as file:
            print(line, file=file)


class Dies(Callback):
    """Kills rank 2, the first of the second node, in mid-epoch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_rank == 2 and trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
