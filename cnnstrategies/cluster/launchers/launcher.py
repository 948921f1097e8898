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
    """The way in which a launcher starts a submitted run again.

    Attributes:
        subject: The thing that is started again, such as "a requeued job".
        remedy: How to have it not started again, such as "set cluster.requeue to false".
    """

    subject: str
    remedy: str


class Launcher(ABC):
    """A program or platform that starts a run's processes: SLURM, torchrun, mpirun, Kubernetes, Ray, or none.

    A process can run under several launchers at once, such as torchrun inside a job of SLURM. The package asks them in
    the order of `precedence`.

    A launcher that starts every rank of a run names the four variables from which a rank learns its numbers; the rest
    follows from them. A launcher that only gives nodes and leaves their ranks to Lightning names none.

    Attributes:
        name: Word for options and run names, such as ``slurm``: the word after ``submit --to`` if the launcher takes
            submissions.
        title: Name for messages, such as ``SLURM``.
        precedence: Place in the order in which launchers are asked, the innermost launcher first: 10 torchrun,
            20 and 30 mpirun, 40 Kubernetes, 50 Ray, 60 SLURM, 100 none. No two launchers have the same one.
        program: Program that starts the ranks, such as ``srun``; None if Lightning starts them.
        rank_variable: Environment variable with the number of this process among all processes of the launch.
        size_variable: Environment variable with the number of processes of the launch.
        local_rank_variable: Environment variable with the number of this process on its node.
        local_size_variable: Environment variable with the number of processes on this node.
        variables: Environment variables that the launcher sets for its processes, as patterns (``SLURM_*``). A run that
            Ray starts does not inherit them, because they describe another launch.
        reads: Keys of the section ``cluster`` that count for a submission, beside those that always count (job_name,
            setup, python and folder) and the launcher's own section.
        lightning_detects: Whether Lightning finds this launcher itself, so that it is not passed an environment.
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
        """Whether this process is one of several, one on each node, whose ranks Lightning starts. By default false."""
        return False

    def environment(self) -> "ClusterEnvironment":
        """Return Lightning's view of a launcher that starts ranks or nodes, from the variables of this process.

        By default the ranks come from the launcher's four variables, the address of rank 0 from ``MASTER_ADDR``, and
        the port from ``MASTER_PORT`` or else from :meth:`launch_id`.
        """
        from cnnstrategies.cluster.launched_environment import LaunchedEnvironment

        return LaunchedEnvironment(self)

    def script_environment(self, environ: Environ, num_nodes: int) -> "ClusterEnvironment | None":
        """Return the environment for a job's script, whose ranks Lightning starts; None leaves it to Lightning.

        Args:
            num_nodes: The trainer's number of nodes.

        Raises:
            ConfigurationError: The run has several nodes, and nothing has started processes on the other ones.
        """
        return None

    def nodes(self, environ: Environ) -> int:
        """Return the number of nodes, for a launcher that starts ranks or nodes; by default from its variables."""
        return int(environ[self.size_variable]) // int(environ[self.local_size_variable])

    def launch_id(self, environ: Environ) -> str | None:
        """Return a text that tells this launch (job and step) from every other one, and is the same on all its ranks.

        By default None: the launcher has no such number.
        """
        return None

    def start_command(self, nodes: int, devices: int) -> str | None:
        """Return the words that start `devices` ranks on each of `nodes` nodes; None if Lightning starts the ranks.

        The command is complete up to the program to run. Messages show it.
        """
        return None

    @property
    def address_remedy(self) -> str:
        """Remedy for ranks on several nodes that do not know rank 0's address; the last words of a message."""
        return "set MASTER_ADDR to the first machine's address on every machine"

    def run_name(self, environ: Environ, configuration: str) -> str | None:
        """Return a name that a run keeps when this launcher starts it again; None if it never does so.

        Args:
            configuration: Eight characters that stand for the configuration. They belong in the name if one job may
                train several things.
        """
        return None

    def is_temporary(self, run_name: str) -> bool:
        """Whether the launcher invented a name that the next start will not have; other launchers' names go first."""
        return False

    def lacks_name(self, environ: Environ) -> str | None:
        """Return why a run without a name is refused: this launcher would restart it, in vain. By default None.

        The text is the whole message. The restarted processes would not find the run's checkpoints.
        """
        return None

    def restart(self, options: ClusterOptions) -> Restart | None:
        """Return how a submitted run is started again, which needs checkpoints; None, the default, if it never is."""
        return None

    def job(self, submission: "Submission", command: str) -> ClusterJob:
        """Return the job that a submission becomes. A launcher with this method is accepted by ``submit --to``.

        Args:
            submission: A configuration that can run.
            command: The command line of ``submit``, for people who read the job.

        Raises:
            ConfigurationError: The launcher cannot run it, as far as this machine knows.
        """
        raise NotImplementedError(f"{self.title} takes no submissions")

    @property
    def takes_jobs(self) -> bool:
        """Whether ``submit --to`` accepts this launcher: it has a method :meth:`job`."""
        return type(self).job is not Launcher.job

    def local_number(self, environ: Environ) -> int | None:
        """Return the number of this process on its node; None if the launcher's variable is not set."""
        return _number(environ, self.local_rank_variable)

    def number(self, environ: Environ) -> int | None:
        """Return the number of this process in the launch; None if the launcher's variable is not set."""
        return _number(environ, self.rank_variable)


def _number(environ: Environ, variable: str) -> int | None:
    return int(environ[variable]) if variable in environ else None
