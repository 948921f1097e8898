"""A trial of ``cnnstrategies sweep`` says how good it is after each validation."""

import json
import os
import socket
from typing import TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.metric_names import is_of_epochs
from cnnstrategies.sweeping.talk import METRIC, SOCKET


class SweepReport(Callback):
    """Reports the metric after each validation; all ranks stop when the answer is that the trial is bad."""

    def __init__(self) -> None:
        self._talk: TextIO | None = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        name = os.environ[METRIC]
        if name not in trainer.callback_metrics:
            logged = ", ".join(sorted(filter(is_of_epochs, trainer.callback_metrics))) or "nothing"
            raise ConfigurationError(f"metric: a validation ends without {name!r}; what was logged: {logged}")
        value = float(trainer.callback_metrics[name])  # Every rank reads: it may reduce it over the ranks.
        bad = trainer.is_global_zero and self._ask(value)
        if trainer.strategy.reduce_boolean_decision(bad, all=False):
            trainer.should_stop = True

    def _ask(self, value: float) -> bool:
        if self._talk is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(os.environ[SOCKET])
            self._talk = connection.makefile("rw")
        self._talk.write(json.dumps({"value": value}) + "\n")
        self._talk.flush()
        return bool(json.loads(self._talk.readline())["prune"])
