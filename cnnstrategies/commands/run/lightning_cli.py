"""The command line that runs a configuration: LightningCLI with this package's defaults and error messages."""

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
from cnnstrategies.cluster.run_identity import declare
from cnnstrategies.commands.arguments.checkpoint_path import CHECKPOINT_KEYWORDS, check_checkpoint
from cnnstrategies.commands.arguments.keys import configured_keys, none_given, read_yaml
from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.arguments.refuse import shows_tracebacks
from cnnstrategies.commands.run.errors import (
    check_functions,
    check_names,
    check_nulls,
    check_strategy_class,
    check_trainer_names,
    located,
    parameters_of,
)
from cnnstrategies.commands.run.failures import explain_build_error, explain_run_error
from cnnstrategies.commands.run.image_channels import check_channels
from cnnstrategies.commands.run.imports import check_imports
from cnnstrategies.commands.run.outcome import ends_together
from cnnstrategies.commands.run.ownership import owns_folders
from cnnstrategies.commands.run.parser import ArgumentParser
from cnnstrategies.commands.run.quiet import quieten
from cnnstrategies.commands.run.start_from import KEYWORDS, check_trained, checkpoint_of
from cnnstrategies.commands.run.strategy_names import check_recipe_names, with_help_of_class
from cnnstrategies.commands.run.trainer import Trainer, add_sections, all_callbacks, all_plugins

# All data modules are imported, so that a configuration may name them without their module.
from cnnstrategies.data import ImageDataModule
from cnnstrategies.data.image_folder import images_of_folder
from cnnstrategies.deploy.inference import give_predict_step
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.guarding.loading import watch_loading
from cnnstrategies.identity import StrangerError, configuration_digest
from cnnstrategies.models.network_module import NetworkModule
from cnnstrategies.paramserver.core.view import RemovedError, RunEnded, ServersUnreachableError
from cnnstrategies.pretrained import trained_with
from cnnstrategies.runtime.processes import ended_by
from cnnstrategies.strategies.exact_means import average_exactly
from cnnstrategies.strategies.streams import divide_stream
from cnnstrategies.strategies.unfreezing import follow_unfreezing

NUM_CLASSES = "model.init_args.num_classes"
# Subcommands that only load the weights of a checkpoint, and neither train nor evaluate.
FROM_WEIGHTS = ("quantize", "export")


class SavedConfiguration(SaveConfigCallback):
    """Callback that saves the configuration in the log directory, or does nothing without a log directory.

    Commands other than ``fit`` do not replace a configuration, because ``fit`` cannot read the options of theirs.
    Lightning's own callback fails without a log directory, for example if the logger sends runs to an MLflow server.
    """

    @override
    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning broadcasts the value of `log_dir`, so every rank must read the property.
        folder = trainer.log_dir
        self.save_to_log_dir = self.save_to_log_dir and folder is not None
        if self.save_to_log_dir and stage != "fit":
            # A command with the configuration of a run has the run's folder, in which the configuration stays.
            exists = (Path(str(folder)) / self.config_filename).is_file()
            self.save_to_log_dir = not trainer.strategy.broadcast(exists)
        if self.config.get("weights_only", 0) is None:
            del self.config["weights_only"]  # ``export`` and ``quantize`` always load weights only, without this key.
        super().setup(trainer, pl_module, stage)


# Maps a subcommand to the method with which a module loads its own data if there is no data module.
LOADERS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


