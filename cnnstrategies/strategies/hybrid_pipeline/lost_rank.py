"""Which rank's error is told when one fails and the others lose their connection to it."""

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from cnnstrategies._lightning_private import ranks_are_children
from cnnstrategies.pipeline.transport import PeerError

P = ParamSpec("P")
T = TypeVar("T")
# Seconds that a rank leaves to the one that it has lost, and to the process that has started them to see it end. If it
# was asked to end before it came here, nobody asks again, and the whole time passes.
GRACE = 5.0
SILENT = 2.0  # The same after a time-out: the other one does not end by itself.


def after_the_lost_rank(method: Callable[P, T]) -> Callable[P, T]:
    """Have a rank that was forked or spawned end after the one that it has lost, in a method of the strategy.

    The process that has started them tells of the first that it sees to have ended, and ends the others at once; and
    Lightning calls no ``on_exception`` in the ranks.
    """

    @functools.wraps(method)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except PeerError as error:
            strategy: Any = args[0]
            if ranks_are_children(strategy.launcher):
                wait_to_be_ended(SILENT if "timed out" in str(error).lower() else GRACE)
            raise

    return waiting


def wait_to_be_ended(seconds: float) -> None:
    """Wait until the process that has started this one asks it to end, or for some seconds."""
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    asked.wait(seconds)
    signal.signal(signal.SIGTERM, before)
