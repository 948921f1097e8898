"""The processes of a run on the command line: how they find each other, and how they end together."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from typing_extensions import override

from cnnstrategies._lightning_private import end_observation, ranks_are_children
from cnnstrategies.callbacks.graceful_stop import StoppedTogether
from cnnstrategies.cluster.hosts import Interconnect, across_hosts
from cnnstrategies.cluster.stores import own_store
from cnnstrategies.commands.run.failures import explain_run_error
from cnnstrategies.commands.run.interrupt import heeds_signals
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.private_directory import let_go, make_run_directory
from cnnstrategies.runtime.processes import (
    cannot_be_sent,
    end_group_at_exit,
    ended_by,
    failed_elsewhere,
    first_to_fail,
    forget_failure,
    killed_rank,
    one_refusal,
    spawned_by_a_thread,
)
from cnnstrategies.strategies.protocol import facts_of

PATIENCE = 20.0  # Seconds in which a rank notices that another one has failed, and ends.


@contextlib.contextmanager
def ends_together(trainer: Trainer, interconnect: Interconnect) -> Iterator[None]:
    """When a trainer's function fails in this process, end the processes that it started, and say once what is wrong.

    Raises:
        ConfigurationError: What this rank is the first to refuse.
        RunEnded: A rank was killed, and this one has lost its connection to it.
        SystemExit: Another rank has said what is wrong; the exit code is that rank's.
    """
    with one_refusal(), own_temporary_folder(trainer.strategy.launcher):
        try:
            trainer.callbacks.insert(0, FirstToFail())  # type: ignore[attr-defined]  # set by the callback connector
            with (
                heeds_signals(partial(_end_others, trainer)),
                own_store(facts_of(trainer.strategy).connects_hosts),
                across_hosts(trainer, interconnect),
                spawned_by_a_thread(),
            ):
                yield
            end_group_at_exit()
        except BaseException as error:
            if isinstance(error, StoppedTogether):
                end_group_at_exit()
            launcher = trainer.strategy.launcher
            killed = killed_rank(launcher) if isinstance(error, Exception) and not _names_the_cause(error) else None
            said = isinstance(error, Exception) and not _speaks(error)
            code = failed_elsewhere(launcher) if said else 0
            if launcher is not None:
                launcher.kill(signal.SIGKILL)
            # One that has said which connection it lost may not know who was killed; torch aborts such a one later.
            if killed is not None and not (said and "SIGABRT" in killed):
                raise RunEnded(killed) from error
            if said:
                sys.exit(code)
            if ranks_are_children(launcher) and cannot_be_sent(error):
                raise ConfigurationError(
                    "trainer.strategy spawns its ranks and sends them model, data and callbacks, which cannot all be "
                    f"pickled: {error}; use a strategy that starts programs, such as ddp, or forks, such as ddp_fork"
                ) from error
            if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None  # Lightning has made a plain failure of it.
            raise


@contextlib.contextmanager
def own_temporary_folder(launcher: Any) -> Iterator[None]:
    """Remove what ranks that are spawned or forked leave in the temporary folder when they are killed, torch's too.

    The next run removes what is left when this process itself is killed.
    """
    if not ranks_are_children(launcher):
        yield
        return
    folder, before = make_run_directory(), os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        for rank in launcher.procs:  # One that was killed just now may still write there.
            rank.join(PATIENCE)
        tempfile.tempdir = None  # It is asked for again.
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)
        let_go(folder)


class FirstToFail(Callback):
    """Says which rank has failed first before the others can notice: they have nothing to say then.

    And gives the rank that has started the others time to notice, before it is killed with those that are left.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ranks = end_observation(trainer.strategy.launcher)
        if ranks:
            threading.Thread(target=end_all_after_one, args=(ranks,), name="patient-observer", daemon=True).start()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Exception):
            _speaks(exception)


def end_all_after_one(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """When a rank has failed and this process has not ended by itself within a time, kill all, and name who was killed.

    This process may wait for such a rank where nothing tells it of its end: in a store, for instance.
    """
    while not any(rank.poll() for rank in ranks):
        if all(rank.returncode == 0 for rank in ranks):
            return
        time.sleep(0.5)
    time.sleep(PATIENCE)
    for number, rank in enumerate(ranks, start=1):
        if rank.poll() == -signal.SIGKILL:
            words = f"The run cannot go on: {ended_by(number, rank.returncode)}"
            print(f"{words}, and rank 0 waited for it for {PATIENCE:.0f} s", file=sys.stderr, flush=True)
    for rank in ranks:
        rank.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _end_others(trainer: Trainer) -> None:
    launcher = trainer.strategy.launcher
    if launcher is not None:
        launcher.kill(signal.SIGKILL)
    forget_failure()


def _names_the_cause(error: Exception) -> bool:
    """Whether what torch says of ranks that were forked or spawned is the first failure; it kills who outlives one."""
    if isinstance(error, ProcessExitedException):
        return error.exit_code == -signal.SIGKILL  # And the strategy has said what that rank was.
    return isinstance(error, ProcessRaisedException) and "by peer" not in str(error)


def _speaks(error: Exception) -> bool:
    """Whether this rank is to say what is wrong; else another one does, or has."""
    return first_to_fail(1 if explain_run_error(error) is None else 2)
