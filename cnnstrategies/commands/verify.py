"""``cnnstrategies verify``: whether a strategy trains the same model as one device, tried on the user's own module."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from cnnstrategies.commands.front.options import VerifyOptions
from cnnstrategies.commands.front.refuse import show
from cnnstrategies.commands.run import lightning_cli
from cnnstrategies.commands.run.errors import check_trainer_names
from cnnstrategies.commands.run.trainer import as_list
from cnnstrategies.verifying.recorder import Recorder, Role, replay, settle
from cnnstrategies.verifying.runs import QUIET, TrainingError, epochs_for, keeper, verdict_of

ROLE = "CNNSTRATEGIES_VERIFY"  # Environment variable: which of the runs the processes of a strategy belong to.

PRINTS = {"--help", "--print_config"}  # Nothing is run.


class VerifiedCLI(lightning_cli.CLI):
    """One of the runs that are compared: ``fit`` for a few steps, with the hooks and callbacks of the user."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(VerifyOptions, None)

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        check_trainer_names(config.trainer.strategy, config.trainer.accelerator)
        self.role = Role.of_text(os.environ[ROLE])
        settings = {**QUIET, "max_steps": config.steps, "max_time": None, "precision": None, "logger": False}
        settings["max_epochs"] = epochs_for(config.trainer.max_epochs, config.steps)
        if self.role.of is not None:
            settings |= {"strategy": "auto", "devices": 1, "num_nodes": 1, "limit_train_batches": None}
        for name, value in settings.items():
            config.trainer[name] = value
        self.save_config_callback = None

    @override
    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        given = self.config_init[self.subcommand].trainer
        callbacks = [one for one in as_list(given.callbacks) if not isinstance(one, Checkpoint)]
        callbacks.append(Recorder(self.role, settle(self.model)))
        plugins = [*as_list(given.plugins), keeper(self.role)]
        # Not that of `fit`, which adds callbacks and plugins of its own.
        return LightningCLI.instantiate_trainer(self, callbacks=callbacks, plugins=plugins, logger=DummyLogger())

    @override
    def fit(self, **kwargs: Any) -> None:
        if self.role.of is not None:
            replay(self.role, self.model if self.datamodule is None else self.datamodule)
        sys.argv[1] = "verify"  # With which ranks are started that are programs.
        super().fit(**kwargs)


def main(args: Sequence[str]) -> None:
    """Train under the strategy and on one device; exit with 1 where it does not come to the same, or one run fails."""

    def train(role: Role) -> None:
        os.environ[ROLE] = role.as_text()
        lightning_cli.main(["fit", *args[1:]], VerifiedCLI)

    if PRINTS.intersection(args):
        lightning_cli.main(["fit", *args[1:]], VerifiedCLI)
        return
    if ROLE in os.environ:  # A rank of the strategy.
        train(Role.of_text(os.environ[ROLE]))
        return
    try:
        verdict = verdict_of(train)
    except TrainingError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    show(str(verdict))
    sys.exit(0 if verdict.equal else 1)
