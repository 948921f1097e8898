"""The command line of configurations: LightningCLI with this package's defaults, and errors of one line."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from typing_extensions import override

from cnnstrategies._lightning_private import keep_batches
from cnnstrategies.checkpoints.check import check_weights
from cnnstrategies.cluster.environment import check_world, local_rank
from cnnstrategies.cluster.run_folder import configuration_hash, find_run, place
from cnnstrategies.commands.arguments.keys import configured_keys, read_yaml
from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.arguments.refuse import shows_tracebacks
from cnnstrategies.commands.run.errors import (
    CHECKPOINT_WORDS,
    check_checkpoint,
    check_functions,
    check_names,
    check_nulls,
    check_trainer_names,
    located,
    none_given,
    parameters_of,
)
from cnnstrategies.commands.run.failures import explain_build_error, explain_run_error
from cnnstrategies.commands.run.outcome import ends_together
from cnnstrategies.commands.run.parser import ArgumentParser
from cnnstrategies.commands.run.quiet import quieten
from cnnstrategies.commands.run.start_from import WORDS, check_trained, checkpoint_of
from cnnstrategies.commands.run.strategy_names import check_recipe_names, with_help_of_class
from cnnstrategies.commands.run.trainer import Trainer, add_sections, all_callbacks, all_plugins
from cnnstrategies.data import ImageDataModule  # The whole package: jsonargparse finds imported classes by short names.
from cnnstrategies.data.image_folder import images_of_folder
from cnnstrategies.deploy.inference import give_predict_step
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.network_module import NetworkModule
from cnnstrategies.paramserver.core.view import RemovedError, RunEnded, ServersUnreachableError
from cnnstrategies.pretrained import trained_with
from cnnstrategies.runtime.processes import ended_by

NUM_CLASSES = "model.init_args.num_classes"
FROM_WEIGHTS = ("quantize", "export")  # subcommands that load a checkpoint's weights, and neither train nor evaluate


class SavedConfiguration(SaveConfigCallback):
    """Lightning's callback that saves the configuration, changed so that loggers without a folder do not make it fail.

    A logger that sends runs to an MLflow server has no folder, for example.
    """

    @override
    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        # `log_dir` is a broadcast, so that every rank must read it.
        self.save_to_log_dir = self.save_to_log_dir and trainer.log_dir is not None
        super().setup(trainer, pl_module, stage)


LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


class CLI(LightningCLI):
    """``fit``, ``validate``, ``test``, ``predict``, ``quantize`` and ``export`` from YAML.

    In addition to Lightning's command line: atomic checkpoints, a stop at a step boundary on Ctrl-C and SIGTERM, a
    panel at the start in place of ModelSummary, samples/s, a summary with curves, and predictions as CSV. A callback in
    ``trainer.callbacks`` replaces the default callback of its class.

    Args:
        run: Whether the command line has subcommands; false for commands that build no trainer.

    Attributes:
        named: Name of the run, if it can be restarted.
    """

    named: str | None = None

    def __init__(self, run: bool = True) -> None:
        super().__init__(
            LightningModule,  # The class of the data is left out, because a module may have its own loaders.
            subclass_mode_model=True,
            auto_configure_optimizers=False,
            parser_class=ArgumentParser,
            save_config_callback=SavedConfiguration if run else None,
            save_config_kwargs={"overwrite": True},
            trainer_class=Trainer,
            seed_everything_default=1,
            run=run,
        )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        skipped_arguments = {**LightningCLI.subcommands(), **{name: {"model", "datamodule"} for name in FROM_WEIGHTS}}
        skipped_arguments = {
            name: skipped | {option.name for option in COMMANDS[name].options}
            for name, skipped in skipped_arguments.items()
        }
        # Building parsers takes much of a start, so only the requested subcommand gets a parser.
        requested = [name for name in sys.argv[1:2] if name in skipped_arguments]
        return {name: skipped_arguments[name] for name in requested or skipped_arguments}

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Add the options that the command declares.

        The trainer's method of the same name gets them, as it gets its other arguments. The name is private, and mypy
        watches it.
        """
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        added = parser.add_class_arguments(COMMANDS[subcommand].declaration, None, instantiate=False)
        self._subcommand_method_arguments[subcommand] += added
        return parser

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # With allow_abbrev, argparse takes --trainer.max_epoch for --trainer.max_epochs.
        return super().init_parser(**{**kwargs, "parser_mode": "omegaconf+", "allow_abbrev": False})

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_sections(parser)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        words = sys.argv[1:] = with_help_of_class(sys.argv[1:])
        keys = configured_keys(words)
        check_recipe_names(keys)
        check_names(keys)
        check_nulls(keys)
        if leaves_out_classes(words):
            # The data must be built to know their number of classes, and must be parsed before: with a provisional
            # number, because other keys may refer to the number.
            sys.argv[1:] = [*words, f"--{NUM_CLASSES}=2"]
            super().parse_arguments(parser, args)
            # Ranks that are started as programs inherit these words, and so the number.
            with _explains_failure():
                sys.argv[1:] = [*words, f"--{NUM_CLASSES}={self._built_alone('data').num_classes}"]
        super().parse_arguments(parser, args)
        command = self.config.get("subcommand")
        config = self.config[command] if command else self.config
        check_trainer_names(config.trainer)
        check_functions(config.get("model"))

    def _built_alone(self, section: str) -> Any:
        """Return the object that one section of the configuration describes, built without the other sections."""
        command, kind = self.config.get("subcommand"), type(self.config)
        alone = kind({section: (self.config[command] if command else self.config)[section]})
        built = self.parser.instantiate_classes(kind({"subcommand": command, command: alone}) if command else alone)
        return (built[command] if command else built)[section]

    @override
    def _parse_ckpt_path(self) -> None:
        """Do nothing: the configuration decides.

        Lightning's method silently replaces the model's configuration, and even options of the command line, by the
        checkpoint's hyperparameters. The name is private, and `tests/test_lightning_private.py` watches it.
        """

    @override
    def _dump_config(self) -> None:
        """Store the arguments of modules, as Lightning does, but without validating the configuration a second time.

        The name is private, and mypy watches it.
        """
        if not hasattr(self, "config_dump"):
            text = self.parser.dump(
                self.config, skip_link_targets=False, skip_none=False, skip_validation=True, format="yaml"
            )
            config = read_yaml(text)
            self.config_dump = config[self.config.subcommand] if "subcommand" in self.config else config

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        check_checkpoint(config.ckpt_path, words=WORDS if self.subcommand in FROM_WEIGHTS else CHECKPOINT_WORDS)
        self.named = find_run(config.run_name, configuration_hash(config), os.environ)
        if self.named is not None:
            place(config, self.named)

    @override
    def instantiate_classes(self) -> None:
        with _explains_failure():
            super().instantiate_classes()

    @override
    def after_instantiate_classes(self) -> None:
        self._prepare_as_trained()
        # Each rank repeats these checks in `setup`. A failure here comes before any process is started.
        if self.trainer is not None:
            check_world(self.trainer)
        if self.datamodule is None and not is_overridden(self._own_loader(), self.model):
            raise ConfigurationError(none_given({"data"}))
        if isinstance(self.model, NetworkModule):
            self.model.check_data(self.datamodule)
        if self.trainer is not None and isinstance(self.datamodule, ImageDataModule):
            self.datamodule.check_trainer(self.trainer)

    def _own_loader(self) -> str:
        """Return the method with which a module may load its own data; empty if this command has none."""
        return LOADERS.get(str(self.subcommand), "")

    def _prepare_as_trained(self) -> None:
        """Give the data module the preprocessing with which the network's pretrained weights were trained, if any."""
        if not isinstance(self.model, NetworkModule) or not isinstance(self.datamodule, ImageDataModule):
            return
        config = self.config[self.subcommand] if self.subcommand else self.config
        network = config.model.init_args.get("network")
        builder, arguments = "", {}
        if hasattr(network, "class_path"):
            builder = network.class_path
            arguments = {**(network.get("init_args") or {}), **(network.get("dict_kwargs") or {})}
        preparation = trained_with(self.model.network, builder, arguments)
        if preparation is not None:
            self.datamodule.prepare_as(preparation)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        config = self.config_init[self.subcommand]
        trainer = super().instantiate_trainer(callbacks=all_callbacks(config), plugins=all_plugins(config), **kwargs)
        keep_batches(trainer)
        return trainer

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
        """Predict; the rows are written to a file and not kept in memory."""
        give_predict_step(self.model)
        if (folder := self.config_init[self.subcommand].predictions.images) is not None:
            # Each rank looks for the images again. A failure here comes before any process is started.
            images_of_folder(self.datamodule, folder)
        self._run(self.trainer.predict, **{**kwargs, "return_predictions": False})

    def _run(self, function: Callable[..., Any], **kwargs: Any) -> None:
        """Run a trainer's function; if the function fails in this process, end the processes that it started."""
        training = self.subcommand == "fit"
        ckpt_path = kwargs["ckpt_path"]
        config = self.config[self.subcommand]
        kwargs["ckpt_path"] = path = checkpoint_of(self.trainer, ckpt_path, training, self.named)
        # The saved configuration names the file instead of the word.
        if ckpt_path in WORDS:
            config.ckpt_path = path
        if local_rank() == 0 and path is not None:
            check_weights(self.model, path, kwargs.get("weights_only"), training)
        elif local_rank() == 0 and not training:
            check_trained(str(self.subcommand), self.model, partial(self._built_alone, "model"))
        if local_rank() == 0 and self.datamodule is not None:
            # Missing data are found before any process starts. Lightning's own call later has nothing left to do.
            self.datamodule.prepare_data()
        with ends_together(self.trainer, self.config_init[self.subcommand].interconnect):
            function(**kwargs)


