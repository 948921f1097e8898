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
from torch import Tensor, nn
from typing_extensions import override

from cnnstrategies.commands.run.failures import described, explain_run_error
from cnnstrategies.commands.run.lightning_cli import CLI
from cnnstrategies.commands.run.quiet import quieten
from cnnstrategies.planning.tune.trial import COMPARED_STEPS, FAILED, TRIAL

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class StepControl(Callback):
    """Has a training go on for as many steps as it is told to, again and again."""

    def __init__(self) -> None:
        self._left = 0
        self._losses: list[float] = []
        self._resting: list[nn.Module] = []

    def hello(self, trainer: Trainer) -> dict[str, Any]:
        """What a rank says of itself, beside its number."""
        return {}

    @abstractmethod
    def obey(self, order: Mapping[str, Any]) -> None:
        """Do what is ordered; steps by setting ``_left``."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.max_epochs = -1
        # Compilers draw other random numbers; what is compared must not depend on them.
        self._resting = [one for one in pl_module.modules() if isinstance(one, DROPOUT)]
        for one in self._resting:
            one.eval()
        for schedule in trainer.strategy.lr_scheduler_configs:
            schedule.frequency = sys.maxsize  # More steps come than it was made for, and no validation that it may ask.
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
        """Of the first steps, where a module's step gives one; whether this was the last of them."""
        if len(self._losses) == COMPARED_STEPS:
            return False
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._losses.append(float(loss) if isinstance(loss, Tensor) else 0.0)
        if len(self._losses) < COMPARED_STEPS:
            return False
        for one in self._resting:
            one.train()
        return True

    def say(self, message: Mapping[str, Any]) -> None:
        """Answer."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")


class TrialCLI(CLI):
    """``fit`` for as many steps as are ordered, and leaves nothing."""

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        self.named = None  # It leaves nothing from which it could go on.
        trainer = self.config.fit.trainer
        trainer.enable_progress_bar = False
        trainer.max_steps, trainer.max_time, trainer.fast_dev_run, trainer.overfit_batches = -1, None, False, 0.0


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
