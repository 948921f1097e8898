"""Processes that do not outlive their parent."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; nothing happens outside Linux.

    Rank 0 ends the ranks that it started, unless it is killed itself; a rank that still waits for it to appear
    would go on waiting for the process group's time-out, 30 minutes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
