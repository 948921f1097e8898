"""Signals in the process that has spawned or forked the ranks: they are passed on, and the ranks stop."""

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException

from cnnstrategies.runtime.stop_signals import PASSES_ON, STOPPING, Repeated, acting_on, end_process


@contextlib.contextmanager
def passed_on(launcher: Any) -> Iterator[None]:
    """Return a context in which SIGINT and SIGTERM are passed on to the ranks that a launcher has spawned or forked.

    The process itself ends when its ranks have ended. Without ranks it ends at once, and also after a second signal.

    Args:
        launcher: Lightning's launcher.
    """
    repeated = Repeated()

    def pass_on(signum: int) -> None:
        first = repeated.received is None
        again = repeated.note(signum)
        ranks: list[BaseProcess] = [rank for rank in launcher.procs if rank.is_alive()]
        if again or not ranks:
            end_process(signum)
        for rank in ranks if first else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid or 0, signum)

    os.environ[PASSES_ON] = str(os.getpid())
    try:
        with acting_on(STOPPING, pass_on):
            yield
    finally:
        del os.environ[PASSES_ON]


def stopped_by(error: BaseException) -> int | None:
    """Return the run's exit code if a signal has stopped the ranks. Otherwise return None.

    Args:
        error: Exception of the process that has spawned or forked the ranks.
    """
    if not isinstance(error, ProcessExitedException):
        return None
    if error.exit_code > 128:  # The rank has stopped after a step, or has ended during its start.
        return error.exit_code
    return 128 - error.exit_code if -error.exit_code in STOPPING else None
