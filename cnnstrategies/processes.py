"""The processes of one run: how they end together."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing import reduction
from pathlib import Path
from typing import Any

REFUSED = "CNNSTRATEGIES_REFUSED"  # Environment variable: a file that is there once a rank has refused to go on.
STARTER = "CNNSTRATEGIES_STARTER"  # Environment variable: the process that starts the ranks of this machine.
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15


def end_with_parent(parent: int | None) -> None:
    """Have the kernel kill this process when its parent dies; nothing happens outside Linux.

    Rank 0 ends the ranks that it started, unless it is killed itself; a rank that still waits for it to appear
    would go on waiting for the process group's time-out, 30 minutes.

    Args:
        parent: The process id of the one that started this one; None if it is not known. It may have ended while
            this one was still importing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), signal.SIGKILL)


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


def told_by_starter(name: str) -> str | None:
    """An environment variable in a rank that another one, or its supervisor, has started as a program; else None."""
    return os.environ.get(name) if "LOCAL_RANK" in os.environ else None


@contextlib.contextmanager
def one_refusal() -> Iterator[None]:
    """Give the ranks that this process starts as programs a place where the first to refuse makes itself known.

    And the number of this process, with which they end.
    """
    if told_by_starter(REFUSED):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="cnnstrategies_") as folder:
        os.environ[REFUSED] = str(Path(folder) / "refused")
        os.environ[STARTER] = str(os.getpid())
        try:
            yield
        finally:
            del os.environ[REFUSED], os.environ[STARTER]


def first_to_refuse() -> bool:
    """Whether this rank is the first on its machine to refuse to go on, so that it is the one to say why."""
    try:
        if REFUSED in os.environ:
            Path(os.environ[REFUSED]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def has_refused() -> bool:
    """Whether a rank of this run on this machine has refused to go on: the others then lose their connection to it."""
    return REFUSED in os.environ and Path(os.environ[REFUSED]).exists()


def cannot_be_sent(error: BaseException) -> bool:
    """Whether an error was raised while something was pickled for a process that is to be spawned."""
    return any(frame.f_code is reduction.dump.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))
