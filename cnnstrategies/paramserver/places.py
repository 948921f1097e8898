"""As whom a process may join a run, which its coordinator says to whoever has the run's keys."""

import time
from dataclasses import dataclass
from pathlib import Path

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.line import Watcher
from cnnstrategies.paramserver.run_address import RunAddress
from cnnstrategies.paramserver.security import KeyPair

ANSWER_SECONDS = 2.0
FIRST_SECONDS = 10.0  # without an answer
PAUSE = 0.5  # seconds between two looks for a place
OVER = "the run is over"


@dataclass(frozen=True)
class Place:
    """As whom a process may join, as the coordinator says.

    Attributes:
        id: Its number.
        life: How many processes had it before.
        session: The coordinator's.
        workers: The run's own.
        timeout: The coordinator's.
    """

    id: int
    life: int
    session: int
    workers: int
    timeout: float


def find_place(address: RunAddress, patience: float = FIRST_SECONDS, waits: bool = False) -> Place:
    """Ask a run for a place.

    Args:
        address: Where its coordinator listens.
        patience: Seconds without an answer: a coordinator may be starting again.
        waits: Whether to wait for as long as all places are taken. Else for its time-out: one that was killed keeps its
            place for that.

    Raises:
        ConfigurationError: Nobody answers, or it lets nobody join, or all places stay taken.
        RunEnded: It is over.
    """
    keys = None if address.key_file is None else KeyPair.load(address.key_file)
    with Watcher(address.coordinator, keys) as watcher:
        heard, taken = time.monotonic(), None
        while True:
            answer, now = watcher.place(ANSWER_SECONDS), time.monotonic()
            if answer is None:
                if now - heard > patience or _is_gone(address):
                    raise _unanswered(address)
                continue
            heard, fields = now, answer.fields
            if fields["ended"] is not None:
                raise RunEnded(OVER, clean=True)
            if not fields["elastic"]:
                raise ConfigurationError(
                    f"the run at {address.coordinator} lets nobody join: start it with elastic: N of its strategy, for "
                    "up to N workers beside its own"
                )
            if "place" in fields:
                names = "place", "life", "session", "workers", "timeout"
                return Place(*(fields[name] for name in names))
            taken = now if taken is None else taken
            if not waits and now - taken > fields["timeout"] + PAUSE:
                raise ConfigurationError(
                    f"all {fields['elastic']} places of the run at {address.coordinator} are taken: start it with a "
                    "higher elastic, or come when one has left"
                )
            time.sleep(PAUSE)


def _unanswered(address: RunAddress) -> ConfigurationError:
    keys = "give --key_file if it has any" if address.key_file is None else f"not those of {address.key_file}"
    return ConfigurationError(
        f"no coordinator answers at {address.coordinator}: the run does not train, is not reached from here, or its "
        f"keys are others ({keys})"
    )


def _is_gone(address: RunAddress) -> bool:
    """Whether nothing can listen at an address any more."""
    path = address.coordinator.removeprefix("ipc://")
    return path != address.coordinator and not Path(path).exists()