@contextlib.contextmanager
def _explains_failure() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigurationError(explain_build_error(error)) from error


def leaves_out_classes(words: Sequence[str]) -> bool:
    """Whether a configuration leaves out the model's number of classes, so that the data must give it.

    This holds for this package's modules and subclasses of them, with this package's data modules. The data's own
    number of classes may not be a reference, as in a recipe for masks.
    """
    # Each file and option is read by itself: a number of classes counts even if a later file replaces the model's
    # class.
    alone = [key.path for place in range(len(words)) for key in configured_keys(words[place : place + 2])]
    if {NUM_CLASSES, "model.num_classes"} & {*alone} or any(word.startswith("--print_config") for word in words):
        return False
    keys = {key.path: key.value for key in configured_keys(words)}
    if any("${" in str(keys.get(path)) for path in ("data.init_args.num_classes", "data.num_classes")):
        return False
    model, data = (located(keys.get(f"{section}.class_path") or keys.get(section)) for section in ("model", "data"))
    ours = isinstance(model, type) and issubclass(model, NetworkModule) and "num_classes" in parameters_of(model)
    return ours and isinstance(data, type) and issubclass(data, ImageDataModule)


def main(args: Sequence[str], kind: Callable[[], CLI] = CLI) -> None:
    """Run ``fit``, ``validate``, ``test``, ``predict``, ``quantize`` or ``export``."""
    # LightningCLI reads sys.argv, and so does the explanation of errors.
    sys.argv[1:] = args
    quieten()
    try:
        kind()
    except (RunEnded, ServersUnreachableError, RemovedError, ProcessExitedException) as ended:
        if getattr(ended, "clean", False):  # This worker was killed, and the run ended before the worker was restarted.
            print(f"Nothing is left to do: {ended}", file=sys.stderr)
            sys.exit(0)
        words = str(ended)
        if isinstance(ended, ProcessExitedException) and ended.signal_name is not None:
            words = ended_by(ended.error_index, ended.exit_code)
        print(f"The run cannot go on: {_with_notes(ended, words)}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if shows_tracebacks() or isinstance(error, ConfigurationError):
            raise
        if (line := explain_run_error(error)) is not None:
            raise ConfigurationError(line) from error
        if not isinstance(error, ProcessRaisedException):
            raise
        # The text has the traceback of a spawned or forked rank; this process's own shows only where it waited.
        print(_with_notes(error, str(error)), file=sys.stderr)
        sys.exit(1)


def _with_notes(error: Exception, words: str) -> str:
    return "; ".join((words, *getattr(error, "__notes__", ())))


class ModelAndData(CLI):
    """Command line that parses what ``fit`` parses, and builds the model and the data but no trainer.

    Args:
        command: Name of the command.
        words: Command-line arguments of the configuration, without the command's own options.
    """

    def __init__(self, command: str, words: Sequence[str]) -> None:
        # LightningCLI reads sys.argv, and so does the explanation of errors.
        sys.argv = [f"cnnstrategies {command}", *words]
        quieten()
        super().__init__(run=False)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--ckpt_path", type=Path | None, default=None, help="A checkpoint to start from.")

    def data(self) -> LightningDataModule:
        """Return the data module.

        Raises:
            ConfigurationError: The configuration has no data; the command cannot use a module's own loaders.
        """
        if not isinstance(self.datamodule, LightningDataModule):
            raise ConfigurationError(none_given({"data"}))
        return self.datamodule

    @override
    def _own_loader(self) -> str:
        return LOADERS["fit"]

    @override
    def before_instantiate_classes(self) -> None:
        """Check nothing, because no trainer is built."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


def device_of(accelerator: Any) -> torch.device:
    """Return the device of this machine that a configuration's accelerator means.

    Raises:
        ConfigurationError: This machine has no such device.
    """
    accelerator_device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "cpu" or (accelerator == "auto" and accelerator_device is None):
        return torch.device("cpu")
    if accelerator_device is None:
        raise ConfigurationError(
            f"trainer.accelerator={accelerator}: this machine has none, and this command measures on the real device: "
            "run the command where the device is, or give --trainer.accelerator cpu"
        )
    return accelerator_device
