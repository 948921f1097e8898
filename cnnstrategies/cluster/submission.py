"""A configuration that ``submit`` sends to a launcher."""

import itertools
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule

from cnnstrategies.cluster.job import Size, interpreter_words, setup_lines
from cnnstrategies.cluster.launchers import ClusterJob, Launcher, launchers
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.run_folder import CHECKPOINTS, checkpoint_arguments, keep_version, refuse_anothers
from cnnstrategies.errors import ConfigurationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions

ALWAYS_READ = frozenset({"job_name", "setup", "python", "folder"})  # Keys of `cluster` that every launcher reads.


@dataclass(frozen=True)
class Submission:
    """A checked configuration that ``submit`` hands to a launcher.

    Attributes:
        config: The parsed configuration.
        dump: Writes a configuration as YAML.
        datamodule: The run's data; None if the module has loaders of its own.
        options: The section ``cluster``.
        size: Number of nodes, processes and GPUs.
        server_options: Options of the run's parameter servers; None without parameter servers.
    """

    config: Namespace
    dump: Callable[[Namespace], str]
    datamodule: LightningDataModule | None
    options: ClusterOptions
    size: Size
    server_options: "ParameterServerOptions | None"

    def job(self, launcher: Launcher, command: str) -> ClusterJob:
        """Return the job of this run on a launcher.

        Args:
            launcher: A launcher that takes submissions.
            command: The command line of ``submit``, for people who read the job.

        Raises:
            ConfigurationError: The launcher cannot run it, or would start it again without checkpoints.
        """
        restart, trainer = launcher.restart(self.options), self.config.trainer
        if restart is not None and (trainer.enable_checkpointing is False or trainer.fast_dev_run):
            raise ConfigurationError(
                f"trainer.enable_checkpointing=false or fast_dev_run: without checkpoints {restart.subject} would "
                f"start from the beginning each time; {restart.remedy}"
            )
        return launcher.job(self, command)

    def ignored_keys(self, launcher: Launcher) -> list[str]:
        """Return the keys of ``cluster`` that the configuration sets and the launcher does not read."""
        default = ClusterOptions()
        sections = {other.name for other in launchers()}  # A launcher's own section; one file serves all of them.
        names = [field.name for field in fields(ClusterOptions)]
        read = launcher.reads | ALWAYS_READ | sections
        changed = [name for name in names if getattr(self.options, name) != getattr(default, name)]
        return [f"cluster.{name}" for name in changed if name not in read]

    @property
    def checkpoints(self) -> str | None:
        """The directory that the configuration names for its checkpoints; None if it names none."""
        directory: str | None = checkpoint_arguments(self.config)[0].dirpath
        return directory

    def prepare_data(self) -> None:
        """Look at the data on this machine before a job waits in a queue, unless ``cluster.check_data`` is false."""
        if self.options.check_data and self.datamodule is not None:
            self.datamodule.prepare_data()

    def run_folder(self, parent: Path) -> Path:
        """Return the path of the run's folder: the folder with the run's name, or a new folder for an unnamed run.

        Args:
            parent: Parent directory, on a disk that all nodes see.

        Raises:
            ConfigurationError: The checkpoints' directory belongs to another run, or the nodes need keys and the
                configuration names no file with keys.
        """
        if self.server_options is not None and self.size.nodes + self.options.server_nodes > 1:
            self.server_options.encrypted("tcp://first-node:15000")  # Raises an error if a key file is missing.
        parent = parent.resolve()
        name: str | None = self.config.run_name
        if name is None:
            stem = f"{self.options.job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
            # Two submissions within one second get different folders.
            names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
            name = next(name for name in names if not (parent / name).exists())
        if self.checkpoints is not None:
            refuse_anothers(Path(self.checkpoints) / "last.ckpt", name)
        return parent / name

    def script_lines(self, folder: Path, start: str) -> str:
        """Return the lines of a script that set up the environment and run ``fit``.

        They read the keys setup, python, venv, container and cpus_per_task of the section ``cluster``.

        Args:
            folder: The run folder, with ``config.yaml``.
            start: The words that start the ranks, such as ``srun --ntasks-per-node=4``.
        """
        config = shlex.quote(str(folder / "config.yaml"))
        interpreter = interpreter_words(self.options, sys.executable)
        return f"{setup_lines(self.options)}{start} {interpreter} -m cnnstrategies fit --config {config}\n"

    def text(self, folder: PurePath, changes: Mapping[str, Any]) -> str:
        """Return the whole configuration as YAML, so that later changes of files do not reach a job in the queue.

        Args:
            folder: The run folder as the run's processes see it. Checkpoints go there unless the configuration names
                another directory.
            changes: Values that the launcher decides, by key.
        """
        config = self.config.clone()
        config.pop("config", None)
        for arguments in checkpoint_arguments(config):
            if arguments.dirpath is None:
                arguments.dirpath = str(folder / CHECKPOINTS)
        config.run_name = folder.name
        keep_version(config.trainer, config.run_name)
        for key, value in changes.items():
            config[key] = value
        return self.dump(config)
