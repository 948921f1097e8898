"""Reports of failed ranks in a torch store, through which all ranks of a run learn that one of them has failed.

The store is the store of the default process group, so the reports reach the ranks of all nodes, whichever launcher has
started them, also while the ranks' main threads wait for each other in a collective.
"""

import json
import select
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, Self

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from cnnstrategies.runtime.records import parsed, printable, record

POLL = 0.1  # Seconds between two checks of the store.
LONGEST = 1000  # Largest number of characters of an error message in a report.
LARGEST = 2**32  # First number in a report that is too large.
# Keys of the store. FIRST: report of the rank that has failed first. DECISION: whether the failed ranks work together.
# LEFT: exists after a failed rank has left its trainer. FINISHED: number of ranks that no longer use the store.
FIRST, DECISION, LEFT, FINISHED = "first", "decision", "left", "finished"
TOGETHER, APART = "together", "apart"  # Values of the key DECISION.


@dataclass(frozen=True)
class RankFailure:
    """Report of a rank that has failed.

    Attributes:
        rank: The rank.
        host: Name of the rank's machine.
        process: Id of the rank's process.
        error: Class and message of the exception, in one line.
        code: Exit code with which the rank ends.
    """

    rank: int
    host: str
    process: int
    error: str
    code: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} has failed:\n{self.error}"

    def encode(self) -> str:
        """Return the report as JSON. An error message that is too long is cut."""
        return json.dumps({**asdict(self), "error": printable(self.error, LONGEST)})

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Return the report from the JSON that another rank has written.

        Raises:
            ValueError: The text is not a report.
        """
        return record(cls, parsed(text), LONGEST, LARGEST)


class LostStoreError(RuntimeError):
    """Error of a process that uses a store although the process that served the store has ended."""


class FailureStore:
    """The reports of failed ranks in one call of a trainer function, such as ``fit``.

    All methods can raise a RuntimeError, usually a LostStoreError, because the process that served the store has ended.

    Args:
        store: The store. All ranks use the same store.
        call: Number of the call: reports of earlier calls in the same processes do not count.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, call: int, world_size: int) -> None:
        self._prefixed = PrefixStore(f"cnnstrategies_failures_{call}", store)
        self._world_size = world_size
        self._connection = _connect(store)

    @property
    def _store(self) -> Any:
        """The store. torch would print a stack trace if it used a lost store, so the connection is checked first."""
        if self._connection is not None:
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            if poll.poll(0):
                raise LostStoreError("the process that served the store has ended")
        return self._prefixed

    def close(self) -> None:
        """Close the connection to the process that serves the store."""
        if self._connection is not None:
            self._connection.close()

    def report(self, failure: RankFailure) -> RankFailure:
        """Report that this rank has failed, and return the report of the rank that has failed first."""
        return RankFailure.decode(self._store.compare_set(FIRST, "", failure.encode()))

    def first(self) -> RankFailure | None:
        """Return the report of the rank that has failed first; None if no rank has failed."""
        return RankFailure.decode(self._store.get(FIRST)) if self._store.check([FIRST]) else None

    def finish(self) -> None:
        """Record that this rank no longer uses the store. Each rank calls this once."""
        self._store.add(FINISHED, 1)

    def all_have_finished(self) -> bool:
        """Whether no rank uses the store any longer."""
        return bool(self._store.add(FINISHED, 0) >= self._world_size)

    def leave(self) -> None:
        """Record that a rank has left its trainer after its own failure, and does not wait for other ranks."""
        self._store.set(LEFT, "")

    def has_left(self) -> bool:
        """Whether a failed rank has left its trainer."""
        return bool(self._store.check([LEFT]))

    def fail_together(self, point: str, seconds: float) -> bool:
        """Return whether all ranks have failed at the same point of the run, so that they can still work together.

        A failed rank calls this method once. All failed ranks get the same result.

        Args:
            point: Text for the point of the run at which this rank has failed.
            seconds: Longest time to wait for the other ranks.
        """
        deadline = time.monotonic() + seconds
        count = self._store.add(f"failed at {point}", 1)
        while True:
            if count >= self._world_size:
                return self._decide(TOGETHER)
            if time.monotonic() > deadline:
                return self._decide(APART)
            if self._store.check([DECISION]):
                return self.work_together()
            time.sleep(POLL)
            count = self._store.add(f"failed at {point}", 0)

    def work_together(self) -> bool:
        """Whether all ranks have failed at the same point, so that they still work together."""
        return bool(self._store.check([DECISION])) and self._store.get(DECISION) == TOGETHER.encode()

    def _decide(self, decision: str) -> bool:
        """Set the decision, unless another rank has set it. Return whether all ranks work together."""
        return bool(self._store.compare_set(DECISION, "", decision) == TOGETHER.encode())


def _connect(store: Any) -> socket.socket | None:
    """Return an unused connection to a TCP store, which becomes readable when the serving process ends.

    Return None for stores of other kinds.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return socket.create_connection((store.host, store.port), timeout=60) if isinstance(store, TCPStore) else None
