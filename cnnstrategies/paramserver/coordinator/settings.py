"""What a coordinator and its members are started with."""

from dataclasses import dataclass, field

SERVER, WORKER = "server", "worker"
SECRET_BITS = 62  # of the number by which the coordinator knows a process: nobody else can guess it


@dataclass(frozen=True)
class CoordinatorSettings:
    """What a coordinator is started with."""

    endpoint: str  # where it listens
    workers: int  # how many it waits for
    servers: int  # likewise; 0 where nothing is trained
    timeout: float = 10.0  # seconds without a heartbeat after which a member counts as dead
    appear: float = 600.0  # seconds in which each must have registered once, and one that is to replace another again
    survivable: int = 0  # servers that can be lost for ever: copies of each slice beyond the first
    supervised: bool = False  # a supervision may replace processes that were silent, and says if it does
    session: int = 0  # of those that follow one another at this endpoint; messages of others are not heard
    nodes: int = 1  # each has a supervision
    supervisor: int = field(default=0, repr=False)  # number of the one that starts the coordinator; 0 if none does
    max_joiners: int = 0  # workers that may join while it trains, with the numbers after the others', never waited for


@dataclass(frozen=True)
class Address:
    """Who a process is, and where its coordinator listens."""

    coordinator: str  # its endpoint
    role: str  # worker, server or supervision
    id: int  # among those of its role
    incarnation: int = 0  # how many processes had its place before
    heartbeat: float = 0.5  # seconds between two
    timeout: float = 10.0  # seconds of silence after which either side counts the other as dead
    appear: float = 60.0  # seconds in which the coordinator must have answered once
    session: int = 0
