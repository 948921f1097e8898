"""Jobs that ``submit`` creates from a configuration, to print them or to submit them to a cluster."""

import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from cnnstrategies.cluster.job_files import JobFiles
from cnnstrategies.errors import ConfigurationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cnnstrategies.cluster.submission import Submission


class ClusterJob(ABC):
    """Base class of the jobs that launchers create. A job contains all that is needed to submit a run to a cluster."""

    @abstractmethod
    def show(self) -> str:
        """Return the text that ``submit --dry_run`` prints."""

    @abstractmethod
    def submit(self) -> str:
        """Submit the job to the cluster.

        Returns:
            Text for the user: name of the job, and directories of the logs and the checkpoints.
        """


@dataclass(frozen=True)
class ScriptJob(ClusterJob):
    """Job for a cluster that runs scripts from a queue.

    Attributes:
        submission: The configuration of the run.
        files: Paths of the script and the configuration in the run folder, on a file system that all nodes share.
            :meth:`submit` writes them.
        script: Text of the script, which runs ``fit`` with this configuration.
        queue: Function that submits the script at a path and returns only the job id, without a line break.
        changes: Settings that the launcher makes in the configuration, such as ``{"stop.grace": 60.0}``.
    """

    submission: "Submission"
    files: JobFiles
    script: str
    queue: Callable[[Path], str]
    changes: Mapping[str, Any] = field(default_factory=dict)

    @override
    def show(self) -> str:
        return self.script

    @override
    def submit(self) -> str:
        self.write()
        try:
            job = self.queue(self.files.script)
        except ConfigurationError:
            self.files.remove()
            raise
        if len(job.splitlines()) != 1:  # The job may be in the queue and need the run folder, so the folder is kept.
            raise ConfigurationError(
                f"the launcher's function `queue` returned {job!r} instead of a job id on one line: the job may have "
                "been submitted; correct the function, which must return only the job id"
            )
        size, server_nodes = self.submission.size, self.submission.options.server_nodes
        servers = f", and {server_nodes} server nodes" if server_nodes else ""
        text = (
            f"Submitted job {job}: {size.nodes} nodes x {size.tasks_per_node} tasks{servers}\n"
            f"Logs, checkpoints and script: {self.files.folder} ({job}.log)"
        )
        if self.files.number > 1:
            text += (
                f"\nThis job uses {self.files.configuration.name} and {self.files.script.name}, and continues the run "
                f"{self.files.folder.name} after its earlier jobs: if an earlier job is still running when this job "
                "starts, this job is refused"
            )
        return text

    def write(self) -> None:
        """Write the job script and the run's configuration to the run folder."""
        self.files.write(self.submission.text(self.files.folder, self.changes), self.script)


def hand_over(cluster: str, *command: str) -> str:
    """Run a program of the cluster's scheduler, such as sbatch, and return its output.

    Args:
        cluster: Name of the scheduler, such as ``SLURM``, for error messages.
        command: The program and its arguments, such as ``("sbatch", "--parsable", "job.sh")``.

    Raises:
        ConfigurationError: The program is not installed on this machine, or it ends with an error.
    """
    if shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"{command[0]} is not installed: run submit on a login node of a {cluster} cluster, or print the script "
            "with --dry_run"
        )
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        reason = " ".join(process.stderr.split()) or f"exit code {process.returncode}"
        raise ConfigurationError(
            f"{cluster} refuses the job ({reason}): change the section cluster, or trainer.devices and "
            "trainer.num_nodes"
        )
    return process.stdout
