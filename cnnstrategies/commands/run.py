"""The processes of a run on the command line: how they find each other, and how they end together."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from cnnstrategies._lightning_private import ranks_are_children
from cnnstrategies.cluster.hosts import Network, across_hosts
from cnnstrategies.cluster.torchrun import own_store
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.processes import cannot_be_sent, first_to_refuse, has_refused, one_refusal, refused_elsewhere


@contextlib.contextmanager
def ends_together(trainer: Trainer, network: Network) -> Iterator[None]:
    """When a trainer's function fails in this process, end the processes that it started, and say once what is wrong.

    Args:
        trainer: Its strategy has the launcher.
        network: How the hosts of the run find each other.

    Raises:
        ConfigurationError: What this rank is the first to refuse.
        SystemExit: Another rank has said what is wrong; the exit code is 2.
    """
    with one_refusal():
        try:
            with own_store(getattr(trainer.strategy, "finds_hosts", False)), across_hosts(trainer, network):
                yield
        except BaseException as error:
            launcher = trainer.strategy.launcher
            said = isinstance(error, Exception) and _said_elsewhere(error, launcher)
            if launcher is not None:
                launcher.kill(signal.SIGKILL)
            if said:
                sys.exit(2)
            if ranks_are_children(launcher) and cannot_be_sent(error):
                raise ConfigurationError(
                    "trainer.strategy spawns its ranks and sends them model, data and callbacks, which cannot all be "
                    f"pickled: {error}; use a strategy that starts programs, such as ddp, or forks, such as ddp_fork"
                ) from error
            raise


def _said_elsewhere(error: Exception, launcher: Any) -> bool:
    """Whether another rank says what is wrong; this one has found the same, or only lost its connection to it."""
    if isinstance(error, ConfigurationError) and first_to_refuse():
        return False
    # The process that started the others waits for the one that refuses to end by itself, having spoken.
    return refused_elsewhere(launcher) or has_refused()
