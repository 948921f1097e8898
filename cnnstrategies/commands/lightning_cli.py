"""The command line: LightningCLI with the package's defaults, and errors of one line."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.plugins import CheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_info
from omegaconf.errors import OmegaConfBaseException
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from typing_extensions import override

from cnnstrategies.callbacks import (
    BestCheckpoint,
    EpochMetrics,
    GracefulStop,
    PredictionWriter,
    SamplesPerSecond,
    ServerTraffic,
    StartPanel,
    TrainingSummary,
)
from cnnstrategies.checkpoint_check import SameOptimizer, check_weights
from cnnstrategies.checkpoint_io import AtomicCheckpointIO
from cnnstrategies.checkpoint_words import FOUND, WORDS, SameCheckpoint, find_once
from cnnstrategies.classifier import ImageClassifier
from cnnstrategies.cluster.environment import environment_plugins, local_rank
from cnnstrategies.cluster.hosts import Network
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.run_name import keep_version, last_checkpoint, run_name
from cnnstrategies.commands.errors import (
    check_checkpoint,
    check_trainer_names,
    explain_parse_error,
)
from cnnstrategies.commands.factories import Instantiator
from cnnstrategies.commands.failures import explain_build_error, refusal_in
from cnnstrategies.commands.quiet import quieten
from cnnstrategies.commands.refuse import fail, shows_tracebacks
from cnnstrategies.commands.run import ends_together
from cnnstrategies.commands.trainer import Trainer
from cnnstrategies.data import ImageDataModule  # Its package: jsonargparse knows imported classes by short names.
from cnnstrategies.dry_run import check_network
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.processes import told_by_starter

# With parser_mode="omegaconf+", `${...}` follows overrides and works across several --config files.
set_parsing_settings(omegaconf_absolute_to_relative_paths=True)


class ArgumentParser(LightningArgumentParser):
    """Says what is wrong with a configuration in one line and exits with code 2."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        if shows_tracebacks() and ex is not None:
            raise ex
        fail(explain_parse_error(message, sys.argv[1:]))

    @override
    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # For what a class in a class takes, jsonargparse writes the value it has read into an argument again.
        if args is not None and len(args) == 1 and args[0].startswith("--") and args[0].endswith("=None"):
            args = [f"{args[0].removesuffix('None')}null"]
        return super().parse_args(args, *rest, **kwargs)

    @override
    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().add_instantiator(Instantiator(instantiator), *args, **kwargs)


