"""What a worker counts of its traffic."""

from dataclasses import dataclass


@dataclass
class Counters:
    """What a worker has sent, received and waited since it was made.

    Attributes:
        bytes_sent: Bytes of pushes, headers included.
        bytes_received: Bytes of pulls, headers included.
        seconds_waited: Time in a worker's ``wait`` and ``wait_all``.
        steps: Steps finished, or left out to catch up.
        samples: That the pushed gradients are means of.
        staleness: Updates that others made between the values that this worker has computed with and its own update,
            as its first slice has seen them.
        dropped: Steps that were made without this worker's node, which it left out to catch up.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    steps: int = 0
    samples: float = 0.0
    staleness: int = 0
    dropped: int = 0

    def figures(self) -> dict[str, float]:
        """The same, under the names that the coordinator takes."""
        return {
            "step": self.steps,
            "samples": self.samples,
            "sent": self.bytes_sent,
            "received": self.bytes_received,
            "waited": self.seconds_waited,
            "staleness": self.staleness,
        }
