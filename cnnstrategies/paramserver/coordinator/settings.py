"""Settings of a coordinator and of its members."""

from dataclasses import dataclass, field

SERVER, WORKER = "server", "worker"
SECRET_BITS = 62  # bits of the number that identifies a process to the coordinator; other processes cannot guess it


@dataclass(frozen=True)
class CoordinatorSettings:
    """Settings of a coordinator."""

    endpoint: str  # where it listens
    workers: int  # number of workers to wait for
    servers: int  # number of servers to wait for; 0 where nothing is trained
    timeout: float = 10.0  # seconds without a heartbeat after which a member counts as dead
    appear: float = 600.0  # seconds within which each member, and each replacement of a member, must register
    survivable: int = 0  # number of servers that may be lost: copies of each slice beyond the first
    supervised: bool = False  # whether supervisions may replace silent processes, and report it
    # number among the sessions that follow one another at this endpoint; messages of other sessions are dropped
    session: int = 0
    nodes: int = 1  # number of nodes; each has a supervision
    # number that identifies the supervision that starts the coordinator; 0 if there is none
    supervisor: int = field(default=0, repr=False)
    # number of workers that may join the training; their ids follow the other workers', and nothing waits for them
    max_joiners: int = 0


@dataclass(frozen=True)
class Address:
    """A process's place in a run, and the coordinator's endpoint."""

    coordinator: str  # the coordinator's endpoint
    role: str  # worker, server or supervision
    id: int  # number among the processes of the same role
    incarnation: int = 0  # number of processes that had this place before
    heartbeat: float = 0.5  # seconds between two heartbeats
    timeout: float = 10.0  # seconds of silence after which either side counts the other as dead
    appear: float = 60.0  # seconds in which the coordinator must have answered once
    session: int = 0