class CLI(LightningCLI):
    """``fit``, ``validate``, ``test`` and ``predict`` from YAML.

    Adds to Lightning's: atomic checkpoints, a stop at a step boundary on Ctrl-C and SIGTERM, a panel at the start in
    place of ModelSummary, samples/s, a summary with curves, and predictions as CSV. A callback in ``trainer.callbacks``
    replaces the default of its class.

    Args:
        run: Run the subcommand; else, for commands that build model and data but no trainer, there are none.
    """

    def __init__(self, run: bool = True) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            parser_class=ArgumentParser,
            save_config_callback=SaveConfigCallback if run else None,
            save_config_kwargs={"overwrite": True},
            trainer_class=Trainer,
            seed_everything_default=1,
            run=run,
        )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        every = {**LightningCLI.subcommands(), "quantize": {"model", "datamodule"}}
        # Building the parsers is much of a start: that of the one that is asked for will do.
        asked = [name for name in sys.argv[1:2] if name in every]
        return {name: every[name] for name in asked or every}

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # With allow_abbrev, argparse takes --trainer.max_epoch for --trainer.max_epochs.
        return super().init_parser(**{**kwargs, "parser_mode": "omegaconf+", "allow_abbrev": False})

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(BestCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.enable_version_counter": False,
                # StartPanel counts the parameters too.
                "trainer.enable_model_summary": False,
            }
        )
        parser.add_class_arguments(PredictionWriter, "predictions")
        parser.add_class_arguments(GracefulStop, "stop")
        # What `submit` reads, so that one file serves both.
        parser.add_class_arguments(ClusterOptions, "cluster")
        parser.add_class_arguments(Network, "network")

    @override
    def _parse_ckpt_path(self) -> None:
        """Do nothing: the configuration decides.

        Lightning overrides the model's configuration with the checkpoint's hyperparameters here, silently, also
        what was given on the command line. The name is private, and `tests/test_lightning_private.py` watches it.
        """

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        check_trainer_names(config.trainer.strategy, config.trainer.accelerator)
        if self.subcommand == "quantize":
            check_checkpoint(config.ckpt_path, words=())
        else:
            check_checkpoint(config.ckpt_path)
        if (name := run_name()) is not None:
            keep_version(config.trainer, name)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:
            if shows_tracebacks():
                raise
            fail(explain_build_error(error))

    @override
    def after_instantiate_classes(self) -> None:
        # Each rank checks again in `setup`; here no process has been started yet.
        if isinstance(self.model, ImageClassifier):
            self.model.check_data(self.datamodule)
            if local_rank() == 0:
                check_network(self.model, self.datamodule, training=self.subcommand in ("fit", None))
        if isinstance(self.datamodule, ImageDataModule) and self.trainer is not None:
            self.datamodule.check_trainer(self.trainer)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        config = self.config_init[self.subcommand]
        plugins = _as_list(config.trainer.plugins)
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        plugins += environment_plugins(plugins)
        callbacks = _as_list(config.trainer.callbacks)
        defaults: list[Callback] = [
            StartPanel(),
            EpochMetrics(),
            SamplesPerSecond(),
            ServerTraffic(),
            TrainingSummary(),
            config.predictions,
            config.stop,
        ]
        if config.trainer.logger is not False and not config.trainer.fast_dev_run:
            defaults.append(LearningRateMonitor())
        if config.trainer.enable_checkpointing is not False and not _has(callbacks, ModelCheckpoint):
            # Lightning's `save_last` writes last.ckpt only together with a new best; this one after each epoch.
            last = ModelCheckpoint(config.checkpoint.dirpath, filename="last", enable_version_counter=False)
            defaults += [config.checkpoint, last]
        callbacks += [new for new in defaults if not _has(callbacks, type(new))]
        return super().instantiate_trainer(callbacks=callbacks, plugins=plugins, **kwargs)

    def fit(self, **kwargs: Any) -> None:
        """Train."""
        self._run(self.trainer.fit, **kwargs)

    def validate(self, **kwargs: Any) -> None:
        """Evaluate on the validation data."""
        self._run(self.trainer.validate, **kwargs)

    def test(self, **kwargs: Any) -> None:
        """Evaluate on the test data."""
        self._run(self.trainer.test, **kwargs)

    def predict(self, **kwargs: Any) -> None:
        """Predict; the rows go to a file, and not into memory as well."""
        self._run(self.trainer.predict, **{**kwargs, "return_predictions": False})

    def _checkpoint(self, given: Path | str | None) -> Path | str | None:
        """The checkpoint to load: a file in the place of ``last`` and ``best``; the last one of a restarted run."""
        path = given
        said = told_by_starter(FOUND) is not None
        restarts = self.subcommand == "fit" and run_name() is not None
        if restarts:
            path = last_checkpoint(self.trainer) or given
        if path in WORDS:
            path = self.config[self.subcommand].ckpt_path = find_once(str(path), self.trainer)
        if path != given and not said:
            rank_zero_info(f"Going on from {path}" if self.subcommand == "fit" else f"Weights: {path}")
        if restarts or given in WORDS:
            self.trainer.callbacks.append(SameCheckpoint(path))  # type: ignore[attr-defined]
        return path

    def _run(self, function: Callable[..., Any], **kwargs: Any) -> None:
        """Run a trainer's function; when it fails here, end the processes that it started."""
        kwargs["ckpt_path"] = path = self._checkpoint(kwargs["ckpt_path"])
        if path is not None:
            training = self.subcommand == "fit"
            if local_rank() == 0:
                check_weights(self.model, path, kwargs.get("weights_only"), training)
            if training:
                self.trainer.callbacks.append(SameOptimizer(path))  # type: ignore[attr-defined]
        if local_rank() == 0 and self.datamodule is not None:
            # Missing data is found before any process starts; Lightning calls it again, when nothing is left to do.
            self.datamodule.prepare_data()
        with ends_together(self.trainer, self.config_init[self.subcommand].network):
            function(**kwargs)


def main(args: Sequence[str]) -> None:
    """Run ``fit``, ``validate``, ``test``, ``predict`` or ``quantize``.

    Args:
        args: The command line from the command's name on.

    Raises:
        ConfigurationError: A mistake in the configuration.
        SystemExit: The run cannot go on; why has been said.
    """
    # What LightningCLI reads, and what errors are explained by.
    sys.argv[1:] = args
    quieten()
    try:
        CLI()
    except ProcessRaisedException as error:
        # From a spawned or forked rank, whose exception arrives as text.
        if shows_tracebacks():
            raise
        if (refusal := refusal_in(str(error))) is not None:
            raise ConfigurationError(refusal) from error
        print(_with_notes(error), file=sys.stderr)  # Where it was raised, and not where this process has waited.
        sys.exit(1)
    except OmegaConfBaseException as error:
        raise ConfigurationError(explain_build_error(error)) from error
    except (RunEnded, ProcessExitedException) as ended:
        print(f"The run cannot go on: {_with_notes(ended)}", file=sys.stderr)
        sys.exit(1)


def _with_notes(error: Exception) -> str:
    return "; ".join((str(error), *getattr(error, "__notes__", ())))


def _has(callbacks: list[Callback], kind: type) -> bool:
    return any(type(callback) is kind for callback in callbacks)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
