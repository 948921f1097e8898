"""Lightning's view of a launcher that gives each rank its numbers in environment variables, as mpirun does."""

import os
import socket
import sys
import zlib

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cnnstrategies.cluster.launchers.launcher import Launcher

FIRST_PORT, PORTS = 20000, 10000


class LaunchedEnvironment(ClusterEnvironment):
    """Takes ranks from the four variables of a launcher, so neither mpi4py nor a working MPI library is needed.

    Lightning's ``MPIEnvironment`` needs mpi4py, and tells machines apart by their names.

    Args:
        launcher: A launcher that names its variables for rank, size, local rank and local size.
    """

    def __init__(self, launcher: "Launcher") -> None:
        super().__init__()
        self.launcher = launcher

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @staticmethod
    @override
    def detect() -> bool:
        """Whether Lightning should choose this class by itself: never, because the registry of launchers decides."""
        return False

    @property
    @override
    def main_address(self) -> str:
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        if self.local_size() == self.world_size():
            return "127.0.0.1"
        raise ConfigurationError(
            f"{self.launcher.program} has started ranks on several machines, and rank {self.global_rank()} does not "
            f"know rank 0's address: {self.launcher.address_remedy}"
        )

    @property
    @override
    def main_port(self) -> int:
        if "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        launch = self.launcher.launch_id(os.environ) or repr((os.getuid(), os.getcwd(), sys.argv[1:]))
        return FIRST_PORT + zlib.crc32(launch.encode()) % PORTS

    @override
    def world_size(self) -> int:
        return self._number(self.launcher.size_variable)

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has decided."""

    @override
    def global_rank(self) -> int:
        return self._number(self.launcher.rank_variable)

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has decided."""

    @override
    def local_rank(self) -> int:
        return self._number(self.launcher.local_rank_variable)

    def local_size(self) -> int:
        """Return the number of ranks on this machine."""
        return self._number(self.launcher.local_size_variable)

    @override
    def node_rank(self) -> int:
        return self.global_rank() // self.local_size()

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a wrong number of ranks, and ranks that are not numbered machine by machine.

        Raises:
            ConfigurationError: The launcher has not started `num_devices` ranks with neighbouring numbers on each of
                `num_nodes` machines.
        """
        local, world, expected = self.local_size(), self.world_size(), num_devices * num_nodes
        if num_devices != local or expected != world or self.global_rank() % local != self.local_rank():
            raise ConfigurationError(
                f"rank {self.global_rank()} of {world} is process {self.local_rank()} of {local} on "
                f"{socket.gethostname()}, and trainer.devices={num_devices} with trainer.num_nodes={num_nodes} are "
                f"numbered machine by machine: use `{self.launcher.start_command(num_nodes, num_devices)}`"
            )

    @staticmethod
    def _number(variable: str) -> int:
        return int(os.environ[variable])
