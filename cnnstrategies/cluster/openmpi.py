"""Ranks and addresses of processes that Open MPI's ``mpirun`` has started."""

import os
import socket
import zlib

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError

FIRST_PORT, PORTS = 20000, 10000


class OpenMPIEnvironment(ClusterEnvironment):
    """Takes ranks from the variables that ``mpirun`` sets, so neither mpi4py nor a working MPI library is needed.

    Lightning's ``MPIEnvironment`` needs mpi4py, and tells hosts apart by their names. On several hosts rank 0's
    address is ``MASTER_ADDR``; without it mpi4py, if installed, sends round the name of rank 0's host.

    Raises:
        ConfigurationError: Ranks are not numbered host by host, or rank 0's address is unknown.
    """

    def __init__(self) -> None:
        self._main_address: str | None = None

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @staticmethod
    @override
    def detect() -> bool:
        """Whether mpirun has started this process, and not only a launcher that has started it in turn."""
        # A torchrun under mpirun hands its own variables down, beside those of mpirun.
        return "OMPI_COMM_WORLD_RANK" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ

    @property
    @override
    def main_address(self) -> str:
        if self._main_address is None:
            self._main_address = self._find_main_address()
        return self._main_address

    def _find_main_address(self) -> str:
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        if _number("LOCAL_SIZE") == self.world_size():
            return "127.0.0.1"
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigurationError(
                f"mpirun has started ranks on several machines, and rank {self.global_rank()} does not know rank 0's "
                f"address ({error}): add `-x MASTER_ADDR=<the first machine in the hostfile>` to mpirun, or install "
                "mpi4py"
            ) from error
        return str(MPI.COMM_WORLD.bcast(socket.gethostname(), root=0))

    @property
    @override
    def main_port(self) -> int:
        if "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        # The same number on every rank, and another one for each mpirun.
        job = os.environ["PMIX_NAMESPACE"]
        return FIRST_PORT + zlib.crc32(job.encode()) % PORTS

    @override
    def world_size(self) -> int:
        return _number("SIZE")

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: mpirun has decided."""

    @override
    def global_rank(self) -> int:
        return _number("RANK")

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: mpirun has decided."""

    @override
    def local_rank(self) -> int:
        return _number("LOCAL_RANK")

    @override
    def node_rank(self) -> int:
        return self.global_rank() // _number("LOCAL_SIZE")

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a number of processes that the trainer does not expect."""
        local, world = _number("LOCAL_SIZE"), self.world_size()
        if num_devices * num_nodes != world or num_devices != local:
            raise ConfigurationError(
                f"trainer.devices={num_devices} and trainer.num_nodes={num_nodes}, but mpirun has started {world} "
                f"processes, {local} of them on {socket.gethostname()}: use `mpirun -n {num_devices * num_nodes} "
                f"--map-by ppr:{num_devices}:node`, or change trainer.devices and trainer.num_nodes"
            )
        if self.global_rank() % local != self.local_rank():
            raise ConfigurationError(
                f"rank {self.global_rank()} is process {self.local_rank()} of {local} on {socket.gethostname()}: ranks "
                f"must be numbered machine by machine; use `mpirun --map-by ppr:{local}:node`"
            )


def _number(name: str) -> int:
    return int(os.environ[f"OMPI_COMM_WORLD_{name}"])
