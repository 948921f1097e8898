"""Where a run can be watched and joined, and as whom, which its coordinator says to whoever has its keys."""

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
FIRST_SECONDS = 10.0  # without an answer
PAUSE = 0.5  # seconds between two looks for a place
OVER = "the run is over"


@dataclass(frozen=True)
class RunAddress:
    """A coordinator, and how to speak with it."""

    coordinator: str
    key_file: str | None = None

    def save(self, folder: Path) -> None:
        """Write it into a run's folder, for its owner alone; one that was there before is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(prefix=f".{NAME}-", dir=folder)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
        os.replace(scratch, folder / NAME)

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove what :meth:`save` wrote, if it is there."""
        (folder / NAME).unlink(missing_ok=True)

    @classmethod
    def find(cls, run: str) -> "RunAddress":
        """The address of a run that was named on a command line.

        Args:
            run: An endpoint, or a run's folder; of one with several versions the one that was begun last.

        Raises:
            ConfigurationError: It is neither, or nothing trains there.
        """
        if "://" in run:
            is_local(run)  # Raises if nothing can listen there.
            return cls(run)
        folder = Path(run)
        if not folder.is_dir():
            raise ConfigurationError(
                f"--run {run}: there is no such folder; name a run's folder, or its address as tcp://HOST:PORT"
            )
        found = [folder / NAME] if (folder / NAME).exists() else list(folder.glob(f"*/{NAME}"))
        if not found:
            raise ConfigurationError(
                f"--run {run}: no {NAME} lies there, so no parameter server trains there now: name the folder of a run "
                "that does, or its address as tcp://HOST:PORT"
            )
        newest = max(found, key=lambda path: path.stat().st_mtime)
        try:
            fields = json.loads(newest.read_text())
            return cls(str(fields["coordinator"]), None if fields["key_file"] is None else str(fields["key_file"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"--run {run}: {newest} holds no address: remove it") from error

    @property
    def is_gone(self) -> bool:
        """Whether nothing can listen there any more."""
        path = self.coordinator.removeprefix("ipc://")
        return path != self.coordinator and not Path(path).exists()


class Watcher(Line):
    """A connection to a coordinator, for questions, with the run's keys if there are any."""

    def __init__(self, coordinator: str, keys: KeyPair | None = None) -> None:
        own = None if keys is None else KeyPair.create()
        super().__init__(Address(coordinator, WATCHER, 0), Peer(WATCHER, 0, 0, process_number(own)), own, keys)
        self._asked = 0

    def ask(self, seconds: float, kind: str = WATCH) -> Message | None:
        """How the run goes, or a place in it; see :mod:`.coordinator.window`. None if no answer came in so long."""
        self._asked += 1
        self.send(Message(kind, request=self._asked))
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for _, answer in self.receive(left):
                if answer.kind == DONE and answer.request == self._asked:
                    return answer
        return None


@dataclass(frozen=True)
class JoinPlace:
    """As whom a process may join, as the coordinator says."""

    id: int
    incarnation: int  # how many processes had it before
    session: int
    workers: int  # the run's own
    timeout: float  # seconds, the coordinator's


def find_place(address: RunAddress, patience: float = FIRST_SECONDS, waits: bool = False) -> JoinPlace:
    """Ask a run for a place.

    Args:
        address: Where its coordinator listens.
        patience: Seconds without an answer: a coordinator may be starting again.
        waits: As long as all places are taken. Else for its time-out: one that was killed keeps its place for that.

    Raises:
        ConfigurationError: Nobody answers, or it lets nobody join, or all places stay taken.
        RunEnded: It is over.
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
                    f"the run at {address.coordinator} lets nobody join: start it with max_joiners: N of its strategy, "
                    "for up to N workers beside its own"
                )
            if "place" in fields:
                names = "place", "incarnation", "session", "workers", "timeout"
                return JoinPlace(*(fields[name] for name in names))
            taken = now if taken is None else taken
            if not waits and now - taken > fields["timeout"] + PAUSE:
                raise ConfigurationError(
                    f"all {fields['max_joiners']} places of the run at {address.coordinator} are taken: start it with "
                    "a higher max_joiners, or come when one has left"
                )
            time.sleep(PAUSE)


def _unanswered(address: RunAddress) -> ConfigurationError:
    keys = "give --key_file if it has any" if address.key_file is None else f"not those of {address.key_file}"
    return ConfigurationError(
        f"no coordinator answers at {address.coordinator}: the run does not train, is not reached from here, or its "
        f"keys are others ({keys})"
    )
