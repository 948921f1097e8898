"""What the ranks of trials have in common: they wait for orders before a step, and say why they fail."""

import json
import os
import socket
import sys
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from cnnstrategies.commands.run.failures import described, explain_run_error
from cnnstrategies.commands.run.quiet import quieten
from cnnstrategies.planning.tune.trial import COMPARED_STEPS, FAILED, TRIAL


class Orders(Callback):
    """Has a training go on for as many steps as it is told to, again and again."""

    def __init__(self) -> None:
        self._left = 0
        self._losses: list[float] = []

    def hello(self, trainer: Trainer) -> dict[str, Any]:
        """What a rank says of itself, beside its number."""
        return {}

    @abstractmethod
    def obey(self, order: Mapping[str, Any]) -> None:
        """Do what is ordered; steps by setting ``_left``."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.max_epochs = -1
        for one in trainer.strategy.lr_scheduler_configs:
            one.frequency = sys.maxsize  # More steps come than it was made for, and no validation that it may ask.
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[TRIAL])
        self._answers = self._connection.makefile("r")
        self.say({"rank": trainer.global_rank, "world": trainer.world_size, **self.hello(trainer)})

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        while not self._left:
            line = self._answers.readline()
            order = json.loads(line) if line else {"end": True}
            if "end" in order:
                trainer.should_stop = True
                return
            self.obey(order)

    def note_loss(self, outputs: Any) -> None:
        """Of the first steps, where a module's step gives one."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if len(self._losses) < COMPARED_STEPS:
            self._losses.append(float(loss) if isinstance(loss, Tensor) else 0.0)

    def say(self, message: Mapping[str, Any]) -> None:
        """Answer."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")


def run_rank(kind: Callable[[], object]) -> None:
    """Run a command line as a rank of a trial."""
    quieten()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        kind()
    except Exception as error:
        traceback.print_exc()
        print(f"{FAILED}{explain_run_error(error) or described(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
