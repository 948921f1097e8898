"""A worker's counters of traffic, steps and waiting time."""

from dataclasses import dataclass


@dataclass
class Counters:
    """A worker's counters of traffic, steps and waiting time since the worker object was created.

    Attributes:
        bytes_sent: Number of bytes pushed, headers included.
        bytes_received: Number of bytes of pulled payloads, without headers.
        seconds_waited: Seconds that the worker has waited for replies of the servers.
        steps: Number of steps that the worker has finished or skipped.
        samples: Number of samples in the batches from which the pushed gradients were computed.
        staleness: Sum over this worker's steps. Each step adds the number of other workers' updates that the server
            made to slice 0 between this worker's pull and this worker's update of the slice.
        dropped: Number of steps that this worker skipped because the servers made these steps without the worker's
            node.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    steps: int = 0
    samples: float = 0.0
    staleness: int = 0
    dropped: int = 0

    def figures(self) -> dict[str, float]:
        """Return the counters that a worker reports to the coordinator, by name; see :func:`.status.figures_of`."""
        return {
            "step": self.steps,
            "samples": self.samples,
            "sent": self.bytes_sent,
            "received": self.bytes_received,
            "waited": self.seconds_waited,
            "staleness": self.staleness,
        }
