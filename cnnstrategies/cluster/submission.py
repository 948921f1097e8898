"""Configuration of a run that ``submit`` sends to a cluster."""

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
from cnnstrategies.cluster.job_files import JobFiles
from cnnstrategies.cluster.launchers import ClusterJob, Launcher, launchers
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.run_folder import CHECKPOINTS, checkpoint_arguments, keep_version, refuse_anothers
from cnnstrategies.errors import ConfigurationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions

ALWAYS_READ = frozenset({"job_name", "setup", "python", "folder"})  # Keys of the section `cluster` for all launchers.


@dataclass(frozen=True)
class Submission:
    """A checked configuration that ``submit`` passes to a launcher.

    Attributes:
        config: The parsed configuration.
        dump: Function that returns a configuration as YAML.
        datamodule: The data module of the run; None if the LightningModule has its own loaders.
        options: The section ``cluster`` of the configuration.
        size: Number of nodes, processes and GPUs.
        server_options: Options of the run's parameter servers; None if the run has no parameter servers.
    """

    config: Namespace
    dump: Callable[[Namespace], str]
    datamodule: LightningDataModule | None
    options: ClusterOptions
    size: Size
    server_options: "ParameterServerOptions | None"

    def job(self, launcher: Launcher, command: str) -> ClusterJob:
        """Return the job for this run.

        Args:
            launcher: A launcher that accepts submissions.
            command: The command line of ``submit``, for a comment in the job.

        Raises:
            ConfigurationError: The launcher cannot run this configuration, or it would restart the run although the run
                does not save checkpoints.
        """
        restart, trainer = launcher.restart(self.options), self.config.trainer
        if restart is not None and (trainer.enable_checkpointing is False or trainer.fast_dev_run):
            raise ConfigurationError(
                f"trainer.enable_checkpointing=false or fast_dev_run: without checkpoints, {restart.subject} would "
                f"start from the beginning each time; {restart.remedy}"
            )
        return launcher.job(self, command)

    def ignored_keys(self, launcher: Launcher) -> list[str]:
        """Return the keys of the section ``cluster`` that are set in the configuration but ignored by the launcher.

        Sections of other launchers do not count, because one configuration may have sections for several launchers.
        """
        default = ClusterOptions()
        sections = {other.name for other in launchers()}
        names = [field.name for field in fields(ClusterOptions)]
        read = launcher.reads | ALWAYS_READ | sections
        changed = [name for name in names if getattr(self.options, name) != getattr(default, name)]
        return [f"cluster.{name}" for name in changed if name not in read]

    @property
    def checkpoints(self) -> str | None:
        """Directory of the checkpoints, if the configuration sets it; otherwise None."""
        directory: str | None = checkpoint_arguments(self.config)[0].dirpath
        return directory

    def prepare_data(self) -> None:
        """Call the data module's ``prepare_data`` before the job is queued, unless ``cluster.check_data`` is false."""
        if self.options.check_data and self.datamodule is not None:
            self.datamodule.prepare_data()

    def parent_folder(self, launcher: Launcher) -> Path:
        """Return the directory for run folders: ``cluster.folder``, or by default the name of the launcher."""
        folder = self.options.folder
        return Path(launcher.name) if folder == ClusterOptions.folder else folder

    def job_files(self, parent: Path) -> JobFiles:
        """Return the paths of this submission's files in the run folder. Nothing is written yet.

        The name of the run folder is the run's name, or a new name if the run has no name.

        Args:
            parent: Parent directory, on a file system that all nodes share.

        Raises:
            ConfigurationError: The directory of the checkpoints belongs to a different run, or connections between the
                nodes need keys and no key file is set.
        """
        if self.server_options is not None and self.size.nodes + self.options.server_nodes > 1:
            self.server_options.encrypted("tcp://first-node:15000")  # Raises an error if a needed key file is not set.
        parent = parent.resolve()
        if self.config.run_name is None:
            files = JobFiles.in_new_folder(parent, f"{self.options.job_name}-{time.strftime('%Y%m%d-%H%M%S')}")
        else:
            files = JobFiles.in_folder(parent / self.config.run_name)
        if self.checkpoints is not None:
            refuse_anothers(Path(self.checkpoints) / "last.ckpt", files.folder.name)
        return files

    def script_lines(self, files: JobFiles, start: str) -> str:
        """Return the lines of a job script that set up the environment and run ``fit``.

        The lines depend on the keys setup, python, venv, container and cpus_per_task of the section ``cluster``.

        Args:
            files: Files of this submission, from :meth:`job_files`.
            start: Command that starts the ranks, such as ``srun --ntasks-per-node=4``.
        """
        config = shlex.quote(str(files.configuration))
        interpreter = interpreter_words(self.options, sys.executable)
        return f"{setup_lines(self.options)}{start} {interpreter} -m cnnstrategies fit --config {config}\n"

    def text(self, folder: PurePath, changes: Mapping[str, Any]) -> str:
        """Return the whole configuration of the job as YAML.

        The job uses this text, so that later changes of the user's configuration files do not affect a queued job.

        Args:
            folder: Path of the run folder in the run's processes. Checkpoints are saved in it, unless the configuration
                sets another directory.
            changes: Settings that the launcher makes in the configuration, such as ``{"stop.grace": 60.0}``.
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
