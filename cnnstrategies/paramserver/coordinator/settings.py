"""What a coordinator and its members are started with."""

from dataclasses import dataclass, field

SERVER, WORKER = "server", "worker"
SECRET_BITS = 62  # of the number by which the coordinator knows a process: nobody else can guess it


@dataclass(frozen=True)
class CoordinatorSettings:
    """What a coordinator is started with.

    Attributes:
        endpoint: Where it listens.
        workers: How many it waits for.
        servers: How many it waits for; 0 where nothing is trained.
        timeout: Seconds without a heartbeat after which a member counts as dead.
        appear: Seconds in which every member must have registered once, and one that is to replace another must have.
        survivable: How many servers can be lost for ever: copies of each slice beyond the first.
        supervised: Whether a supervision may replace processes that were silent, and says if it does.
        session: Which of the sessions that follow one another at this endpoint; messages of others are not heard.
        nodes: How many there are: each has a supervision.
        supervisor: Number of the supervision that starts the coordinator, node 0's; 0 if none does.
        elastic: How many workers may join while it trains: they have the numbers after the others', come and go, and
            are never waited for.
    """

    endpoint: str
    workers: int
    servers: int
    timeout: float = 10.0
    appear: float = 600.0
    survivable: int = 0
    supervised: bool = False
    session: int = 0
    nodes: int = 1
    supervisor: int = field(default=0, repr=False)
    elastic: int = 0


@dataclass(frozen=True)
class Address:
    """Who a process is, and where its coordinator listens.

    Attributes:
        coordinator: The coordinator's endpoint.
        role: ``worker``, ``server`` or ``supervision``.
        id: Its number among those of its role.
        incarnation: How many processes had its place before.
        heartbeat: Seconds between two heartbeats.
        timeout: Seconds of silence after which either side counts the other as dead.
        appear: Seconds in which the coordinator must have answered once.
        session: The coordinator's.
    """

    coordinator: str
    role: str
    id: int
    incarnation: int = 0
    heartbeat: float = 0.5
    timeout: float = 10.0
    appear: float = 60.0
    session: int = 0
