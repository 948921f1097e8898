"""Requests to a run's coordinator from processes that are not members, and the file with the coordinator's address.

A process that is not a member can request the run's status, or a place as a joiner. A place is a worker id that is
reserved for joiners.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
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

NAME = "watch.json"  # name of the file, in a run's folder, that contains the address of the run's coordinator
ANSWER_SECONDS = 2.0  # seconds without a reply after which a request is sent again
FIRST_SECONDS = 10.0  # default of `find_place`: seconds without any reply after which it raises an error
PAUSE = 0.5  # seconds between two requests while all places for joiners are taken
OVER = "the run is over"


@dataclass(frozen=True)
class RunAddress:
    """Address of a run's coordinator.

    Attributes:
        coordinator: The coordinator's endpoint.
        key_file: Path of the file with the run's CURVE keys; None if the run is not encrypted.
    """

    coordinator: str
    key_file: str | None = None

    def save(self, folder: Path) -> None:
        """Write the address to a file in a run's folder. An existing file is replaced.

        Only the user can read the file.
        """
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
        """Find the address of the run that the command-line option ``--run`` names.

        Args:
            run: An endpoint, a run's folder, or a folder that contains the folders of several runs. In the last case,
                the run that started last is used.

        Raises:
            ConfigurationError: `run` is neither an endpoint nor a folder, or the folder does not contain a valid file
                with the address of a run.
        """
        if "://" in run:
            is_local(run)  # called only because it raises an error if the endpoint is not valid
            return cls(run)
        folder = Path(run)
        if not folder.is_dir():
            raise ConfigurationError(
                f"--run {run}: the folder does not exist; use a run's folder, or a run's address as tcp://HOST:PORT"
            )
        files = [folder / NAME] if (folder / NAME).exists() else list(folder.glob(f"*/{NAME}"))
        if not files:
            raise ConfigurationError(
                f"--run {run}: the folder has no {NAME}, so no run with a parameter server is training there now: use "
                "the folder of such a run, or its address as tcp://HOST:PORT"
            )
        newest = max(files, key=lambda path: path.stat().st_mtime)
        try:
            fields = json.loads(newest.read_text())
            return cls(str(fields["coordinator"]), None if fields["key_file"] is None else str(fields["key_file"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"--run {run}: {newest} does not contain a valid address: remove this file"
            ) from error

    @property
    def is_gone(self) -> bool:
        """Whether the run has certainly ended: the endpoint is ``ipc://``, and its socket file does not exist."""
        path = self.coordinator.removeprefix("ipc://")
        return path != self.coordinator and not Path(path).exists()


class Watcher(Line):
    """A connection over which a process that is not a member of a run sends requests to the run's coordinator.

    Args:
        coordinator: The coordinator's endpoint.
        keys: The run's CURVE keys; None without encryption.
    """

    def __init__(self, coordinator: str, keys: KeyPair | None = None) -> None:
        own_keys = None if keys is None else KeyPair.create()
        peer = Peer(WATCHER, 0, 0, process_number(own_keys))
        super().__init__(Address(coordinator, WATCHER, 0), peer, own_keys, keys)
        self._questions = 0

    def ask(self, seconds: float, kind: str = WATCH) -> Message | None:
        """Send a request to the coordinator, and wait for the reply.

        Args:
            seconds: Longest time to wait for the reply.
            kind: Kind of the request: `WATCH` for the run's status, `PLACE` for a place as a joiner; see
                :mod:`.coordinator.status`.

        Returns:
            The reply; None if no reply has arrived in time.
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
    """The place that a coordinator assigns to a joiner, with the run's settings that the joiner needs.

    Attributes:
        id: Worker id of the joiner.
        incarnation: Incarnation of the joiner: the number of earlier processes with this id.
        session: Number of the coordinator's session.
        workers: Number of workers with which the run started.
        timeout: The run's time-out, in seconds.
    """

    id: int
    incarnation: int
    session: int
    workers: int
    timeout: float


def find_place(
    address: RunAddress,
    patience: float = FIRST_SECONDS,
    waits: bool = False,
    check: Callable[[], None] = lambda: None,
) -> JoinPlace:
    """Ask a run's coordinator for a place as a joiner, and wait until a place is free.

    Args:
        address: Address of the run's coordinator.
        patience: Seconds without any reply after which this function raises an error. A coordinator that is being
            restarted does not reply for some seconds.
        waits: Whether to wait without a limit while all places are taken. Otherwise this function waits slightly longer
            than the run's time-out, because the place of a killed joiner becomes free only after the time-out.
        check: Function that is called before each request. It may raise an exception to end the wait.

    Raises:
        ConfigurationError: The coordinator does not reply or does not admit joiners, or no place has become free.
        RunEnded: The run is over.
    """
    keys = None if address.key_file is None else KeyPair.load(address.key_file)
    with Watcher(address.coordinator, keys) as watcher:
        heard, taken = time.monotonic(), None
        while True:
            check()
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
                    f"the run at {address.coordinator} accepts no joiners: to admit up to N more workers, start the "
                    "run with `max_joiners: N` in the options of its strategy"
                )
            if "place" in fields:
                names = "place", "incarnation", "session", "workers", "timeout"
                return JoinPlace(*(fields[name] for name in names))
            taken = now if taken is None else taken
            if not waits and now - taken > fields["timeout"] + PAUSE:
                raise ConfigurationError(
                    f"all {fields['max_joiners']} places for joiners of the run at {address.coordinator} are taken: "
                    "start the run with a higher max_joiners, or try again when a joiner has left"
                )
            time.sleep(PAUSE)


def _unanswered(address: RunAddress) -> ConfigurationError:
    if address.key_file is None:
        keys = "is encrypted (then pass --key_file)"
    else:
        keys = f"has other keys than those in {address.key_file}"
    return ConfigurationError(
        f"no coordinator answers at {address.coordinator}: the run has ended, cannot be reached from this machine, or "
        f"{keys}"
    )
