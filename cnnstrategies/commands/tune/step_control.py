"""Common code of the ranks in a trial, which is a training whose steps ``tune`` or ``scaling`` measures.

A Unix socket connects each rank to the measuring process, whose code is in :mod:`cnnstrategies.planning.tune.trial`.
The measuring process sends commands, for example to make a number of steps. The ranks reply with reports. Each command
and each report is a line with a JSON object.
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
from cnnstrategies.recording.steps import loss_of

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class StepControl(Callback):
    """Callback that makes a training wait between steps for commands of the measuring process.

    After a command the training makes the requested number of steps, and then waits for the next command.
    """

    def __init__(self) -> None:
        self._left = 0  # Number of steps that the training must still make for the current command.
        self._losses: list[float] = []  # Losses of the first `COMPARED_STEPS` steps.
        self._resting: list[nn.Module] = []  # Dropout modules, which are inactive during the first steps.

    def hello(self, trainer: Trainer) -> dict[str, Any]:
        """Return the entries of this rank's first report in addition to the rank and the world size."""
        return {}

    @abstractmethod
    def execute(self, command: Mapping[str, Any]) -> None:
        """Execute a command of the measuring process.

        To make the training run some steps, set ``_left`` to the number of steps.
        """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.max_epochs = -1
        # The random numbers of dropout differ between compiled and eager code. Dropout is therefore inactive at first,
        # so that the losses of compiled and eager code can be compared.
        self._resting = [module for module in pl_module.modules() if isinstance(module, DROPOUT)]
        for module in self._resting:
            module.eval()
        for schedule in trainer.strategy.lr_scheduler_configs:
            # A learning-rate schedule may end before the trial does, or may need the result of a validation. With this
            # frequency a schedule never makes a step.
            schedule.frequency = sys.maxsize
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[TRIAL])
        self._commands = self._connection.makefile("r")
        self.say({"rank": trainer.global_rank, "world": trainer.world_size, **self.hello(trainer)})

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        while not self._left:
            line = self._commands.readline()
            command = json.loads(line) if line else {"end": True}
            if "end" in command:
                trainer.should_stop = True
                return
            self.execute(command)

    def note_loss(self, outputs: Any) -> bool:
        """Store the loss of a step, for the first :data:`COMPARED_STEPS` steps.

        After the last of these steps, make dropout active again.

        Args:
            outputs: Result of the module's ``training_step``. If it contains no loss, 0 is stored.

        Returns:
            Whether this step was the last one whose loss is stored.
        """
        if len(self._losses) == COMPARED_STEPS:
            return False
        loss = loss_of(outputs)
        self._losses.append(float(loss) if isinstance(loss, Tensor) else 0.0)
        if len(self._losses) < COMPARED_STEPS:
            return False
        for module in self._resting:
            module.train()
        return True

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a report to the measuring process, as a line of JSON."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")


class TrialCLI(CLI):
    """Command line of a rank in a trial. It trains like ``fit``, without limits on steps, epochs or time."""

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        self.named = None  # A trial must not continue from a checkpoint of an earlier run with the same name.
        trainer = self.config.fit.trainer
        trainer.enable_progress_bar = False
        trainer.max_steps, trainer.max_time, trainer.fast_dev_run, trainer.overfit_batches = -1, None, False, 0.0


def run_rank(kind: Callable[[], object]) -> None:
    """Run a command line as a rank of a trial.

    If the rank fails, print a line that begins with :data:`FAILED` and gives the reason, and exit with code 1.

    Args:
        kind: Class of the command line.
    """
    quieten()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        kind()
    except Exception as error:
        traceback.print_exc()
        print(f"{FAILED}{explain_run_error(error) or described(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
