"""The ``cluster.ray`` section of a configuration."""

from dataclasses import dataclass

from cnnstrategies.errors import ConfigurationError


@dataclass
class RayOptions:
    """What ``submit --to ray`` asks of a Ray cluster; the rest of ``cluster`` says what a node is asked for.

    Attributes:
        address: Of the cluster, as ``ray.init`` takes it; by default ``RAY_ADDRESS``, else the one on this machine.
        max_restarts: How often the run is started again from its last checkpoint, after a node or a process was lost.
        wait: Seconds to wait for nodes that are free, at the start and after a loss.
        autoscales: The cluster adds nodes when they are asked for: a run is not refused because there are too few.

    Raises:
        ConfigurationError: A value is out of range.
    """

    address: str | None = None
    max_restarts: int = 3
    wait: int = 600
    autoscales: bool = False

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigurationError(f"cluster.ray.max_restarts={self.max_restarts}: 0 or more")
        if self.wait < 1:
            raise ConfigurationError(
                f"cluster.ray.wait={self.wait}: nodes need some seconds to start a process; give it 30"
            )
