"""Jobs: what ``submit`` makes of a configuration, to be shown or handed to a cluster."""

import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from cnnstrategies.errors import ConfigurationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cnnstrategies.cluster.submission import Submission


class ClusterJob(ABC):
    """A run that ``submit`` has checked for a launcher."""

    @abstractmethod
    def show(self) -> str:
        """Return the text that ``submit --dry_run`` prints."""

    @abstractmethod
    def submit(self) -> str:
        """Hand the job to the cluster.

        Returns:
            Lines for the user: the job's name, and the directories of logs and checkpoints.
        """


@dataclass(frozen=True)
class ScriptJob(ClusterJob):
    """A job that is a script; the run folder holds the script and its configuration.

    Attributes:
        submission: The run.
        folder: The run folder, on a disk that all nodes see. :meth:`submit` writes ``config.yaml`` and ``job.sh``.
        script: Text of the script, which runs ``fit`` with the folder's ``config.yaml``.
        queue: Function that puts a script into the queue and returns the job's number, such as :func:`hand_over`.
        changes: Values of the job's configuration that the launcher decides. By key of the configuration.
    """

    submission: "Submission"
    folder: Path
    script: str
    queue: Callable[[Path], str]
    changes: Mapping[str, Any] = field(default_factory=dict)

    @override
    def show(self) -> str:
        return self.script

    @override
    def submit(self) -> str:
        is_new = not self.folder.exists()
        self.write()
        try:
            job = self.queue(self.folder / "job.sh")
        except ConfigurationError:
            if is_new:
                shutil.rmtree(self.folder)
            raise
        size, server_nodes = self.submission.size, self.submission.options.server_nodes
        servers = f", and {server_nodes} server nodes" if server_nodes else ""
        return (
            f"Submitted job {job}: {size.nodes} nodes x {size.tasks_per_node} tasks{servers}\n"
            f"Logs, checkpoints and script: {self.folder} ({job}.log)"
        )

    def write(self) -> None:
        """Write the script and the configuration to the run folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        configuration = self.submission.text(self.folder, self.changes)
        (self.folder / "config.yaml").write_text(configuration, encoding="utf-8")
        (self.folder / "job.sh").write_text(self.script, encoding="utf-8")


def hand_over(cluster: str, *command: str) -> str:
    """Run a program of a cluster's queue and return what it prints.

    Args:
        cluster: Name of the cluster's software, such as ``SLURM``, for messages.
        command: The program and its arguments, such as ``("sbatch", "--parsable", "job.sh")``.

    Raises:
        ConfigurationError: The program is not installed here, or it ends with an error.
    """
    if shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"{command[0]} is not found: submit on a login node of a {cluster} cluster; --dry_run prints the script "
            "anywhere"
        )
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        reason = " ".join(process.stderr.split()) or f"exit code {process.returncode}"
        raise ConfigurationError(
            f"{cluster} refuses the job: {reason}; change the cluster section, or the trainer's devices"
        )
    return process.stdout
