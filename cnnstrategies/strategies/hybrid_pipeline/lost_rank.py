"""Which rank's error is told when one fails and the others lose their connection to it."""

import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from cnnstrategies.pipeline.transport import PeerError

P = ParamSpec("P")
T = TypeVar("T")
GRACE = 2.0  # Seconds that a rank leaves to the one that it has lost.


def after_the_lost_rank(method: Callable[P, T]) -> Callable[P, T]:
    """Have a rank that was forked or spawned end after the one that it has lost.

    The process that has started them tells of the first to end; and Lightning calls no ``on_exception`` in the ranks.

    Args:
        method: Of the strategy.
    """

    @functools.wraps(method)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except PeerError:
            strategy: Any = args[0]
            if strategy._start_method != "popen":
                time.sleep(GRACE)
            raise

    return waiting
