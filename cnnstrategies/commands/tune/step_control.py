"""Common code of the ranks of trials. A rank waits for an order before each step, and reports why it fails.

A rank is connected to the process that measures (`cnnstrategies.planning.tune.trial`) by a Unix socket. Orders and
answers are lines of JSON.
"""

import json
import os
import socket
import sys
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from cnnstrategies.commands.run.failures import described, explain_run_error
from cnnstrategies.commands.run.lightning_cli import CLI
from cnnstrategies.commands.run.quiet import quieten
from cnnstrategies.planning.tune.trial import COMPARED_STEPS, FAILED, TRIAL

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class StepControl(Callback):
    """Callback that lets a training run the ordered number of steps, and then waits for the next order."""

    def __init__(self) -> None:
        self._left = 0
        self._losses: list[float] = []
        self._resting: list[nn.Module] = []

    def hello(self, trainer: Trainer) -> dict[str, Any]:
        """Return what the rank's first report contains, in addition to rank and world size."""
        return {}

    @abstractmethod
    def obey(self, order: Mapping[str, Any]) -> None:
        """Carry out an order; setting ``_left`` makes the training run that many steps."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.max_epochs = -1
        # Compiled code draws other random numbers than plain code; the losses to compare must not depend on them.
        self._resting = [module for module in pl_module.modules() if isinstance(module, DROPOUT)]
        for module in self._resting:
            module.eval()
        for schedule in trainer.strategy.lr_scheduler_configs:
            # A schedule may be made for fewer steps than the trial needs, or need the result of a validation.
            schedule.frequency = sys.maxsize
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

    def note_loss(self, outputs: Any) -> bool:
        """Store the loss of a step among the first :data:`COMPARED_STEPS` steps; 0 if the module returns no loss.

        Returns:
            Whether this step was the last of these steps. Dropout is active again from then on.
        """
        if len(self._losses) == COMPARED_STEPS:
            return False
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._losses.append(float(loss) if isinstance(loss, Tensor) else 0.0)
        if len(self._losses) < COMPARED_STEPS:
            return False
        for module in self._resting:
            module.train()
        return True

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a report to the process that measures."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")


class TrialCLI(CLI):
    """Command line of a trial's rank, which trains as ``fit`` does, for as many steps as are ordered."""

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        self.named = None  # A trial has no checkpoint to go on from.
        trainer = self.config.fit.trainer
        trainer.enable_progress_bar = False
        trainer.max_steps, trainer.max_time, trainer.fast_dev_run, trainer.overfit_batches = -1, None, False, 0.0


def run_rank(kind: Callable[[], object]) -> None:
    """Run a command line as a rank of a trial, and print a line that begins with :data:`FAILED` if the rank fails."""
    quieten()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        kind()
    except Exception as error:
        traceback.print_exc()
        print(f"{FAILED}{explain_run_error(error) or described(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
