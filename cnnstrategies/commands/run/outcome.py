"""The start and the end of a run's processes. After a failure, one rank reports the failure, and all ranks end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from typing_extensions import override

from cnnstrategies._lightning_private import end_observation, ranks_are_children
from cnnstrategies.cluster.hosts import Interconnect, across_hosts
from cnnstrategies.commands.run.failures import explain_run_error
from cnnstrategies.commands.run.pass_on import passed_on, stopped_by
from cnnstrategies.errors import ConfigurationError, StoppedTogether
from cnnstrategies.models.samples import samples_of
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.private_directory import let_go, make_run_directory
from cnnstrategies.runtime.failure_store import RankFailure
from cnnstrategies.runtime.failure_watch import PATIENCE
from cnnstrategies.runtime.helper_processes import end_helpers
from cnnstrategies.runtime.host_memory import host_memory
from cnnstrategies.runtime.memory_records import MemoryRecord, last_record, remove_record
from cnnstrategies.runtime.out_of_memory import Plan, plan_that_fits
from cnnstrategies.runtime.processes import (
    cannot_be_sent,
    end_group_at_exit,
    ended_by,
    failed_elsewhere,
    first_to_fail,
    forget_failure,
    killed_beside,
    killed_rank,
    one_refusal,
    spawned_by_a_thread,
    wait_for_end,
)
from cnnstrategies.runtime.stop_signals import cleaned_up, wait_if_ending
from cnnstrategies.strategies.failing import (
    FailTogether,
    ends_because,
    print_second,
    remedy_for,
    report_from_ranks,
)
from cnnstrategies.strategies.predicted_memory import predicted_memory
from cnnstrategies.strategies.protocol import facts_of


@contextlib.contextmanager
def ends_together(trainer: Trainer, interconnect: Interconnect) -> Iterator[None]:
    """Return a context in which a method of the trainer runs.

    If the method fails, all ranks end, and one rank reports the failure. Inside the context, ranks on different hosts
    can also connect to each other.

    Args:
        trainer: The trainer that runs the method.
        interconnect: The configuration's settings for connections between hosts.

    Raises:
        ConfigurationError: This rank is the first rank that has refused the configuration.
        RunEnded: Another rank was killed, and this rank has lost the connection to that rank.
        SystemExit: Another rank has reported the failure. The exit code is the code of the reporting rank.
    """
    failure: BaseException | None = None
    with one_refusal(), own_temporary_folder(trainer.strategy.launcher):
        callback = FirstToFail(explain_run_error)
        try:
            trainer.callbacks.insert(0, callback)  # type: ignore[attr-defined]
            if ranks_are_children(trainer.strategy.launcher):
                report_from_ranks(trainer.strategy.launcher, callback)
            with (
                cleaned_up(partial(_end_others, trainer)),
                passed_on(trainer.strategy.launcher)
                if ranks_are_children(trainer.strategy.launcher)
                else contextlib.nullcontext(),
                across_hosts(trainer, interconnect),
                spawned_by_a_thread(),
            ):
                yield
            end_group_at_exit()
        except BaseException as error:
            wait_if_ending()
            cause = _cause(error, callback)
            callback.explain_kill(trainer, cause)
            callback.close()  # Gives the other ranks time to leave the trainer, before they are killed.
            failure = _end_after(cause, trainer, callback.first, callback.has_explained)
        finally:
            callback.close()
    if failure is not None:
        # Without `from`, Python would also print the exception that has left the trainer.
        context = None if failure.__suppress_context__ else failure.__context__
        raise failure from failure.__cause__ or context


def _cause(error: BaseException, callback: FailTogether) -> BaseException:
    """Return the exception that has ended a trainer function.

    Hooks that run after an exception may raise another exception, such as a save of a checkpoint on a full disk. A line
    of output tells about the second exception, and the result is the first exception.
    """
    cause = callback.cause
    if not isinstance(cause, Exception) or cause is error:
        return error
    print_second(error)
    return cause


def _end_after(error: BaseException, trainer: Trainer, first: RankFailure | None, has_explained: bool) -> BaseException:
    """End the other ranks after an exception of this process, and return the exception that this process raises.

    Args:
        error: The exception.
        trainer: The trainer.
        first: Report of the rank that has failed first; None if there is no report.
        has_explained: Whether this process has printed which other rank was killed.
    """
    if (stopped := stopped_by(error)) is not None:
        return _after(error, StoppedTogether(stopped))
    if isinstance(error, StoppedTogether):
        _print_killed_beside(trainer)
        end_group_at_exit()
        end_helpers()
    if isinstance(error, ProcessExitedException) and error.exit_code == -signal.SIGKILL:
        # The command line adds the notes to its line. The record has been removed then.
        error.__notes__ = [*getattr(error, "__notes__", ()), *filter(None, [last_record(error.error_pid)])]
    launcher = trainer.strategy.launcher
    killed = killed_rank(launcher) if isinstance(error, Exception) and not _names_the_cause(error) else None
    beside = _failed_beside(first, trainer) if isinstance(error, Exception) else None
    silent = isinstance(error, Exception) and (beside is not None or not _reports_failure(error))
    code = 0
    if beside is not None:
        code = beside.code
        wait_for_end(beside.process, launcher)
    elif silent:
        code = failed_elsewhere(launcher)
    if launcher is not None:
        launcher.kill(signal.SIGKILL)
    if has_explained:
        return SystemExit(1)
    # This error names the killed rank. A rank that has reported a lost connection may not know about the kill. An abort
    # (SIGABRT) after such a report is not the cause, because torch aborts ranks that have lost a connection.
    if killed is not None and not (silent and "SIGABRT" in killed):
        return _after(error, RunEnded(killed))
    if silent:
        return SystemExit(code)
    if isinstance(error, Exception) and first is not None and first.rank != trainer.global_rank:
        print(ends_because(trainer.global_rank, first), file=sys.stderr, flush=True)
        return SystemExit(first.code)
    if ranks_are_children(launcher) and cannot_be_sent(error):
        refusal = ConfigurationError(
            "trainer.strategy spawns its ranks, but the model, the data or the callbacks cannot be pickled for "
            f"them: {error}; use a strategy that starts programs, such as ddp, or forks, such as ddp_fork"
        )
        return _after(error, refusal)
    return error


def _after(error: BaseException, new: BaseException) -> BaseException:
    """Return a new exception with an earlier exception as its cause, as ``raise new from error`` does."""
    new.__cause__ = error
    return new


@contextlib.contextmanager
def own_temporary_folder(launcher: Any) -> Iterator[None]:
    """Make spawned and forked ranks use a separate temporary folder inside this context, and then remove the folder.

    A rank that is killed leaves its files in the temporary folder. If this process is also killed, the next run removes
    the folder.

    Args:
        launcher: The strategy's launcher.
    """
    if not ranks_are_children(launcher):
        yield
        return
    folder, before = make_run_directory(), os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        with cleaned_up(partial(shutil.rmtree, folder, ignore_errors=True)):
            yield
    finally:
        # A rank that is being killed may still write to the folder, so wait until the rank has ended.
        for rank in launcher.procs:
            rank.join(PATIENCE)
        tempfile.tempdir = None  # With None, the module `tempfile` determines its folder again.
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)
        let_go(folder)


class FirstToFail(FailTogether):
    """Callback that also records which rank of this machine fails first, so that only this rank reports the failure.

    If rank 0 has started the other ranks as programs, a thread of Lightning on rank 0 kills all ranks as soon as one
    rank fails. This callback replaces that thread by :func:`end_all_after_one`, which first gives the ranks time to
    report the failure.

    Attributes:
        launch: See :class:`.MemoryRecord`; None before the training.
        has_explained: Whether this process has printed that another rank was killed.
    """

    launch: str | None = None
    has_explained = False
    _in_trainer = False
    _record: MemoryRecord | None = None
    _plans: Sequence[Plan] = ()
    _parameters = 0  # Bytes of this rank's parameters; see `predicted_peak`.

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._in_trainer = True
        ranks = end_observation(trainer.strategy.launcher)
        if ranks:
            args = (ranks, lambda: self._in_trainer)
            threading.Thread(target=end_all_after_one, args=args, name="patient-observer", daemon=True).start()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_record": None}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        available = host_memory() // max(1, trainer.num_devices)
        # The folder and the port belong to one run at a time. Each rank may have a wrapper as its parent process.
        checkpoint: Any = trainer.checkpoint_callback
        folder = getattr(checkpoint, "dirpath", None) or trainer.default_root_dir
        self.launch = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} {folder}"
        self._record = MemoryRecord(remedy_for(trainer), trainer.global_rank, available, self.launch)

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.move()
        if self._record is not None:
            self._record.write(trainer.global_step)

    @override
    def predicted_peak(self, trainer: Trainer) -> str:
        with contextlib.suppress(Exception):
            loader = trainer.train_dataloader
            predicted = predicted_memory(trainer, samples_of(loader, getattr(trainer, "datamodule", None)))
            peaks, self._plans = predicted.peaks, predicted.plans
            self._parameters = peaks[trainer.global_rank].parameters if peaks else 0
            return str(peaks[trainer.global_rank]) if peaks else ""
        return ""

    @override
    def plan_that_fits(self, trainer: Trainer, held: int) -> str:
        base = self._parameters
        if trainer.strategy.root_device.type == "cpu" and self._record is not None:
            base = self._record.base
        return plan_that_fits(self._plans, trainer.global_rank, held - base)

    @override
    def close(self) -> None:
        self._in_trainer = False
        super().close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.report(trainer, exception)
        self.explain_kill(trainer, exception)
        if isinstance(exception, Exception) and not _failed_beside(self.first, trainer):
            _reports_failure(exception)
        self.skip_savers(trainer, exception)

    def explain_kill(self, trainer: Trainer, exception: BaseException) -> None:
        """Print that another rank was killed, if this is the reason for an exception.

        This does not wait for anything: mpirun kills this rank two seconds after it has lost another one.
        """
        if isinstance(exception, Exception) and not self.has_explained and not _failed_beside(self.first, trainer):
            self.has_explained = _print_killed_beside(trainer)


def end_all_after_one(ranks: Sequence[subprocess.Popen[bytes]], in_trainer: Callable[[], bool]) -> None:
    """Wait until a rank fails, and `PATIENCE` seconds later kill all ranks and this process.

    A thread runs this function. The main thread usually notices the failure and ends the process earlier. The main
    thread does not notice the failure while it waits for the failed rank, for example in a torch store. If the rank was
    killed, the function prints this fact.

    Args:
        ranks: The processes of the ranks that this process has started.
        in_trainer: Whether the main thread runs a function of the trainer. After that, this process ends by itself, and
            may have killed the ranks.
    """
    while not any(rank.poll() for rank in ranks):
        if all(rank.returncode == 0 for rank in ranks):
            return
        time.sleep(0.5)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not in_trainer():
            return
        time.sleep(0.05)
    for number, rank in enumerate(ranks, start=1):
        if rank.poll() == -signal.SIGKILL:
            text = f"The run cannot continue, and rank 0 has waited {PATIENCE:.0f} s for a rank"
            print(f"{text}: {ended_by(number, rank.returncode, rank.pid)}", file=sys.stderr, flush=True)
    for rank in ranks:
        rank.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _end_others(trainer: Trainer) -> None:
    launcher = trainer.strategy.launcher
    if launcher is not None:
        launcher.kill(signal.SIGKILL)
    _print_killed_beside(trainer)
    remove_record()
    forget_failure()


def _print_killed_beside(trainer: Trainer) -> bool:
    """Print that the system has killed a rank that a launcher such as torchrun has started; return whether it has.

    torchrun sends SIGTERM to this rank then.
    """
    if (killed := _killed_beside(trainer)) is None:
        return False
    print(f"The run cannot continue: {killed}", file=sys.stderr, flush=True)
    return True


def _killed_beside(trainer: Trainer) -> str | None:
    """Return a text about a killed rank of a run that a launcher such as torchrun has started on this machine."""
    environment = facts_of(trainer.strategy).environment
    # Rank 0 reads the exit codes of ranks that it has started. They have Lightning's own environment.
    if environment is None or isinstance(environment, LightningEnvironment):
        return None
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
    launch = next((callback.launch for callback in callbacks if isinstance(callback, FirstToFail)), None)
    return None if launch is None else killed_beside(launch)


def _names_the_cause(error: Exception) -> bool:
    """Return whether torch's error about a forked or spawned rank describes the cause of the run's failure.

    Other errors describe a consequence. After a failure torch ends the other ranks, or these ranks lose their
    connections to the failed rank.
    """
    if isinstance(error, ProcessExitedException):
        return error.exit_code == -signal.SIGKILL  # torch ends ranks by SIGTERM, so SIGKILL came from outside the run.
    return isinstance(error, ProcessRaisedException) and "by peer" not in str(error)


def _failed_beside(first: RankFailure | None, trainer: Trainer) -> RankFailure | None:
    """Return the report of the rank that has failed first, if this is another rank of this machine; otherwise None."""
    beside = first is not None and first.rank != trainer.global_rank and first.host == socket.gethostname()
    return first if beside else None


def _reports_failure(error: Exception) -> bool:
    """Return whether this rank must report its failure.

    The result is True only for the first rank that fails.
    """
    code = error.exit_code if isinstance(error, ConfigurationError) else 2
    return first_to_fail(1 if explain_run_error(error) is None else code)
