"""The strategy of a joiner: a process that joins a run in progress, and adds gradients to the run's training."""

import contextlib
import time
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies._lightning_private import ask_of_sigterm, leave_signals
from cnnstrategies.cluster.run_identity import run_identity
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
from cnnstrategies.runtime.helper_processes import shield_helpers
from cnnstrategies.runtime.seeds import mixed_seed, seed_all
from cnnstrategies.runtime.stop_signals import STOPPING, Repeated, acting_on, end_process
from cnnstrategies.strategies.parameter_server.loader import BatchDispatch
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions
from cnnstrategies.strategies.parameter_server.served_state import reading_state
from cnnstrategies.strategies.parameter_server.start import (
    agreed_specification,
    connection,
    restore_trainer,
    seed,
    value_tensors,
)
from cnnstrategies.strategies.parameter_server.strategy import ParameterServerStrategy

TOLD_TO_LEAVE = "it was told to leave"  # The last line that `cnnstrategies join` prints ends with this reason.
LEAST_BEATS = 4  # Least number of heartbeats that this process sends within the coordinator's time-out.


class JoinedDispatch(BatchDispatch):
    """Source of a joiner's batches. It requests batches until the joiner receives Ctrl-C or SIGTERM."""

    def __init__(self, strategy: "JoiningStrategy") -> None:
        super().__init__(strategy)
        self._joiner = strategy
        # Positions of the batches that this process got when it was admitted; None if the loader has taken these
        # batches.
        self.first: Chunk | None = None
        self._rests = False  # Whether the loader must not request batches yet, because the next epoch has not begun.

    @override
    def epoch(self, trainer: Trainer) -> int:
        # Lightning iterates over the loader before each epoch, and again at the start of each epoch except the first.
        # Without this check, the iteration before an epoch would take batches that are never computed.
        begun = trainer.fit_loop.epoch_progress.current.ready > trainer.current_epoch
        self._rests = trainer.current_epoch > 0 and not begun
        return trainer.current_epoch

    @override
    def begin(self, epoch: int, batches: int, done: str) -> None:
        if self._rests:
            return
        self.seen = self.processed = 0
        run_batches = self._joiner.collectives.begin_epoch(epoch, batches, 1)
        if run_batches not in (0, batches):
            raise ConfigurationError(
                f"an epoch of the run has {run_batches} batches, but an epoch of this configuration has "
                f"{batches}: use the run's own data and batch size"
            )

    @override
    def progress(self, epoch: int) -> str:
        return ""  # A joiner does not save checkpoints, so its progress is not needed.

    @override
    def take(self, epoch: int) -> Chunk:
        if self._rests:
            return Chunk(epoch, 0, 0)
        first, self.first = self.first, None
        if first is not None:
            return first
        return Chunk(epoch, 0, 0) if self._joiner.leaving else super().take(epoch)


