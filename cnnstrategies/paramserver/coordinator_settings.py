"""What a coordinator is started with."""

from dataclasses import dataclass, field

RESTART_SECONDS = 60.0  # for a process that takes the place of one that has died


@dataclass(frozen=True)
class CoordinatorSettings:
    """What a coordinator is started with.

    Attributes:
        endpoint: Where it listens.
        workers: How many it waits for.
        servers: How many it waits for; 0 where nothing is trained.
        timeout: Seconds without a heartbeat after which a member counts as dead.
        appear: Seconds in which every member must have registered once.
        survivable: How many servers can be lost for ever: copies of each slice beyond the first.
        essential: Workers whose loss for ever ends the run: the one that writes checkpoints and logs.
        supervised: Whether a supervision may replace processes that were silent, and says if it does.
        session: Which of the sessions that follow one another at this endpoint; messages of others are not heard.
        nodes: How many there are: each has a supervision.
        supervisor: Secret of the supervision that starts the coordinator, node 0's.
    """

    endpoint: str
    workers: int
    servers: int
    timeout: float = 10.0
    appear: float = 600.0
    survivable: int = 0
    essential: tuple[int, ...] = (0,)
    supervised: bool = False
    session: int = 0
    nodes: int = 1
    supervisor: str = field(default="", repr=False)
