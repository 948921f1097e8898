"""Record of the process that owns a run folder, and the decision whether this process is still alive."""

import contextlib
import getpass
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Self

from cnnstrategies.runtime.process_ids import ProcessId
from cnnstrategies.runtime.records import parsed, printable, record

LONGEST = 256  # Largest number of characters of a text in a record.
LARGEST_PID = 2**31
LARGEST = 2**64  # First number in a record that is too large.
LATEST = 2.0**32  # First time that is too late for the functions of the module `time`, in seconds since the epoch.
HEARTBEAT = 3.0  # Seconds between two heartbeats of an owner.
# Seconds without a heartbeat after which the owner counts as dead, if its process cannot be checked. The ranks of a
# restarted run wait for rank 0 for at least 60 s, so the time must be shorter.
SILENCE = 30.0
# Largest number of seconds between two readings of a record that count as silence. If the reader or the file server was
# stopped for longer, the owner's heartbeats may not have arrived either.
LONGEST_GAP = 2.0


@dataclass(frozen=True)
class Owner:
    """Owner of a run folder, as its file in the folder describes it.

    Attributes:
        user: Name of the user.
        host: Name of the owner's machine.
        system: Digest of the machine's boot and of the container; see :class:`ProcessId`.
        pid: Process id of the owner.
        start: Start time of the owner's process.
        launch: Description of the owner's launch, such as ``SLURM step 4711.0``; empty if the launcher has no id.
        token: Random text that the owner shares with the processes that it starts.
        folder: Inode of the folder. A copy of the folder has another inode.
        since: Time at which the process became the owner, in seconds since the epoch.
        beat: Number of heartbeats.
        released: Whether the owner has released the folder.
    """

    user: str
    host: str
    system: str
    pid: int
    start: int
    launch: str
    token: str
    folder: int
    since: float
    beat: int = 0
    released: bool = False

    @classmethod
    def of_this_process(cls, folder: Path, launch: str, token: str) -> Self:
        """Return the record of this process as the owner of a folder that exists."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # In a container, the user id may have no name.
            user = f"user {os.getuid()}"
        process = ProcessId.current()
        user, host, launch = (printable(text, LONGEST) for text in (user, socket.gethostname(), launch))
        inode = folder.stat().st_ino
        return cls(user, host, process.system, process.pid, process.start, launch, token, inode, time.time())

    @classmethod
    def read(cls, content: bytes) -> Self | None:
        """Return the owner that the content of a file describes. Return None if the content is not a valid record.

        The file of a new owner is empty for a moment. The file of an owner whose machine has lost power may be empty.
        """
        with contextlib.suppress(ValueError):
            owner = record(cls, parsed(content), LONGEST, LARGEST)
            return owner if 0 < owner.pid < LARGEST_PID and owner.since < LATEST else None
        return None

    def content(self) -> bytes:
        """Return the content of the owner's file."""
        return f"{json.dumps(asdict(self))}\n".encode()

    def after_heartbeat(self) -> Self:
        """Return the record after one more heartbeat."""
        return replace(self, beat=self.beat + 1)

    def has_ended(self, folder: int) -> bool | None:
        """Return whether the owner's process has ended. Return None if this process cannot know that.

        Args:
            folder: Inode of the folder in which the record was found.
        """
        return None if folder != self.folder else ProcessId(self.system, self.pid, self.start).has_ended()

    def __str__(self) -> str:
        launch = f", {self.launch}" if self.launch else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.user} on {self.host} (process {self.pid}{launch}) since {since}"


class State(Enum):
    """State of a run folder, as far as it is known."""

    FREE = "free"
    HELD = "held"
    UNKNOWN = "unknown"


class Observation:
    """Observation of the newest record in a run folder, by a process that wants to own the folder.

    The decision needs no common clock: an owner that cannot be checked directly counts as dead if its record has not
    changed for `SILENCE` seconds of the observer's own monotonic clock.
    """

    def __init__(self) -> None:
        self._content: bytes | None = None
        self._token: str | None = None
        self._read = 0.0
        self._silence = 0.0

    def state(self, content: bytes, ended: bool | None, now: float) -> State:
        """Return the state of the folder after one more reading of the newest record.

        Args:
            content: Content of the record's file.
            ended: Whether the owner's process has ended; None if this process cannot know that.
            now: Time by this process's monotonic clock, in seconds.
        """
        owner = Owner.read(content)
        token = None if owner is None else owner.token
        changed = content != self._content
        beats = changed and token is not None and token == self._token
        self._silence = 0.0 if changed else self._silence + min(now - self._read, LONGEST_GAP)
        self._content, self._token, self._read = content, token, now
        if owner is not None and owner.released:
            return State.FREE
        if owner is not None and ended is not None:
            return State.FREE if ended else State.HELD
        if beats:
            return State.HELD
        return State.FREE if self._silence >= SILENCE else State.UNKNOWN
