"""The interface of a launcher: what the package asks the program or platform that starts a run's processes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from cnnstrategies.cluster.launchers.jobs import ClusterJob
from cnnstrategies.cluster.options import ClusterOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

    from cnnstrategies.cluster.submission import Submission

RUN_NAME = "CNNSTRATEGIES_RUN_NAME"  # Environment variable with the run's name, set by programs that start `fit`.
Environ = Mapping[str, str]


class Restart(NamedTuple):
    """Words about a launcher's restarts of submitted runs, for the error message about a run without checkpoints.

    Attributes:
        subject: Noun for the restarted job, such as "a requeued job".
        remedy: Setting that turns restarts off, such as "set cluster.requeue to false".
    """

    subject: str
    remedy: str


class Launcher(ABC):
    """A program or platform that starts a run's processes: SLURM, torchrun, mpirun, Kubernetes, Ray, or none.

    A process can run under several launchers at once, such as torchrun inside a job of SLURM. The package asks them in
    the order of `precedence`.

    A launcher that starts every rank of a run names four environment variables: a rank's rank, world size, local rank
    and local world size. A launcher that only provides nodes, where Lightning starts the ranks, names no variables.

    Attributes:
        name: Word for options and run names, such as ``slurm``: the word after ``submit --to`` if the launcher takes
            submissions.
        title: Name for messages, such as ``SLURM``.
        precedence: Position in the order of launchers. The launcher with the lowest number is the innermost one and is
            asked first: 10 torchrun, 20 and 30 mpirun, 40 Kubernetes, 50 Ray, 60 SLURM, 100 none. Each launcher has a
            different number.
        program: Program that starts the ranks, such as ``srun``; None if Lightning starts them.
        rank_variable: Environment variable with the global rank.
        size_variable: Environment variable with the world size.
        local_rank_variable: Environment variable with the local rank: the number of the process on its node.
        local_size_variable: Environment variable with the number of processes on the node.
        variables: Patterns, such as ``SLURM_*``, of all environment variables that the launcher sets in its processes.
            Programs that Ray starts do not inherit these variables, because they describe another launch.
        reads: Keys of the section ``cluster`` that a submission to this launcher uses, in addition to the launcher's
            own section and to job_name, setup, python and folder, which every launcher uses.
        lightning_detects: Whether Lightning itself chooses the right environment under this launcher.
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

    @abstractmethod
    def detect(self, environ: Environ) -> bool:
        """Whether this process runs inside a job of this launcher: as one of its ranks, or as the job's script."""

    def starts_ranks(self, environ: Environ) -> bool:
        """Whether the launcher has started this process as one of the run's ranks.

        False for a job's script or shell, where Lightning starts the ranks. By default true if the launcher is detected
        and its variables for the rank and the local rank are set.
        """
        return self.detect(environ) and {self.rank_variable, self.local_rank_variable} <= environ.keys()

    def starts_nodes(self, environ: Environ) -> bool:
        """Whether the launcher has started one process on each node, and Lightning starts the ranks. Default: false."""
        return False

    def environment(self) -> "ClusterEnvironment":
        """Return the environment that tells Lightning the ranks, the main address and the main port.

        By default the ranks come from the launcher's four variables, the main address from ``MASTER_ADDR``, and the
        main port from ``MASTER_PORT`` or else from :meth:`launch_id`. The method is called only if the launcher has
        started ranks or nodes.
        """
        from cnnstrategies.cluster.launched_environment import LaunchedEnvironment

        return LaunchedEnvironment(self)

    def script_environment(self, environ: Environ, num_nodes: int) -> "ClusterEnvironment | None":
        """Return the environment for a process that is a job's script and not a rank; Lightning then starts the ranks.

        None, which is the default, leaves the choice of an environment to Lightning.

        Args:
            environ: Environment variables of this process.
            num_nodes: The trainer's number of nodes.

        Raises:
            ConfigurationError: The run has several nodes, and nothing has started processes on the other nodes.
        """
        return None

    def nodes(self, environ: Environ) -> int:
        """Return the number of nodes of the run; by default the world size divided by the local world size.

        The method is called only if the launcher has started ranks or nodes.
        """
        return int(environ[self.size_variable]) // int(environ[self.local_size_variable])

    def launch_id(self, environ: Environ) -> str | None:
        """Return an id of this launch, such as a job and its step. All ranks of the launch have the same id.

        By default None, for a launcher without ids.
        """
        return None

    def start_command(self, nodes: int, devices: int) -> str | None:
        """Return the command that starts `devices` ranks on each of `nodes` nodes, for error messages.

        The user's program follows the command. None, the default, if Lightning starts the ranks.
        """
        return None

    @property
    def address_remedy(self) -> str:
        """Last part of the error message for ranks on several nodes that do not know rank 0's address: what to do."""
        return "set MASTER_ADDR to the first machine's address on every machine"

    def run_name(self, environ: Environ, configuration: str) -> str | None:
        """Return a run name that is the same after this launcher has restarted the run; None without restarts.

        Args:
            environ: Environment variables of this process.
            configuration: Hash of the configuration. It belongs in the name if one job may train several
                configurations.
        """
        return None

    def is_temporary(self, run_name: str) -> bool:
        """Whether a name of this launcher is random, so that a restarted run would get another name.

        A name from an outer launcher is then preferred.
        """
        return False

    def lacks_name(self, environ: Environ) -> str | None:
        """Return the error message for a run without a name that this launcher would restart; None by default.

        Restarted processes find a run's checkpoints by the run's name.
        """
        return None

    def restart(self, options: ClusterOptions) -> Restart | None:
        """Return words about restarts if the launcher would restart a run with these options; None by default.

        A run that may be restarted is refused if it writes no checkpoints.
        """
        return None

    def job(self, submission: "Submission", command: str) -> ClusterJob:
        """Return the job for a submission. ``submit --to`` accepts every launcher that defines this method.

        Args:
            submission: A checked configuration.
            command: The command line of ``submit``, which the job shows as a comment.

        Raises:
            ConfigurationError: The launcher cannot run the submission.
        """
        raise NotImplementedError(f"{self.title} takes no submissions")

    @property
    def takes_jobs(self) -> bool:
        """Whether the launcher defines :meth:`job`, so that ``submit --to`` accepts it."""
        return type(self).job is not Launcher.job

    def local_number(self, environ: Environ) -> int | None:
        """Return the local rank; None if the launcher's variable is not set."""
        return _number(environ, self.local_rank_variable)

    def number(self, environ: Environ) -> int | None:
        """Return the global rank; None if the launcher's variable is not set."""
        return _number(environ, self.rank_variable)


def _number(environ: Environ, variable: str) -> int | None:
    return int(environ[variable]) if variable in environ else None
