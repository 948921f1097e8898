"""The sessions of a script: each trainer function is one, and so is each further training within a function.

A session has a coordinator of its own, and servers of its own when it trains. The process that launches the ranks
starts those of the first and watches them; the first rank of each node starts those of the later ones.
"""

import contextlib
from collections.abc import Callable

from cnnstrategies.cluster.torchrun import own_store
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.run import Layout, Place, choose_place

OF_A_LAUNCH = 1 << 16  # sessions, at most


class Sessions:
    """Numbers the sessions of this process, which are the same on all ranks.

    Attributes:
        lost: Ranks that were there at the beginning of the last session and not at its end.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self._launches = 0
        self._opened = 0
        self._store = contextlib.ExitStack()

    def launch(self) -> int:
        """Number of the first session of ranks that this process is about to start."""
        self._launches += 1
        return (self._launches - 1) * OF_A_LAUNCH

    def open(self, options: Options, layout: Callable[[], Layout], training: bool) -> Place:
        """Where the next session of this rank meets.

        Args:
            options: The strategy's.
            layout: Gives the nodes.
            training: Whether it trains.

        Raises:
            RunEnded: A rank is gone, and no launcher brings it back.
            ConfigurationError: It trains with dedicated servers that have ended with an earlier session.
        """
        published = Place.published()
        opened, self._opened = self._opened, self._opened + 1
        if published is not None and opened == 0:
            return published
        if self.lost:
            ranks = ", ".join(f"rank {rank}" for rank in self.lost)
            raise RunEnded(f"{ranks} died before, and every rank is needed here: run this part as a script of its own")
        if opened and training and options.endpoints:
            raise ConfigurationError(
                f"endpoints: dedicated servers end with the first function of a script, and this is number "
                f"{opened + 1}: start them and a script of its own for it, or leave endpoints out"
            )
        first = 0 if published is None else published.session
        directory = None if published is None else published.directory
        if published is None:
            self._store.enter_context(own_store(listens=True))  # torchrun's own store has the main port.
        return choose_place(options, layout(), first + opened, directory=directory)


SESSIONS = Sessions()
