"""Strategy of a process that joins a running run: it takes batches and pushes gradients, and does nothing else."""

import signal
import threading
import time
from dataclasses import fields, replace
from itertools import zip_longest
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies.data.sampling import seed_all
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.coordinator.dispatch import Chunk
from cnnstrategies.paramserver.coordinator.settings import WORKER, Address
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.places import (
    ANSWER_SECONDS,
    FIRST_SECONDS,
    OVER,
    PAUSE,
    JoinPlace,
    RunAddress,
    find_place,
)
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.runtime.seeds import mixed_seed
from cnnstrategies.strategies.parameter_server.loader import BatchDispatch
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions
from cnnstrategies.strategies.parameter_server.start import (
    agreed_specification,
    connection,
    restore_trainer,
    seed,
    value_tensors,
)
from cnnstrategies.strategies.parameter_server.strategy import ParameterServerStrategy

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD = "it was told to leave"
LEAST_BEATS = 4  # Smallest number of heartbeats within the coordinator's time-out.


class JoinedDispatch(BatchDispatch):
    """Takes batches from the one with which the process was admitted until the process is told to leave."""

    def __init__(self, strategy: "JoiningStrategy") -> None:
        super().__init__(strategy)
        self._joiner = strategy
        self.first: Chunk | None = None  # The batches that were taken at the admission, to see whether any are left.
        self._rests = False

    @override
    def epoch(self, trainer: Trainer) -> int:
        # Lightning iterates over the loader before each epoch, and again within each epoch except the first.
        begun = trainer.fit_loop.epoch_progress.current.ready > trainer.current_epoch
        self._rests = trainer.current_epoch > 0 and not begun
        return trainer.current_epoch

    @override
    def begin(self, epoch: int, batches: int, done: str) -> None:
        if self._rests:
            return
        self.seen = self.processed = 0
        theirs = self._joiner.collectives.begin_epoch(epoch, batches, 1)
        if theirs not in (0, batches):
            raise ConfigurationError(
                f"an epoch of the run has {theirs} batches, and an epoch of this configuration {batches}: use the "
                "run's own data and batch size"
            )

    @override
    def progress(self, epoch: int) -> str:
        return ""  # A joiner saves no checkpoints.

    @override
    def take(self, epoch: int) -> Chunk:
        if self._rests:
            return Chunk(epoch, 0, 0)
        first, self.first = self.first, None
        if first is not None:
            return first
        return Chunk(epoch, 0, 0) if self._joiner.leaving else super().take(epoch)


