"""What a worker counts of its traffic."""

from dataclasses import dataclass


@dataclass
class Counters:
    """What a worker has sent, received and waited since it was made.

    Attributes:
        bytes_sent: Bytes of pushes, headers included.
        bytes_received: Bytes of pulls, headers included.
        seconds_waited: Time in a worker's ``wait`` and ``wait_all``.
        steps: Steps finished.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    steps: int = 0