class CLI(LightningCLI):
    """Command line of ``fit``, ``validate``, ``test``, ``predict``, ``quantize`` and ``export``.

    It has more defaults than LightningCLI: atomic checkpoints, a stop between two steps after Ctrl-C or SIGTERM, a
    start panel instead of ModelSummary, samples/s, a summary with curves, and predictions as a CSV file. To change a
    default callback, add a callback of its class to ``trainer.callbacks``.

    Args:
        run: Whether the command line has subcommands and runs a trainer; False for commands that build no trainer.

    Attributes:
        named: Name of the run; None if the run has no name and cannot be restarted.
    """

    named: str | None = None

    def __init__(self, run: bool = True) -> None:
        super().__init__(
            LightningModule,  # No class of data modules is given, because a module may load its own data.
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
        # Building the parsers of all subcommands would take much of the start-up time, so only the requested subcommand
        # gets a parser.
        requested = [name for name in sys.argv[1:2] if name in skipped_arguments]
        return {name: skipped_arguments[name] for name in requested or skipped_arguments}

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Return the parser of a subcommand, with the options from the command's declaration.

        Lightning passes the values of these options to the trainer's method for the subcommand, such as
        :meth:`Trainer.quantize`. This method is private in Lightning. If Lightning renames the method, mypy reports an
        error.
        """
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        added = parser.add_class_arguments(COMMANDS[subcommand].declaration, None, instantiate=False)
        self._subcommand_method_arguments[subcommand] += added
        return parser

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # With allow_abbrev, argparse would accept the misspelt option --trainer.max_epoch as an abbreviation of
        # --trainer.max_epochs.
        return super().init_parser(**{**kwargs, "parser_mode": "omegaconf+", "allow_abbrev": False})

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_sections(parser)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        arguments = sys.argv[1:] = with_help_of_class(sys.argv[1:])
        keys = configured_keys(arguments)
        check_recipe_names(keys)
        check_imports(keys)
        check_strategy_class(keys)
        check_names(keys)
        check_nulls(keys)
        if leaves_out_classes(arguments):
            # The number of classes comes from the data module, which is built from the parsed configuration. The
            # first parsing uses a provisional number, because other keys may refer to the number.
            sys.argv[1:] = [*arguments, f"--{NUM_CLASSES}=2"]
            super().parse_arguments(parser, args)
            # Ranks that are started as new programs, not spawned or forked, get these command-line arguments, which
            # include the number of classes.
            with _explains_failure():
                sys.argv[1:] = [*arguments, f"--{NUM_CLASSES}={self._built_alone('data').num_classes}"]
        super().parse_arguments(parser, args)
        command = self.config.get("subcommand")
        config = self.config[command] if command else self.config
        check_trainer_names(config.trainer)
        kind: Any = type(self.config)
        if isinstance(config.trainer.strategy, str) and "." in config.trainer.strategy:
            # jsonargparse leaves an import path without options as a text, but Lightning accepts only registered names
            # as texts. The text is therefore replaced by a class_path.
            config.trainer.strategy = kind(class_path=config.trainer.strategy, init_args=kind())
        check_functions(config.get("model"))

    def _built_alone(self, section: str) -> Any:
        """Build and return the object that a section of the configuration describes, without the other sections."""
        command, kind = self.config.get("subcommand"), type(self.config)
        alone = kind({section: (self.config[command] if command else self.config)[section]})
        built = self.parser.instantiate_classes(kind({"subcommand": command, command: alone}) if command else alone)
        return (built[command] if command else built)[section]

    @override
    def _parse_ckpt_path(self) -> None:
        """Do nothing, so that the model is built from the configuration only.

        Lightning's method would replace the model's configuration by the hyperparameters in the checkpoint, without a
        message, even if the user has set other values on the command line. The method's name is private, and
        `tests/test_lightning_private.py` tests that Lightning has the method.
        """

    @override
    def _dump_config(self) -> None:
        """Store the configuration that Lightning saves with the module, without validating it a second time.

        This method is private in Lightning. If Lightning renames the method, mypy reports an error.
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
        if config.guard is not False:
            watch_loading()  # The module may load weights in its constructor, before the callback exists.
        check_checkpoint(
            config.ckpt_path,
            keywords=KEYWORDS if self.subcommand in FROM_WEIGHTS else CHECKPOINT_KEYWORDS,
            folder=config.trainer.default_root_dir,
        )
        self.named = find_run(config.run_name, configuration_hash(config), os.environ)
        declare(self.named, configuration_digest(str(self.subcommand), config.as_dict()))
        if self.named is not None:
            place(config, self.named)

    @override
    def instantiate_classes(self) -> None:
        with _explains_failure():
            super().instantiate_classes()

    @override
    def after_instantiate_classes(self) -> None:
        self._prepare_as_trained()
        # Each rank repeats these checks in `setup`. The checks are also made here, to fail before any process starts.
        if self.trainer is not None:
            check_world(self.trainer)
            average_exactly(self.trainer)
            follow_unfreezing(self.trainer)
        if self.datamodule is None and not is_overridden(self._own_loader(), self.model):
            raise ConfigurationError(none_given({"data"}))
        if isinstance(self.model, NetworkModule):
            self.model.check_data(self.datamodule)
            if isinstance(self.datamodule, ImageDataModule) and local_rank() == 0:
                check_channels(self.model.network, self.datamodule.image_shape)
        if self.trainer is not None and isinstance(self.datamodule, ImageDataModule):
            self.datamodule.check_trainer(self.trainer)

    def _own_loader(self) -> str:
        """Return the name of the method with which a module loads data for this subcommand.

        Return an empty text if no method loads data for this subcommand.
        """
        return LOADERS.get(str(self.subcommand), "")

    def _prepare_as_trained(self) -> None:
        """Make the data module use the preprocessing of the network's pretrained weights.

        Do nothing if the network has no pretrained weights.
        """
        if not isinstance(self.model, NetworkModule) or not isinstance(self.datamodule, ImageDataModule):
            return
        config = self.config[self.subcommand] if self.subcommand else self.config
        network: Any = (config.model.get("init_args") or {}).get("network")  # A class may have no arguments.
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
        keep_batches(trainer, divide_stream)
        return trainer

    def fit(self, **kwargs: Any) -> None:
        """Train the model."""
        self._run(self.trainer.fit, **kwargs)

    def validate(self, **kwargs: Any) -> None:
        """Evaluate the model on the validation data."""
        self._run(self.trainer.validate, **kwargs)

    def test(self, **kwargs: Any) -> None:
        """Evaluate the model on the test data."""
        self._run(self.trainer.test, **kwargs)

    def predict(self, **kwargs: Any) -> None:
        """Write the model's predictions to a file, without keeping them in memory."""
        give_predict_step(self.model)
        if (folder := self.config_init[self.subcommand].predictions.images) is not None:
            # If the folder has no usable images, this search raises the error before any process starts. Each rank
            # searches again later.
            images_of_folder(self.datamodule, folder)
        self._run(self.trainer.predict, **{**kwargs, "return_predictions": False})

    def _run(self, function: Callable[..., Any], **kwargs: Any) -> None:
        """Run a method of the trainer, such as ``fit``, from the configured checkpoint.

        If the method fails, end all processes that the method has started.

        Args:
            function: The trainer's method.
            **kwargs: Arguments of the method, from the configuration.
        """
        with owns_folders(self.trainer, str(self.subcommand), self.named):
            self._run_as_owner(function, **kwargs)

    def _run_as_owner(self, function: Callable[..., Any], **kwargs: Any) -> None:
        """Do the work of :meth:`_run`, while no other run writes to the folders of this run."""
        training = self.subcommand == "fit"
        ckpt_path = kwargs["ckpt_path"]
        config = self.config[self.subcommand]
        kwargs["ckpt_path"] = path = checkpoint_of(self.trainer, ckpt_path, training, self.named)
        # The saved configuration gets the path of the checkpoint, because `last` or `best` may be another file later.
        if ckpt_path in KEYWORDS:
            config.ckpt_path = path
        if local_rank() == 0 and path is not None:
            check_weights(self.model, path, kwargs.get("weights_only"), training)
        elif local_rank() == 0 and not training:
            check_trained(str(self.subcommand), self.model, partial(self._built_alone, "model"))
        if local_rank() == 0 and self.datamodule is not None:
            # If data is missing, this call raises the error before any process starts. Lightning calls the method again
            # later.
            self.datamodule.prepare_data()
        with ends_together(self.trainer, self.config_init[self.subcommand].interconnect):
            function(**kwargs)


@contextlib.contextmanager
def _explains_failure() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigurationError(explain_build_error(error)) from error


def leaves_out_classes(arguments: Sequence[str]) -> bool:
    """Return whether the model's number of classes must come from the data module.

    The result is True if all of these conditions hold:

    - The configuration does not set the model's number of classes.
    - The configuration does not set the data module's number of classes to a reference (`${...}`).
    - The module and the data module are classes of this package, or subclasses.
    - The command-line arguments do not contain ``--print_config``.

    Args:
        arguments: Command-line arguments of the command.
    """
    # Each file and option is read separately. If they were merged, a later file that replaces the model's class would
    # hide the number of classes in an earlier file.
    alone = [key.path for place in range(len(arguments)) for key in configured_keys(arguments[place : place + 2])]
    if {NUM_CLASSES, "model.num_classes"} & {*alone} or any(
        argument.startswith("--print_config") for argument in arguments
    ):
        return False
    keys = {key.path: key.value for key in configured_keys(arguments)}
    if any("${" in str(keys.get(path)) for path in ("data.init_args.num_classes", "data.num_classes")):
        return False
    model, data = (located(keys.get(f"{section}.class_path") or keys.get(section)) for section in ("model", "data"))
    ours = isinstance(model, type) and issubclass(model, NetworkModule) and "num_classes" in parameters_of(model)
    return ours and isinstance(data, type) and issubclass(data, ImageDataModule)


def main(args: Sequence[str], kind: Callable[[], CLI] = CLI) -> None:
    """Run ``fit``, ``validate``, ``test``, ``predict``, ``quantize`` or ``export``.

    Args:
        args: Command-line arguments, beginning with the command's name.
        kind: Class or function that creates the command-line object.
    """
    # LightningCLI and the error messages read sys.argv, so it must contain the arguments.
    sys.argv[1:] = args
    quieten()
    try:
        kind()
    except (RunEnded, ServersUnreachableError, RemovedError, ProcessExitedException) as ended:
        # `clean` means that the run ended without an error. A worker that was restarted too late has nothing to do.
        if getattr(ended, "clean", False):
            print(f"Nothing is left to do: {ended}", file=sys.stderr)
            sys.exit(0)
        if getattr(ended, "stranger", False):
            raise StrangerError(str(ended)) from ended
        text, *cause = ended.lines if isinstance(ended, RunEnded) else [str(ended)]
        if isinstance(ended, ProcessExitedException) and ended.signal_name is not None:
            text = ended_by(ended.error_index, ended.exit_code, None)
        # The ranks may share a log, so that one call prints all lines.
        print("\n".join((f"The run cannot continue: {_with_notes(ended, text)}", *cause)), file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if shows_tracebacks() or isinstance(error, ConfigurationError):
            raise
        if (line := explain_run_error(error)) is not None:
            raise ConfigurationError(line) from error
        if not isinstance(error, ProcessRaisedException):
            raise
        # The error message contains the traceback of a spawned or forked rank. The traceback of this process is not
        # printed, because this process was only waiting.
        print(*getattr(error, "__notes__", ()), str(error).strip(), sep="\n", file=sys.stderr)
        sys.exit(1)


def _with_notes(error: Exception, text: str) -> str:
    return "; ".join((text, *getattr(error, "__notes__", ())))


class ModelAndData(CLI):
    """Command line that parses a configuration as ``fit`` does, and builds the model and data module but no trainer.

    Args:
        command: Name of the command, for error messages.
        arguments: Command-line arguments of the configuration, without the command's own options.
    """

    def __init__(self, command: str, arguments: Sequence[str]) -> None:
        # LightningCLI and the error messages read sys.argv, so it must contain the arguments.
        sys.argv = [f"cnnstrategies {command}", *arguments]
        quieten()
        super().__init__(run=False)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--ckpt_path", type=Path | None, default=None, help="Checkpoint to start from.")

    def data(self) -> LightningDataModule:
        """Return the data module.

        Raises:
            ConfigurationError: The configuration has no section ``data``. A module's own loaders are not enough.
        """
        if not isinstance(self.datamodule, LightningDataModule):
            raise ConfigurationError(none_given({"data"}))
        return self.datamodule

    @override
    def _own_loader(self) -> str:
        return LOADERS["fit"]

    @override
    def before_instantiate_classes(self) -> None:
        """Do nothing, because the checks of the base class are for commands that run a trainer."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


def device_of(accelerator: Any) -> torch.device:
    """Return the device of this machine for a value of ``trainer.accelerator``.

    Raises:
        ConfigurationError: This machine has no accelerator.
    """
    accelerator_device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "cpu" or (accelerator == "auto" and accelerator_device is None):
        return torch.device("cpu")
    if accelerator_device is None:
        raise ConfigurationError(
            f"trainer.accelerator={accelerator}: this machine has no accelerator, but this command measures on the "
            "real device: run the command on a machine with an accelerator, or give --trainer.accelerator cpu"
        )
    return accelerator_device
