"""The command line of a joiner.

Like ``fit``, a joiner reads a configuration and trains. Unlike ``fit``, it does not validate and saves no checkpoints.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    WeightAveraging,
)
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from cnnstrategies.checkpoints.io import AtomicCheckpointIO
from cnnstrategies.cluster.run_identity import declare
from cnnstrategies.commands.run import lightning_cli
from cnnstrategies.commands.run.lightning_cli import CLI
from cnnstrategies.commands.run.trainer import as_list
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.identity import configuration_digest
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.places import JoinPlace, RunAddress
from cnnstrategies.strategies.parameter_server.joining import TOLD_TO_LEAVE, JoiningStrategy
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions
from cnnstrategies.strategies.protocol import facts_of

# Classes of callbacks that a joiner leaves out, because the original workers already save checkpoints, search for
# settings, log and average weights.
LEFT_TO_WORKERS = (BatchSizeFinder, Checkpoint, EarlyStopping, LearningRateFinder, LearningRateMonitor, WeightAveraging)
# Values that a joiner uses for these options of the trainer, instead of the configuration's values.
TRAINER_OPTIONS = {
    "devices": 1,
    "num_nodes": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "profiler": None,
}


class JoinerEnvironment(LightningEnvironment):
    """Cluster environment of a joiner: one process, whose global rank is the id that the coordinator has assigned."""

    creates_processes_externally = True

    def __init__(self, place: JoinPlace) -> None:
        super().__init__()
        self._place = place

    @override
    def world_size(self) -> int:
        return self._place.workers

    @override
    def global_rank(self) -> int:
        return self._place.id

    @override
    def set_world_size(self, size: int) -> None:
        """Ignore the world size that Lightning computes, because it covers this process only."""

    @override
    def set_global_rank(self, rank: int) -> None:
        """Ignore the rank that Lightning computes, because the coordinator has assigned this process's rank."""

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


class JoiningCLI(CLI):
    """Command line of a process that trains as an additional worker of a run.

    Args:
        address: The run's address.
        place: The id, the incarnation and the session that the coordinator has offered to this joiner.
    """

    def __init__(self, address: RunAddress, place: JoinPlace) -> None:
        self.address = address
        self.place = place
        super().__init__()

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        declare(None, configuration_digest(str(self.subcommand), config.as_dict()))
        for name, value in TRAINER_OPTIONS.items():
            config.trainer[name] = value
        config.ckpt_path = config.run_name = None
        self.save_config_callback = None

    @override
    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        config = self.config_init[self.subcommand]
        callbacks = as_list(config.trainer.callbacks)
        kept = [callback for callback in callbacks if not is_for_others(callback)]
        if left := [type(callback).__name__ for callback in callbacks if callback not in kept]:
            print(
                f"Only the run's original workers run these callbacks: {', '.join(left)}", file=sys.stderr, flush=True
            )
        self._strategy = JoiningStrategy(server_options_of(config.trainer.strategy), self.address, self.place)
        plugins = [AtomicCheckpointIO(), JoinerEnvironment(self.place)]
        return super(CLI, self).instantiate_trainer(callbacks=kept, plugins=plugins, strategy=self._strategy, **kwargs)

    @override
    def _run(self, function: Callable[..., Any], **kwargs: Any) -> None:
        if self.datamodule is not None:
            self.datamodule.prepare_data()
        strategy = self._strategy
        try:
            while not (strategy.leaving or self.trainer.should_stop):
                function(self.model, datamodule=self.datamodule)
            reason = TOLD_TO_LEAVE if strategy.leaving else "training ended"
        except RunEnded as ended:
            if not ended.clean:
                raise
            reason = str(ended)
        work = f"{len(strategy.epochs)} epochs, {strategy.batches} batches, {strategy.samples} samples"
        print(
            f"Joined the run at {self.address.coordinator} and worked on {work}; {reason}", file=sys.stderr, flush=True
        )


def is_for_others(callback: Callback) -> bool:
    """Return whether a joiner leaves out a callback. The run's original workers already run such a callback.

    The result is True for the classes in `LEFT_TO_WORKERS`, and for callbacks that monitor a value like ``val_loss``.
    """
    return isinstance(callback, LEFT_TO_WORKERS) or getattr(callback, "monitor", None) is not None


def server_options_of(strategy: Any) -> ParameterServerOptions:
    """Return the options of the parameter servers from a configuration's strategy.

    Args:
        strategy: The strategy's object or registered name.

    Raises:
        ConfigurationError: The strategy does not use parameter servers.
    """
    built = StrategyRegistry.get(strategy) if isinstance(strategy, str) and strategy in StrategyRegistry else strategy
    options = facts_of(built).server_options
    if options is None:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise ConfigurationError(
            f"trainer.strategy={name}: a process can join only a run with the strategy parameter_server; give the "
            "configuration of the run to join"
        )
    return options


def run(address: RunAddress, place: JoinPlace, arguments: Sequence[str]) -> None:
    """Train as a joiner until the run is over or this process gets a signal.

    Args:
        address: The run's address.
        place: The id, the incarnation and the session that the coordinator has offered to this joiner.
        arguments: Command-line arguments of the configuration.
    """
    lightning_cli.main(["fit", *arguments], partial(JoiningCLI, address, place))
