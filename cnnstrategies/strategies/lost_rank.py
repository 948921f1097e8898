"""Make a rank that has lost another rank end after it, so that the user sees the cause of the failure."""

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from cnnstrategies._lightning_private import ranks_are_children
from cnnstrategies.placed import DivergedError
from cnnstrategies.runtime.groups import PeerError

P = ParamSpec("P")
T = TypeVar("T")
# Seconds for which a rank waits until the lost rank has ended, and the process that has started the ranks has noticed
# it. If that process has asked this rank to end before the wait begins, it does not ask again, and the time passes.
GRACE = 5.0
SILENT = 2.0  # The same time after a time-out, because the lost rank does not end by itself.


def after_the_lost_rank(method: Callable[P, T]) -> Callable[P, T]:
    """Return a method of a strategy in which a forked or spawned rank ends after the rank that it has lost.

    The process that has started the ranks reports the first rank that it sees to have ended, and ends all other ranks
    at once. Lightning calls no ``on_exception`` in the ranks.
    """

    @functools.wraps(method)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (PeerError, DivergedError) as error:
            strategy: Any = args[0]
            if ranks_are_children(strategy.launcher):
                wait_to_be_ended(SILENT if "timed out" in str(error).lower() else GRACE)
            raise

    return waiting


def wait_to_be_ended(seconds: float) -> None:
    """Wait until the process that has started this process asks it to end, or until some seconds have passed."""
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    asked.wait(seconds)
    signal.signal(signal.SIGTERM, before)
