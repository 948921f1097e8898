"""Base class of launchers, which are the programs and platforms that start the processes of a run."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from cnnstrategies.cluster.launchers.jobs import ClusterJob
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.variables import number_of
from cnnstrategies.errors import ConfigurationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

    from cnnstrategies.cluster.submission import Submission

RUN_NAME = "CNNSTRATEGIES_RUN_NAME"  # Environment variable in which programs that start `fit` can set the run's name.
# Environment variable with the process id of a process whose variables were checked, and the name of the launcher that
# has started it as a rank, if there is one. Programs that a rank starts, such as tests, trials and servers, inherit its
# variables, but are not ranks.
CHECKED = "CNNSTRATEGIES_CHECKED"
Environ = Mapping[str, str]


class Restart(NamedTuple):
    """Parts of the error message for a run that its launcher may restart although the run saves no checkpoints.

    Attributes:
        subject: Noun phrase for the restarted job, such as "a requeued job".
        remedy: Advice on how to turn restarts off, such as "set cluster.requeue to false".
    """

    subject: str
    remedy: str


class Launcher(ABC):
    """Base class of launchers: SLURM, torchrun, mpirun, Kubernetes, Ray, other platforms, and "none".

    A process can run under several launchers at the same time, for example under torchrun inside a SLURM job. The
    launcher with the lowest ``precedence`` is the innermost launcher and is considered first.

    A launcher that starts all ranks of a run defines the names of four environment variables: rank, world size, local
    rank and local world size. Under a launcher that only provides nodes, Lightning starts the ranks, and the launcher
    does not define these names.

    Attributes:
        name: Short name for options and run names, such as ``slurm``. If the launcher accepts submissions,
            ``submit --to`` takes this name.
        title: Name for error messages, such as ``SLURM``.
        precedence: Number by which the launchers are sorted; the lowest number comes first. No two launchers have the
            same number; docs/development/add-a-launcher.md lists the numbers.
        program: Name of the program that starts the ranks, such as ``srun``; None if Lightning starts the ranks.
        rank_variable: Name of the environment variable with the global rank.
        size_variable: Name of the environment variable with the world size.
        local_rank_variable: Name of the environment variable with the rank of the process on its node.
        local_size_variable: Name of the environment variable with the number of processes on the node.
        variables: Patterns, such as ``SLURM_*``, for the names of all environment variables that the launcher sets. If
            Ray itself was started by this launcher, programs that Ray starts must not inherit these variables.
        reads: Keys of the section ``cluster`` that this launcher uses for submissions, except for the launcher's own
            section and for job_name, setup, python and folder, which all launchers use.
        lightning_detects: Whether Lightning itself chooses the right cluster environment under this launcher.
        lightning_knows: Whether Lightning also detects this launcher in scripts that do not use the command line. If
            each rank of such a script trains alone, the user has chosen this by another cluster environment.
    """

    name: str
    title: str
    precedence: int
    program: str | None = None
    rank_variable: str = ""
    size_variable: str = ""
    local_rank_variable: str = ""
    local_size_variable: str = ""
    variables: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()
    lightning_detects = False
    lightning_knows = False

    @abstractmethod
    def detect(self, environ: Environ) -> bool:
        """Whether this process runs under this launcher, as one of its ranks or as a job's script."""

    def starts_ranks(self, environ: Environ) -> bool:
        """Whether the launcher has started this process as one of the run's ranks.

        In a job's script or shell this is false, because Lightning starts the ranks there. By default it is true if the
        launcher is detected and the variables for the rank and the local rank are set.
        """
        return self.detect(environ) and {self.rank_variable, self.local_rank_variable} <= environ.keys()

    def starts_nodes(self, environ: Environ) -> bool:
        """Whether the launcher has started only one process on each node, so that Lightning starts the ranks.

        By default this is false.
        """
        return False

    def environment(self) -> "ClusterEnvironment":
        """Return the cluster environment, from which Lightning gets the ranks, the main address and the main port.

        By default the ranks come from the launcher's four environment variables, the main address from ``MASTER_ADDR``,
        and the main port from ``MASTER_PORT``, or else from a hash of :meth:`launch_id`. The method is called only if
        :meth:`starts_ranks` or :meth:`starts_nodes` is true.
        """
        from cnnstrategies.cluster.launched_environment import LaunchedEnvironment

        return LaunchedEnvironment(self)

    def script_environment(self, environ: Environ, num_nodes: int) -> "ClusterEnvironment | None":
        """Return the cluster environment for a run in a job's script, where Lightning starts the ranks.

        If the result is None, which is the default, Lightning chooses the environment.

        Args:
            environ: Environment variables of this process.
            num_nodes: Number of nodes of the trainer.

        Raises:
            ConfigurationError: The run has several nodes, but no processes were started on the other nodes.
        """
        return None

    def nodes(self, environ: Environ) -> int:
        """Return the number of nodes of the run. By default it is the world size divided by the local world size.

        The method is called only if :meth:`starts_ranks` or :meth:`starts_nodes` is true.
        """
        local, world = self.local_size(environ), number_of(environ, self.size_variable)
        if local is None or world is None:
            raise ConfigurationError(
                f"the number of ranks on each machine is not known: set {self.local_size_variable} for each rank"
            )
        return world // local

    def local_size(self, environ: Environ) -> int | None:
        """Return the number of ranks on this node, or None if it is not known.

        By default the number is the value of the launcher's environment variable.
        """
        return number_of(environ, self.local_size_variable)

    def main_address(self, environ: Environ) -> str | None:
        """Return the address of rank 0's node from the launcher's own variables or files.

        The result is None if the launcher does not tell the address, which is the default. ``MASTER_ADDR`` has
        precedence.
        """
        return None

    def refusal(self, environ: Environ) -> str | None:
        """Return an error message if variables say that there are several processes, but not which one this process is.

        Such a process would train alone on all data. The message names the variables and the remedy. The default is
        None. The method is called only if no launcher has started this process as a rank or on one of several nodes.
        """
        return None

    def launch_id(self, environ: Environ) -> str | None:
        """Return an id of this launch, such as the job id and the step id. All ranks of a launch have the same id.

        The default is None, for a launcher without ids.
        """
        return None

    def start_command(self, nodes: int, devices: int) -> str | None:
        """Return the command that starts ``devices`` ranks on each of ``nodes`` nodes, for error messages.

        The command does not contain the user's program. The result is None if Lightning starts the ranks; this is the
        default.
        """
        return None

    @property
    def address_remedy(self) -> str:
        """Remedy in the error message for a rank that is not on rank 0's node and does not know rank 0's address."""
        return "set MASTER_ADDR to the first machine's address on every machine"

    def run_name(self, environ: Environ, configuration: str) -> str | None:
        """Return a name for the run that stays the same when this launcher restarts the run.

        The default is None, for a launcher that does not restart runs.

        Args:
            environ: Environment variables of this process.
            configuration: Hash of the configuration. The name must contain it if one job may train several
                configurations.
        """
        return None

    def is_temporary(self, run_name: str) -> bool:
        """Whether a name from :meth:`run_name` is random, and so changes when the launcher itself is started again.

        Names from outer launchers are preferred to a random name. By default this is false.
        """
        return False

    def lacks_name(self, environ: Environ) -> str | None:
        """Return an error message for a run that has no name, if this launcher could restart the run's processes.

        A restarted process could not find the checkpoints of such a run. By default, return None.
        """
        return None

    def restart(self, options: ClusterOptions) -> Restart | None:
        """Return parts of an error message if the launcher may restart a run with these options; otherwise None.

        A run without checkpoints would start from the beginning after a restart, so it is refused with this error
        message. By default, return None.
        """
        return None

    def job(self, submission: "Submission", command: str) -> ClusterJob:
        """Return the job for a submission. ``submit --to`` accepts every launcher that defines this method.

        Args:
            submission: The checked configuration of the run.
            command: The command line of ``submit``, for a comment in the job.

        Raises:
            ConfigurationError: The launcher cannot run the submission.
        """
        raise NotImplementedError(f"{self.title} does not accept submissions")

    @property
    def takes_jobs(self) -> bool:
        """Whether the launcher defines :meth:`job`, so that ``submit --to`` accepts it."""
        return type(self).job is not Launcher.job

    def local_number(self, environ: Environ) -> int | None:
        """Return the local rank. Return None if the launcher's environment variable is not set."""
        return number_of(environ, self.local_rank_variable)

    def number(self, environ: Environ) -> int | None:
        """Return the global rank. Return None if the launcher's environment variable is not set."""
        return number_of(environ, self.rank_variable)


def is_inherited(environ: Environ) -> bool:
    """Whether this process was started by a process whose variables were checked, and has inherited the variables."""
    checked = environ.get(CHECKED)
    return checked is not None and checked.partition(" ")[0] != str(os.getpid())
