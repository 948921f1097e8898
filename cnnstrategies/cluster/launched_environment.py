"""Cluster environment for launchers, such as mpirun, that set each process's ranks in environment variables."""

import os
import socket
import sys

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from cnnstrategies.cluster.addresses import launch_port, main_port_of
from cnnstrategies.cluster.variables import number_of
from cnnstrategies.errors import ConfigurationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cnnstrategies.cluster.launchers.launcher import Launcher


class LaunchedEnvironment(ClusterEnvironment):
    """Cluster environment that reads the ranks from four environment variables of a launcher.

    Lightning's ``MPIEnvironment`` is not used for mpirun, because it needs mpi4py and a working MPI library, and
    because it requires machines to have different names.

    Args:
        launcher: Launcher that defines the names of the variables for rank, world size, local rank and local world
            size.
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
        """Return False. The registry of launchers chooses this class, so Lightning must not detect it."""
        return False

    @property
    @override
    def main_address(self) -> str:
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        if self.local_size() == self.world_size():
            return "127.0.0.1"
        if (address := self.launcher.main_address(os.environ)) is not None:
            return address
        raise ConfigurationError(
            f"{self.launcher.program} has started ranks on several machines, but rank {self.global_rank()} does not "
            f"know the address of rank 0: {self.launcher.address_remedy}"
        )

    @property
    @override
    def main_port(self) -> int:
        if (port := main_port_of(os.environ)) is not None:
            return port
        launch = self.launcher.launch_id(os.environ) or repr((os.getuid(), os.getcwd(), sys.argv[1:]))
        return launch_port(launch)

    @override
    def world_size(self) -> int:
        return self._number(self.launcher.size_variable)

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing, because the launcher determines the world size."""

    @override
    def global_rank(self) -> int:
        return self._number(self.launcher.rank_variable)

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because the launcher determines the ranks."""

    @override
    def local_rank(self) -> int:
        return self._number(self.launcher.local_rank_variable)

    def local_size(self) -> int | None:
        """Return the number of ranks on this machine, or None if the launcher sets only the number of the machine."""
        return self.launcher.local_size(os.environ)

    @override
    def node_rank(self) -> int:
        local = self.local_size()
        return self._number("NODE_RANK") if local is None else self.global_rank() // local

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check that each machine has ``num_devices`` ranks, with consecutive numbers.

        Raises:
            ConfigurationError: The number of ranks is wrong, or the ranks of a machine are not numbered consecutively.
        """
        local, world, expected = self.local_size() or num_devices, self.world_size(), num_devices * num_nodes
        if num_devices != local or expected != world or self.global_rank() % local != self.local_rank():
            raise ConfigurationError(
                f"rank {self.global_rank()} of {world} is process {self.local_rank()} of {local} on "
                f"{socket.gethostname()}, but trainer.num_nodes={num_nodes} and trainer.devices={num_devices} need "
                f"{num_devices} consecutive ranks on each machine: use "
                f"`{self.launcher.start_command(num_nodes, num_devices)}`"
            )

    @staticmethod
    def _number(variable: str) -> int:
        number = number_of(os.environ, variable)
        if number is None:
            raise ConfigurationError(f"{variable} is not set: set it for each rank")
        return number
