"""Where a process of ``cnnstrategies doctor`` runs, as its launcher says."""

import os
from dataclasses import dataclass

from cnnstrategies.cluster.environment import environment_plugins
from cnnstrategies.cluster.mpirun import MpirunEnvironment


@dataclass(frozen=True)
class Place:
    """A process of the doctor.

    Attributes:
        node: Number of its host.
        nodes: Number of hosts.
        local_rank: Number of the process on its host; only the first one works.
        main_address: Name or address of the first host.
        main_port: Port there.
    """

    node: int
    nodes: int
    local_rank: int
    main_address: str
    main_port: int


def find_place() -> Place | None:
    """Read the variables of srun, torchrun, mpirun, or ``doctor --hosts``; None where none has started this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = int(os.environ["GROUP_WORLD_SIZE"])
        return Place(int(os.environ["GROUP_RANK"]), nodes, int(os.environ["LOCAL_RANK"]), *_main())
    if environments := [one for one in environment_plugins([]) if one.creates_processes_externally]:
        environment = environments[0]
        if isinstance(environment, MpirunEnvironment):
            nodes = environment.world_size() // environment.local_size()
        else:
            nodes = int(os.environ["SLURM_NNODES"])
        address, port = environment.main_address, environment.main_port
        return Place(environment.node_rank(), nodes, environment.local_rank(), address, port)
    if "NNODES" in os.environ and "NODE_RANK" in os.environ:
        return Place(int(os.environ["NODE_RANK"]), int(os.environ["NNODES"]), 0, *_main())
    return None


def _main() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
