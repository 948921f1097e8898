"""Addresses of runs that can be watched and joined, and the places that a run's coordinator offers to joiners."""

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.coordinator.status import PLACE, WATCH, WATCHER
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.requests import DONE
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.control import Line
from cnnstrategies.paramserver.security import KeyPair, is_local, process_number

NAME = "watch.json"
ANSWER_SECONDS = 2.0
FIRST_SECONDS = 10.0  # seconds without an answer
PAUSE = 0.5  # seconds between two requests for a place
OVER = "the run is over"


@dataclass(frozen=True)
class RunAddress:
    """A coordinator's endpoint, and the file with the run's keys."""

    coordinator: str
    key_file: str | None = None

    def save(self, folder: Path) -> None:
        """Write the address into a run's folder, readable by its owner only. An existing address is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(prefix=f".{NAME}-", dir=folder)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
        os.replace(scratch, folder / NAME)

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the file that :meth:`save` wrote, if it exists."""
        (folder / NAME).unlink(missing_ok=True)

    @classmethod
    def find(cls, run: str) -> "RunAddress":
        """Return the address of a run that was named on a command line.

        Args:
            run: An endpoint, or a run's folder. In a folder with several versions the version that started last counts.

        Raises:
            ConfigurationError: The text is neither, or no parameter server trains there.
        """
        if "://" in run:
            is_local(run)  # raises an error if the endpoint is not valid
            return cls(run)
        folder = Path(run)
        if not folder.is_dir():
            raise ConfigurationError(
                f"--run {run}: the folder does not exist; name a run's folder, or its address as tcp://HOST:PORT"
            )
        files = [folder / NAME] if (folder / NAME).exists() else list(folder.glob(f"*/{NAME}"))
        if not files:
            raise ConfigurationError(
                f"--run {run}: the folder has no {NAME}, so no parameter server trains there now: name the folder of a "
                "run that does, or its address as tcp://HOST:PORT"
            )
        newest = max(files, key=lambda path: path.stat().st_mtime)
        try:
            fields = json.loads(newest.read_text())
            return cls(str(fields["coordinator"]), None if fields["key_file"] is None else str(fields["key_file"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"--run {run}: {newest} holds no address: remove it") from error

    @property
    def is_gone(self) -> bool:
        """Whether the coordinator's socket file no longer exists."""
        path = self.coordinator.removeprefix("ipc://")
        return path != self.coordinator and not Path(path).exists()


class Watcher(Line):
    """A connection to a coordinator for questions, with the run's keys if there are any."""

    def __init__(self, coordinator: str, keys: KeyPair | None = None) -> None:
        own_keys = None if keys is None else KeyPair.create()
        peer = Peer(WATCHER, 0, 0, process_number(own_keys))
        super().__init__(Address(coordinator, WATCHER, 0), peer, own_keys, keys)
        self._questions = 0

    def ask(self, seconds: float, kind: str = WATCH) -> Message | None:
        """Ask for the state of the run or a place in it; see :mod:`.coordinator.status`.

        Args:
            seconds: How long to wait for the answer.
            kind: The question.

        Returns the answer; None if it did not arrive in time.
        """
        self._questions += 1
        self.send(Message(kind, request=self._questions))
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > 0:
            for _, answer in self.receive(remaining):
                if answer.kind == DONE and answer.request == self._questions:
                    return answer
        return None


@dataclass(frozen=True)
class JoinPlace:
    """A place for a joiner, as the coordinator offers it.

    Attributes:
        id: Number of the worker.
        incarnation: Number of processes that had the place before.
        session: Number of the coordinator's session.
        workers: Number of the run's original workers.
        timeout: The coordinator's time-out in seconds.
    """

    id: int
    incarnation: int
    session: int
    workers: int
    timeout: float


def find_place(address: RunAddress, patience: float = FIRST_SECONDS, waits: bool = False) -> JoinPlace:
    """Ask a run for a place.

    Args:
        address: The run's coordinator.
        patience: Seconds to wait without any answer: a coordinator may be starting again.
        waits: Whether to wait as long as all places are taken. Otherwise the wait ends after the run's time-out, for
            which a killed joiner keeps its place.

    Raises:
        ConfigurationError: The coordinator does not answer, admits no joiners, or all places stay taken.
        RunEnded: The run is over.
    """
    keys = None if address.key_file is None else KeyPair.load(address.key_file)
    with Watcher(address.coordinator, keys) as watcher:
        heard, taken = time.monotonic(), None
        while True:
            answer, now = watcher.ask(ANSWER_SECONDS, PLACE), time.monotonic()
            if answer is None:
                if now - heard > patience or address.is_gone:
                    raise _unanswered(address)
                continue
            heard, fields = now, answer.fields
            if fields["ended"] is not None:
                raise RunEnded(OVER, clean=True)
            if not fields["max_joiners"]:
                raise ConfigurationError(
                    f"the run at {address.coordinator} accepts no joiners: start it with max_joiners: N in its "
                    "strategy, for up to N workers beside its own"
                )
            if "place" in fields:
                names = "place", "incarnation", "session", "workers", "timeout"
                return JoinPlace(*(fields[name] for name in names))
            taken = now if taken is None else taken
            if not waits and now - taken > fields["timeout"] + PAUSE:
                raise ConfigurationError(
                    f"all {fields['max_joiners']} places of the run at {address.coordinator} are taken: start it with "
                    "a higher max_joiners, or join when another worker has left"
                )
            time.sleep(PAUSE)


def _unanswered(address: RunAddress) -> ConfigurationError:
    keys = "give --key_file if it has any" if address.key_file is None else f"not those of {address.key_file}"
    return ConfigurationError(
        f"no coordinator answers at {address.coordinator}: the run does not train, cannot be reached from here, or has "
        f"other keys ({keys})"
    )