class JoiningStrategy(ParameterServerStrategy):
    """Strategy of a joiner: an additional worker of a run, which gets its batches from the run's coordinator.

    Lightning treats the joiner as a run of one process. In each call of ``fit`` the joiner waits for its admission to
    the run, trains until the end of the run's current epoch, and leaves the run. The other workers can therefore end
    the epoch without the joiner.

    Attributes:
        leaving: Whether the process was told to leave, by Ctrl-C or SIGTERM.
        epochs: Numbers of the epochs in which the process has computed batches.
        batches: Number of batches that the process has computed.
        samples: Number of samples in the batches that the process has computed.

    Args:
        options: The options of the run's configuration.
        address: The run's address.
        place: The id, the incarnation and the session that the coordinator offers to this joiner.
    """

    def __init__(self, options: ParameterServerOptions, address: RunAddress, place: JoinPlace) -> None:
        arguments = {field.name: getattr(options, field.name) for field in fields(ParameterServerOptions)}
        super().__init__(**{**arguments, "endpoints": list(options.endpoints)}, start_method="popen")
        self.leaving = False
        self._signals = Repeated()
        self.epochs: set[int] = set()
        self.batches = self.samples = 0
        self._alone = True
        # max_epochs and max_steps of the configuration; None before set-up.
        self._configured: tuple[Any, int] | None = None
        self._run = address
        self._patience = FIRST_SECONDS + place.timeout  # Time-out in seconds for a reply of the coordinator.
        self._waiting = False  # Whether the process waits for admission, so that a signal ends the wait.
        self._dispatch: JoinedDispatch = JoinedDispatch(self)
        self._acting = contextlib.ExitStack()
        self._acting.enter_context(acting_on(STOPPING, self._on_signal))
        shield_helpers()

    # Processes of the run

    @override
    def _configure_launcher(self) -> None:
        self._launcher = None

    @override
    def open_session(self) -> None:
        """Do nothing, because this process registers with the coordinator after set-up.

        If the process registered here, the coordinator would reserve an id for the process during the set-up.
        """

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for the distributed sampler of the training data.

        The sampler must return the same order of batches as on the other workers, so it gets the run's number of
        workers. The rank has no effect, because the coordinator chooses the batches of each worker.
        """
        return {"num_replicas": self.world_size, "rank": 0}

    @override
    def setup(self, trainer: Trainer) -> None:
        leave_signals(trainer)
        loop = trainer.fit_loop
        self._configured = self._configured or (loop.max_epochs, loop.max_steps)
        # Learning-rate schedules read max_epochs and max_steps during set-up, and must be the same on all workers. An
        # earlier `fit` has changed the two settings, so the configured values are restored here.
        loop.max_epochs, loop.epoch_loop.max_steps = self._configured
        super().setup(trainer)
        worker = self._enter()
        self.collectives.membership.report_figures(worker.counters.figures)
        self.epochs.add(self._epoch)
        # Each epoch is a separate `fit`. Without this call, all epochs would begin with the same random numbers.
        seed_all(mixed_seed(torch.initial_seed(), self.global_rank, self._epoch))
        # This `fit` must end after one epoch. The coordinator decides when the run is over, so there is no limit on
        # steps.
        loop.max_epochs, loop.epoch_loop.max_steps = trainer.current_epoch + 1, -1

    def _on_signal(self, signum: int) -> None:
        """Act on Ctrl-C or SIGTERM, in a thread.

        After the first signal the process computes the batches that it has taken, and leaves the run. A second signal
        ends the process at once.
        """
        if self._signals.note(signum):
            end_process(signum)
        self.leaving = True
        membership = self.membership
        if self._waiting and membership is not None:
            membership.give_up(TOLD_TO_LEAVE)

    def _check_leaving(self) -> None:
        """Raise an error if the process was told to leave.

        Raises:
            RunEnded: The process was told to leave.
        """
        if self.leaving:
            raise RunEnded(TOLD_TO_LEAVE, clean=True)

    @override
    def agree_on_stop(self, received: int | None) -> int | None:
        """Return None, because a joiner acts on its signals itself, independently of the other workers."""
        return None

    @override
    def requested_stop(self) -> int | None:
        return None

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Do nothing, because the run continues without this process."""

    # Joining and leaving the run

    def _enter(self) -> Worker:
        """Wait until the run admits this process and gives it batches, and return the connection to the servers.

        Raises:
            RunEnded: The run is over, or this process was told to leave.
        """
        worker = None
        while worker is None:
            self._check_leaving()
            self._waiting = True
            try:
                worker = self._try()
            finally:
                self._waiting = False
        return worker

    def _try(self) -> Worker | None:
        """Try once to join the run.

        Returns:
            The connection to the servers. None if another process has registered under the offered id, or if the epoch
            has no batches left. The caller then tries again.
        """
        place = self._find_place()
        try:
            self._take(place)
        except RunEnded as ended:
            self.unregister()
            if ended.clean:
                raise
            # Another process has registered under the offered id, or the coordinator has ended. The next attempt shows
            # which of the two has happened.
            time.sleep(PAUSE)
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
            return find_place(self._run, self._patience, waits=True, check=self._check_leaving)
        except ConfigurationError as error:
            if not self.epochs:
                raise
            # The coordinator has replied earlier and does not reply now, so the run has ended.
            raise RunEnded(OVER, clean=True) from error

    def _take(self, place: JoinPlace) -> None:
        """Register with the coordinator under the id that the coordinator has offered.

        Raises:
            RunEnded: Another process has registered under this id, or the run is over.
        """
        heartbeat = min(self.options.heartbeat, place.timeout / LEAST_BEATS)
        # The coordinator has just replied, so a short time-out is enough for the registration.
        appear = max(place.timeout, ANSWER_SECONDS)
        address = Address(
            self._run.coordinator, WORKER, place.id, place.incarnation, heartbeat, place.timeout, appear, place.session
        )
        self.register(address, self._run.key_file)
        self._check_leaving()  # A signal before the registration has not ended any wait.

    def _wait_for_admission(self) -> tuple[Worker, Specification]:
        """Wait until the run admits this process.

        Returns:
            The connection to the servers, and the run's specification.

        Raises:
            ConfigurationError: The parameters or the seed of this configuration differ from those of the run.
        """
        module, optimizer, run = self.module, self.optimizers[0], self.collectives
        specification = agreed_specification(self)
        check_parameters(specification, self.options.specification(module, optimizer, 1, self.world_size))
        started = run.start()
        worker = connection(run.membership, specification, value_tensors(module, specification))
        state = started.values[started.leader]
        check_seed(state["seed"])
        check_configuration(state["configuration"], run_identity().configuration)
        self.options = replace(self.options, mode=specification.mode, staleness=specification.staleness)
        restore_trainer(self.trainer, optimizer, state)
        worker.join()
        if not started.midway:
            run.barrier("admitted")
        optimizer.state.clear()  # The servers hold the optimizer's state, so the copy on this worker is not needed.
        self._epoch = int(state["epoch"])
        return worker, specification

    # Training of an epoch

    @override
    def on_train_start(self) -> None:
        """Prepare the epoch. The connection to the servers exists already, because it was made during set-up."""
        ask_of_sigterm(self.trainer, False)
        for config in self.trainer.lr_scheduler_configs:
            # A joiner does not validate, so a schedule may not find the value that it monitors. If `strict` were true,
            # Lightning would raise an error.
            config.strict = False

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
        """Leave the run, so that the other workers can end the epoch without this process."""
        assert self._stepper is not None
        self._stepper.worker.wait_all()
        self._leave_servers()
        self.unregister({"epoch": self._epoch, "processed": self._dispatch.processed})

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with reading_state(optimizer):
            return optimizer.state_dict()


