"""Ids of processes, with which a process finds out whether another process of the same machine has ended."""

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# Positions of three fields of /proc/PID/stat, counted after the name of the program.
STATE, FLAGS, START = 0, 6, 19
PF_EXITING = 4  # From linux/sched.h: one of the flags of a process.
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
    fields = _fields(pid)
    return None if fields is None else (fields[STATE], int(fields[START]))


def is_ending(pid: int) -> bool:
    """Whether a process on this machine has ended, or the kernel is ending it.

    The kernel notes that it ends a process before it closes the process's connections. So after a connection to the
    process has broken, this function does not depend on the time at which it is called. On systems other than Linux
    only a process that has ended is found.
    """
    if (fields := _fields(pid)) is not None:
        return fields[STATE] in ENDED or bool(int(fields[FLAGS]) & PF_EXITING)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _fields(pid: int) -> list[str] | None:
    try:
        # The name of the program, in parentheses, may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > START else None
