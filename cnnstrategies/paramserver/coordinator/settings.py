"""Settings of a coordinator and of its members."""

from dataclasses import dataclass, field

SERVER, WORKER = "server", "worker"
# Number of random bits in the number that identifies a process to the coordinator. With this many bits, other processes
# cannot guess the number.
SECRET_BITS = 62


@dataclass(frozen=True)
class CoordinatorSettings:
    """Settings of a coordinator."""

    endpoint: str  # address at which the coordinator listens
    workers: int  # number of original workers, which the coordinator waits for
    servers: int  # number of servers, which the coordinator waits for; 0 if the run does not train
    timeout: float = 10.0  # seconds without a message after which a member counts as dead
    appear: float = 600.0  # seconds within which each member, and each replacement of a member, must register
    survivable: int = 0  # largest number of servers that the run may lose without the loss of a slice
    supervised: bool = False  # whether supervision processes may start a process in the place of a silent process
    # Number of this session among the sessions in sequence at this endpoint. Messages of other sessions are dropped.
    session: int = 0
    nodes: int = 1  # number of nodes; each node has one supervision process
    # Number that identifies the supervision process that has started the coordinator; 0 if there is no such process.
    supervisor: int = field(default=0, repr=False)
    # Number of workers that may join during training. Their ids come after the ids of the original workers.
    max_joiners: int = 0
    # Identity of the run, as JSON. Original workers of other runs are refused. Empty: all workers are accepted.
    run: str = ""


@dataclass(frozen=True)
class Address:
    """The identity of a process in a run, with the settings of its connection to the coordinator."""

    coordinator: str  # the coordinator's endpoint
    role: str  # worker, server or supervision
    id: int  # number among the processes with the same role
    incarnation: int = 0  # number of earlier processes with the same role and id
    heartbeat: float = 0.5  # seconds between two heartbeats
    timeout: float = 10.0  # seconds without a message after which the coordinator counts as dead
    appear: float = 60.0  # seconds within which the coordinator must send its first reply
    session: int = 0  # number of the session; see `CoordinatorSettings`
    run: str = ""  # identity of the run, as JSON; empty for servers and joiners