def check_parameters(run: Specification, configured: Specification) -> None:
    """Raise a ConfigurationError if a joiner's network does not have the same parameters as the run's network.

    Args:
        run: The run's specification.
        configured: The specification that follows from the joiner's own configuration.
    """
    for expected, parameter in zip_longest(run.parameters, configured.parameters):
        if expected != parameter:
            raise ConfigurationError(
                f"the run trains {len(run.parameters)} parameters, but this configuration has "
                f"{len(configured.parameters)}; the first difference is {expected or 'no parameter'} in the run "
                f"and {parameter or 'no parameter'} here: use the run's own configuration"
            )


def check_configuration(run: str, configured: str) -> None:
    """Raise a ConfigurationError if a joiner's configuration is not the run's configuration.

    Args:
        run: Digest of the run's configuration; empty if the run is a script.
        configured: Digest of this process's configuration.
    """
    if run and run != configured:
        raise ConfigurationError(
            f"the run has the configuration {run}, but this process has the configuration {configured}: use the run's "
            "own configuration; only paths, the number of workers that load data, devices and options of the strategy "
            "may differ"
        )


def check_seed(run_seed: str) -> None:
    """Raise a ConfigurationError if this process and the run have different seeds.

    The order of the samples follows from the seed, and must be the same on all workers.

    Args:
        run_seed: The run's value of ``seed_everything``; empty if no seed is set.
    """
    configured = seed()
    if run_seed != configured:
        raise ConfigurationError(
            f"the run has seed_everything={run_seed or 'false'}, but this configuration has "
            f"{configured or 'false'}, so the samples would have a different order here: use the run's own "
            "configuration"
        )
