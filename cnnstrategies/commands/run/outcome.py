"""The start and the end of a run's processes: ranks find each other, one rank reports a failure, and all ranks end."""

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

PATIENCE = 20.0  # seconds that a rank gets to notice another rank's failure and end by itself


@contextlib.contextmanager
def ends_together(trainer: Trainer, interconnect: Interconnect) -> Iterator[None]:
    """End the processes that a trainer's function started if the function fails here, and report the failure once.

    Raises:
        ConfigurationError: This rank is the first to refuse something.
        RunEnded: A rank was killed, and this rank lost its connection to it.
        SystemExit: Another rank has reported the failure; the exit code is that rank's.
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
            silent = isinstance(error, Exception) and not _reports_failure(error)
            code = failed_elsewhere(launcher) if silent else 0
            if launcher is not None:
                launcher.kill(signal.SIGKILL)
            # A rank that reported a lost connection may not know which rank was killed. torch aborts ranks that lost a
            # connection, so an abort after a report is not the cause.
            if killed is not None and not (silent and "SIGABRT" in killed):
                raise RunEnded(killed) from error
            if silent:
                sys.exit(code)
            if ranks_are_children(launcher) and cannot_be_sent(error):
                raise ConfigurationError(
                    "trainer.strategy spawns its ranks, and therefore pickles model, data and callbacks, which failed: "
                    f"{error}; use a strategy that starts programs, such as ddp, or forks, such as ddp_fork"
                ) from error
            if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None  # Lightning has turned the interrupt into a SystemExit.
            raise


@contextlib.contextmanager
def own_temporary_folder(launcher: Any) -> Iterator[None]:
    """Give spawned and forked ranks a temporary folder of their own, and remove it at the end.

    Killed ranks leave files in the temporary folder, their own and torch's. If this process is killed as well, the next
    run removes the folder.
    """
    if not ranks_are_children(launcher):
        yield
        return
    folder, before = make_run_directory(), os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        for rank in launcher.procs:  # A rank that was killed a moment ago may still write to the folder.
            rank.join(PATIENCE)
        tempfile.tempdir = None  # `tempfile` determines the folder again.
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)
        let_go(folder)


class FirstToFail(Callback):
    """Callback that records the first rank to fail, before other ranks notice, so that only the first rank reports.

    On the rank that started the other ranks, the callback also replaces Lightning's observer of these ranks: this rank
    gets time to notice a failure before all ranks are killed.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ranks = end_observation(trainer.strategy.launcher)
        if ranks:
            threading.Thread(target=end_all_after_one, args=(ranks,), name="patient-observer", daemon=True).start()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Exception):
            _reports_failure(exception)


def end_all_after_one(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill all ranks and this process some time after a rank has failed, and name a rank that had been killed.

    This process may wait for the failed rank at a place where it does not learn of the failure: in a store, for
    instance.
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
    """Whether torch's error about a forked or spawned rank describes the first failure.

    torch kills the ranks that are alive after a failure, and other ranks fail because they lose their connection.
    """
    if isinstance(error, ProcessExitedException):
        return error.exit_code == -signal.SIGKILL  # The strategy has already reported which rank was killed.
    return isinstance(error, ProcessRaisedException) and "by peer" not in str(error)


def _reports_failure(error: Exception) -> bool:
    """Whether this rank reports the failure. Otherwise another rank has failed first, and reports."""
    return first_to_fail(1 if explain_run_error(error) is None else 2)
