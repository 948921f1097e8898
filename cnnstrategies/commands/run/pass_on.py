"""Signals in the process that has spawned or forked the ranks: they are passed on, and the ranks stop."""

import contextlib
import os
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException

from cnnstrategies.runtime.stop_signals import STOPPING, passing_on


def passed_on(launcher: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which SIGINT and SIGTERM are passed on to the ranks that a launcher has spawned or forked.

    Args:
        launcher: Lightning's launcher.
    """

    def send(signum: int) -> bool:
        ranks = [rank for rank in launcher.procs if rank.is_alive()]
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signum)
        return bool(ranks)

    return passing_on(STOPPING, send)


def stopped_by(error: BaseException) -> int | None:
    """Return the run's exit code if a signal has stopped the ranks. Otherwise return None.

    Args:
        error: Exception of the process that has spawned or forked the ranks.
    """
    if not isinstance(error, ProcessExitedException):
        return None
    # The rank caught the signal and ended itself with 128 + the signal's number, after a step or during its start.
    if error.exit_code > 128:
        return error.exit_code
    return 128 - error.exit_code if -error.exit_code in STOPPING else None