class JoiningStrategy(ParameterServerStrategy):
    """An additional worker of a run, which gets its batches from the run's coordinator.

    For Lightning the process is alone. Each ``fit`` covers an epoch of the run, or its rest: the worker waits for its
    admission, and leaves at the end, so that the other workers end the epoch.

    Attributes:
        leaving: Whether the process was told to leave.
        epochs: Epochs in which the process has taken part.
        batches: Number of batches that the process has computed.
        samples: Number of samples in these batches.

    Args:
        options: The options of the run's configuration.
        address: The run's address.
        place: The place that the coordinator offers.
    """

    def __init__(self, options: ParameterServerOptions, address: RunAddress, place: JoinPlace) -> None:
        arguments = {field.name: getattr(options, field.name) for field in fields(ParameterServerOptions)}
        super().__init__(**{**arguments, "endpoints": list(options.endpoints)}, start_method="popen")
        self.leaving = False
        self.epochs: set[int] = set()
        self.batches = self.samples = 0
        self._alone = True
        self._configured: tuple[Any, int] | None = None  # The configured maximum of epochs and of steps.
        self._run = address
        self._patience = FIRST_SECONDS + place.timeout
        self._waiting = False
        self._dispatch: JoinedDispatch = JoinedDispatch(self)
        self._handle_signals()

    # Processes

    @override
    def _configure_launcher(self) -> None:
        self._launcher = None

    @override
    def open_session(self) -> None:
        """Do nothing: the session opens after the set-up, so that no place is reserved during the set-up."""

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for a sampler of all workers' samples; the coordinator's numbers refer to these."""
        return {"num_replicas": self.world_size, "rank": 0}

    @override
    def setup(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop
        self._configured = self._configured or (loop.max_epochs, loop.max_steps)
        # Schedules follow the configuration, as on the other workers.
        loop.max_epochs, loop.epoch_loop.max_steps = self._configured
        super().setup(trainer)
        worker = self._enter()
        self.collectives.membership.report_figures(worker.counters.figures)
        self.epochs.add(self._epoch)
        # Without this, each epoch would begin with the same random numbers.
        seed_all(mixed_seed(torch.initial_seed(), self.global_rank, self._epoch))
        # The run's coordinator decides when the run is over.
        loop.max_epochs, loop.epoch_loop.max_steps = trainer.current_epoch + 1, -1

    def _handle_signals(self) -> None:
        """Make Ctrl-C and SIGTERM leave the run after the batches that were taken; a second signal ends the process."""
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.leaving:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self.leaving = True
        if self._waiting:
            raise RunEnded(TOLD, clean=True)

    @override
    def agree_on_stop(self, received: int | None) -> int | None:
        """Return None: a joiner's own handler ends it, and no other process with it."""
        return None

    @override
    def requested_stop(self) -> int | None:
        return None

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Do nothing: the run goes on without this process."""

    # Joining and leaving

    def _enter(self) -> Worker:
        """Wait for the admission and a first batch; return the connection to the servers.

        Raises:
            RunEnded: The run is over, or this process was told to leave.
        """
        worker = None
        while worker is None:
            if self.leaving:
                raise RunEnded(TOLD, clean=True)
            self._waiting = True
            try:
                worker = self._try()
            finally:
                self._waiting = False
        return worker

    def _try(self) -> Worker | None:
        """Return the connection to the servers; None if another process took the place, or no batch is left."""
        place = self._find_place()
        try:
            self._take(place)
        except RunEnded as ended:
            self.unregister()
            if ended.clean:
                raise
            time.sleep(PAUSE)  # Another process took the place, or the coordinator has ended: the next try tells which.
            return None
        try:
            worker, specification = self._wait_for_admission()
        except ConfigurationError:
            self.unregister()
            raise
        self._dispatch.first = self.collectives.take(self._epoch, 0)
        if not self._dispatch.first:
            worker.close()
            self.unregister({"epoch": self._epoch, "processed": 0})
            time.sleep(PAUSE)
            return None
        self._stepper = self._stepper_of(worker, specification, own_steps=0)
        return worker

    def _find_place(self) -> JoinPlace:
        try:
            return find_place(self._run, self._patience, waits=True)
        except ConfigurationError as error:
            if not self.epochs:
                raise
            raise RunEnded(OVER, clean=True) from error  # The coordinator answered before, so the run has ended.

    def _take(self, place: JoinPlace) -> None:
        """Register as a member in a place.

        Raises:
            RunEnded: Another process took the place, or the run is over.
        """
        heartbeat = min(self.options.heartbeat, place.timeout / LEAST_BEATS)
        # The coordinator has just answered, so the long wait of a run's start is not needed.
        appear = max(place.timeout, ANSWER_SECONDS)
        address = Address(
            self._run.coordinator, WORKER, place.id, place.incarnation, heartbeat, place.timeout, appear, place.session
        )
        self.register(address, self._run.key_file)

    def _wait_for_admission(self) -> tuple[Worker, Specification]:
        """Wait for the admission; return the connection to the servers and the run's specification."""
        module, optimizer, run = self.module, self.optimizers[0], self.collectives
        specification = agreed_specification(self)
        check_parameters(specification, self.options.specification(module, optimizer, 1, self.world_size))
        started = run.start()
        worker = connection(run.membership, specification, value_tensors(module, specification))
        state = started.values[started.leader]
        check_seed(state["seed"])
        self.options = replace(self.options, mode=specification.mode, staleness=specification.staleness)
        restore_trainer(self.trainer, optimizer, state)
        worker.join()
        if not started.midway:
            run.barrier("admitted")
        optimizer.state.clear()  # The servers hold the state.
        self._epoch = int(state["epoch"])
        return worker, specification

    # Training

    @override
    def on_train_start(self) -> None:
        """Install the signal handlers again; the connection to the servers exists already."""
        self._handle_signals()  # Lightning has installed its own handlers for the time of the fit.
        for config in self.trainer.lr_scheduler_configs:
            config.strict = False  # Only the run's own workers measure the monitored value.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.batches += 1
        self.samples += count_samples(args[0] if args else next(iter(kwargs.values())))
        return super().training_step(*args, **kwargs)

    @override
    def _settle(self, refresh: bool = True) -> None:
        pass

    @override
    def on_train_end(self) -> None:
        """Leave after the batches that were taken, so that the other workers end the epoch."""
        assert self._stepper is not None
        self._stepper.worker.wait_all()
        self._leave_servers()
        self.unregister({"epoch": self._epoch, "processed": self._dispatch.processed})

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()


def check_parameters(run: Specification, configured: Specification) -> None:
    """Refuse a network whose parameters differ from the run's, by a ConfigurationError."""
    for theirs, mine in zip_longest(run.parameters, configured.parameters):
        if theirs != mine:
            raise ConfigurationError(
                f"the run trains {len(run.parameters)} parameters, and this configuration "
                f"{len(configured.parameters)}: {theirs} there is {mine} here; use the run's own configuration"
            )


def check_seed(theirs: str) -> None:
    """Refuse a seed that differs from the run's, and so gives another order of samples, by a ConfigurationError."""
    mine = seed()
    if theirs != mine:
        raise ConfigurationError(
            f"the run has seed_everything={theirs or 'false'}, and this configuration {mine or 'false'}, so samples "
            "would have another order here: use the run's own configuration"
        )
