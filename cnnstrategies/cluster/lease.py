"""Lease of a run folder: at most one process at a time owns the folder.

The folder contains a file for its owner, such as ``.owner-7.json``. The number is one more than the number of the
previous owner, and the file of the highest number is never removed. A process becomes the owner by creating the file
of the next number, which only one process can do, also on NFS. An owner changes only its own file: it writes a
heartbeat every few seconds, and at the end that it has released the folder. An owner that was taken for dead, for
example because its machine was asleep, finds a file with a higher number, and then writes no more checkpoints.

The lease ends with its owner, also after SIGKILL or a power cut: see :class:`.run_owner.Observation`.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cnnstrategies.cluster.run_owner import HEARTBEAT, Observation, Owner, State
from cnnstrategies.runtime.whole_file import temporary_name

NAME = re.compile(r"\.owner-(\d{1,9})\.json")
POLL = 0.5  # Seconds between two readings of an owner's record.
WAIT = "wait until it has ended"  # First remedy in the error message for a second run.
# Environment variable for the processes that an owner starts: the random text in the owner's record.
TOKEN = "CNNSTRATEGIES_OWNER"
LARGEST = 8192  # Largest number of bytes of a record that are read.


class HeldError(Exception):
    """Error of a process that has requested a lease of a folder that another process owns.

    Args:
        folder: The folder.
        owner: The owner of the folder.
    """

    def __init__(self, folder: Path, owner: Owner) -> None:
        super().__init__(f"{folder} belongs to {owner}")
        self.folder = folder
        self.owner = owner

    def refusal(self, name: str) -> str:
        """Return the error message for a run with this name."""
        return f"the run {name} is already running: {self}; {WAIT}, or choose another name, such as --run_name {name}-2"


@dataclass
class Lease:
    """A process's lease of a folder.

    Attributes:
        folder: The folder.
        number: Number of the owner.
        owner: Record of the owner.
        process: Id of the process that has the lease. A process that the owner has started has no lease of its own,
            and this attribute is then 0.
    """

    folder: Path
    number: int
    owner: Owner
    process: int = field(default_factory=os.getpid)

    def is_lost(self) -> bool:
        """Whether another process has become the owner of the folder, because it took this process for dead."""
        try:
            number, content = newest(self.folder)
        except OSError:
            return False  # The file server does not answer, so nobody can become the owner either.
        owner = Owner.read(content)
        # If a user has removed the folder and started another run in it, the numbers have started again.
        return number not in (0, self.number) or (owner is not None and owner.token != self.owner.token)

    def beat(self) -> None:
        """Write a heartbeat, unless the lease is lost or belongs to another process."""
        if self.process == os.getpid() and not self.is_lost():
            self.owner = self.owner.after_heartbeat()
            with contextlib.suppress(OSError):  # The next heartbeat may succeed.
                self._write()

    def release(self) -> None:
        """Release the folder, so that another process may own it at once."""
        if self.process == os.getpid() and not self.is_lost():
            self.owner = replace(self.owner, released=True)
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        path = _file(self.folder, self.number)
        partial = temporary_name(path)
        try:
            partial.write_bytes(self.owner.content())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def take(
    folder: Path,
    launch: str,
    token: str,
    waits: Callable[[Owner], None] = lambda owner: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Become the owner of a folder, and return the lease.

    If the owner's process cannot be checked, because it runs on another machine, wait until it is certain whether the
    process is alive.

    Args:
        folder: The folder. It is created if it does not exist.
        launch: Description of this process's launch.
        token: Random text of this launch. If a process with the same text already owns the folder, for example the
            process that has started this process, it stays the owner.
        waits: Function that is called once, with the folder's present owner, if :func:`take` must wait.
        clock: Monotonic clock, in seconds.
        sleep: Function that waits for a number of seconds.

    Raises:
        HeldError: Another process owns the folder.
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    observation, waited = Observation(), False
    while True:
        number, content = newest(folder)
        owner, state = Owner.read(content), State.FREE
        if number:
            ended = None if owner is None else owner.has_ended(folder.stat().st_ino)
            state = observation.state(content, ended, clock())
        if state is State.HELD and owner is not None:
            if owner.token == token:
                return Lease(folder, number, owner, process=0)
            raise HeldError(folder, owner)
        if state is State.FREE and (lease := _claim(folder, number + 1, launch, token)) is not None:
            return lease
        if state is State.UNKNOWN and owner is not None and not waited:
            waits(owner)
            waited = True
        sleep(POLL if owner is not None else POLL / 10)


def newest(folder: Path) -> tuple[int, bytes]:
    """Return the number of a folder's newest owner, and the content of its file; 0 if the folder had no owner."""
    numbers = [int(match[1]) for name in os.listdir(folder) if (match := NAME.fullmatch(name)) is not None]
    number = max(numbers, default=0)
    try:
        with open(_file(folder, number), "rb") as file:
            return number, file.read(LARGEST)
    except FileNotFoundError:
        return number, b""


def is_unused(folder: Path) -> bool:
    """Return whether a folder does not exist, or contains only files of owners."""
    return not folder.exists() or all(NAME.fullmatch(name) for name in os.listdir(folder))


def _claim(folder: Path, number: int, launch: str, token: str) -> Lease | None:
    """Create the file of the owner with a number. Return None if another process has created it."""
    lease = Lease(folder, number, Owner.of_this_process(folder, launch, token))
    try:
        with open(_file(folder, number), "xb") as file:
            file.write(lease.owner.content())
    except FileExistsError:
        return None
    for name in os.listdir(folder):  # Remove the files of previous owners.
        if (match := NAME.fullmatch(name)) is not None and int(match[1]) < number:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    return lease


def _file(folder: Path, number: int) -> Path:
    return folder / f".owner-{number}.json"


@contextlib.contextmanager
def holding(
    folders: Sequence[Path], launch: str, token: str, waits: Callable[[Owner], None] = lambda owner: None
) -> Iterator[list[Lease]]:
    """Own folders inside this context, and yield their leases. A thread writes the heartbeats.

    The arguments and errors are those of :func:`take`.
    """
    leases: list[Lease] = []
    stopped = threading.Event()

    def send_heartbeats() -> None:
        while not stopped.wait(HEARTBEAT):
            for lease in leases:
                lease.beat()

    thread = threading.Thread(target=send_heartbeats, name="run-owner", daemon=True)
    try:
        for folder in folders:
            leases.append(take(folder, launch, token, waits))
            if not thread.is_alive():
                thread.start()
        yield leases
    finally:
        stopped.set()
        if thread.is_alive():
            thread.join()
        for lease in leases:
            lease.release()
