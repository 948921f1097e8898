"""Ids of processes, with which a process finds out whether another process of the same machine has ended."""

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

STATE, START = 0, 19  # Positions of two fields of /proc/PID/stat, counted after the name of the program.
ENDED = "ZX"  # States of a process that has ended, although its parent process has not read its exit code yet.


@dataclass(frozen=True)
class ProcessId:
    """Id of a process. No other process on any machine has this id, not even after a reboot.

    Attributes:
        system: Digest of the machine's boot id and of the PID namespace. Two processes with the same digest see each
            other's process ids. Empty on systems other than Linux.
        pid: The process id.
        start: Time at which the process started, in clock ticks after the boot; 0 on systems other than Linux. A
            later process with the same process id has a different start time.
    """

    system: str
    pid: int
    start: int

    @classmethod
    def current(cls) -> Self:
        """Return the id of this process."""
        pid = os.getpid()
        return cls(_system(), pid, (state_and_start(pid) or (ENDED, 0))[1])

    def has_ended(self) -> bool | None:
        """Return whether the process has ended. Return None if this cannot be determined.

        It cannot be determined if the process runs on another machine or in another container, or if the system is not
        Linux.
        """
        if not self.system or self.system != _system():
            return None
        try:
            # The folder /proc may hide other users' processes, but this call finds them.
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        if (fields := state_and_start(self.pid)) is None:
            return None
        state, start = fields
        return start != self.start or state in ENDED


@functools.cache
def _system() -> str:
    """Return the digest :attr:`ProcessId.system` of this process. It stays the same in forked processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:12]


def state_and_start(pid: int) -> tuple[str, int] | None:
    """Return the state and the start time of a process on this machine. Return None if they cannot be read."""
    try:
        # The name of the program, in parentheses, may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[STATE], int(fields[START])
    except (OSError, IndexError, ValueError):
        return None
