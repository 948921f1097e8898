"""The processes of one run: how they end together."""

import ctypes
import signal
import subprocess
import sys
import time
import traceback
from multiprocessing import reduction
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; nothing happens outside Linux.

    Rank 0 ends the ranks that it started, unless it is killed itself; a rank that still waits for it to appear
    would go on waiting for the process group's time-out, 30 minutes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """Give this process the name that ps and top show, of at most 15 characters; nothing happens outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def refused_elsewhere(launcher: Any, seconds: float = 2.0) -> bool:
    """Whether a rank that a launcher started as a program ended with exit code 2, that of a configuration error.

    Args:
        launcher: Its ``procs`` are looked at, if it has some.
        seconds: How long to wait for one to end: the others lose their connection to it a moment before.
    """
    processes = [p for p in getattr(launcher, "procs", []) if isinstance(p, subprocess.Popen)]
    deadline = time.monotonic() + seconds
    while processes and time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if 2 in codes:
            return True
        if any(codes):  # It failed otherwise; Lightning is about to kill all ranks, and this one has something to say.
            return False
        time.sleep(0.05)
    return False


def cannot_be_sent(error: BaseException) -> bool:
    """Whether an error was raised while something was pickled for a process that is to be spawned."""
    return any(frame.f_code is reduction.dump.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))
