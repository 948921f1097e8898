"""A worker that joins a run: its place there, its batches, and its way in and out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.collectives import Collectives, Gathered
from cnnstrategies.paramserver.coordinator.chunks import Chunk
from cnnstrategies.paramserver.coordinator.roster import WORKER
from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.places import ANSWER_SECONDS, Place, RunAddress
from cnnstrategies.paramserver.services import SPECIFICATION, load_keys
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.strategies.parameter_server.base import WorkerGroup
from cnnstrategies.strategies.parameter_server.loader import BatchDispatch, DispatchedLoader
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.start import places
from cnnstrategies.strategies.parameter_server.state import restore_trainer, seed


class JoinerEnvironment(LightningEnvironment):
    """One process, whose number is its place in the run; whatever has started it."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def world_size(self) -> int:
        return self._place.workers

    @override
    def global_rank(self) -> int:
        return self._place.id

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


BEATS = 4  # signs of life in the coordinator's time-out, at least


class JoinerGroup(WorkerGroup):
    """A worker that asks the coordinator for its batches, and is alone for all that Lightning wants to know."""

    def __init__(self, address: RunAddress, options: Options, place: Place) -> None:
        super().__init__()
        self.world_size = place.workers
        self.run_address = address
        self.insecure = address.key_file is None and options.security == "none"
        self._alone = True
        self._heartbeat = min(options.heartbeat, place.timeout / BEATS)

    def register(self, place: Place) -> None:
        """Become a member in a place.

        Raises:
            RunEnded: Another was faster, or the run is over.
        """
        assert self.run_address is not None
        # The coordinator has just answered: it is not waited for as at a run's start.
        appear = max(place.timeout, ANSWER_SECONDS)
        address = Address(
            self.run_address.coordinator, WORKER, place.id, place.life, self._heartbeat, place.timeout, appear,
            place.session,
        )  # fmt: skip
        self._membership = Membership(address, keys=load_keys(self.run_address.key_file))
        self._collectives = Collectives(self._membership)

    def leave(self, done: Mapping[str, object] | None = None) -> None:
        """Leave the coordinator, with what was done; a second time does nothing."""
        membership, self._membership, self._collectives = self._membership, None, None
        if membership is not None:
            membership.close(done=done)

    @override
    def close(self) -> None:
        self.leave()
        super().close()


@dataclass(frozen=True)
class Entry:
    """What a worker that was let in begins with.

    Attributes:
        worker: Its connection to the servers.
        specification: The run's.
        epoch: In which it is.
        options: The strategy's, with what the run has decided.
    """

    worker: Worker
    specification: Specification
    epoch: int
    options: Options


def enter(
    group: JoinerGroup, options: Options, trainer: Trainer, module: LightningModule, optimizer: Optimizer
) -> Entry:
    """Wait to be let in, and stand where the others do.

    Args:
        group: A member of the run.
        options: The strategy's.
        trainer: The trainer.
        module: The module.
        optimizer: The user's.

    Raises:
        ConfigurationError: The configuration is not the run's.
        RunEnded: The run is over.
    """
    run, membership = group.collectives, group.membership
    (text,) = run.get(SPECIFICATION)
    specification = Specification.from_json(bytes(text).decode())
    check_parameters(specification, options.specification(module, optimizer, 1, group.world_size))
    started = run.start()
    address = membership.address
    parameters = places(module, specification)
    worker = Worker(
        specification, parameters, membership.source(), address.id, address.incarnation, membership.keys, group.insecure
    )
    state = started.values[started.leader]
    check_seed(state["seed"])
    options = as_of_the_run(options, specification)
    restore_trainer(trainer, optimizer, state)
    worker.join()
    _begin(run, started)
    optimizer.state.clear()  # It is the servers'.
    return Entry(worker, specification, int(state["epoch"]), options)


def _begin(run: Collectives, started: Gathered) -> None:
    if not started.midway:
        run.barrier("admitted")


def check_parameters(wanted: Specification, own: Specification) -> None:
    """Refuse a network that is not the run's.

    Raises:
        ConfigurationError: Its parameters have other names or shapes.
    """
    theirs, mine = ({one.name: one for one in of.parameters} for of in (wanted, own))
    for name in [*theirs, *mine]:
        if theirs.get(name) != mine.get(name):
            here, there = (_shape(of.get(name)) for of in (mine, theirs))
            raise ConfigurationError(
                f"the run trains {len(theirs)} parameters and this configuration {len(mine)}: {name} is {there} there "
                f"and {here} here; give the run's own configuration"
            )


def _shape(parameter: Any) -> str:
    return (
        "missing" if parameter is None else f"{'x'.join(map(str, parameter.shape)) or 'a number'} ({parameter.dtype})"
    )


def check_seed(theirs: str) -> None:
    """Refuse another order of the samples.

    Raises:
        ConfigurationError: It follows from another seed.
    """
    mine = seed()
    if theirs != mine:
        raise ConfigurationError(
            f"the run has seed_everything {theirs or 'false'} and this configuration {mine or 'false'}, so samples are "
            "in another order here: give the run's own configuration"
        )


def as_of_the_run(options: Options, specification: Specification) -> Options:
    """A joiner's options with what the run has decided.

    Args:
        options: The strategy's here.
        specification: The run's.
    """
    return replace(options, mode=specification.mode, staleness=specification.staleness)


class Visitor(Protocol):
    """Who comes and goes.

    Attributes:
        group: The run's processes.
        leaving: Whether it was told to leave.
    """

    group: JoinerGroup
    leaving: bool

    @property
    def is_in(self) -> bool:
        """Whether it takes part in an epoch."""

    def enter(self) -> None:
        """Wait to be let in, and for a first batch."""


class JoinedDispatch(BatchDispatch):
    """Takes batches while it is in the run, and none from when it is told to leave.

    Args:
        visitor: Whose.
    """

    def __init__(self, visitor: Visitor) -> None:
        super().__init__(visitor.group)
        self._visitor = visitor
        self.first: Chunk | None = None  # It was taken to see whether there is one.
        self._rests = False

    @override
    def loader(self, dataloader: object, trainer: Trainer) -> DispatchedLoader:
        def epoch() -> int:
            if not self._visitor.is_in:
                self._visitor.enter()
                # Lightning begins to iterate before training, and once more in an epoch that is not the first.
                self._rests = trainer.current_epoch > 0
            else:
                self._rests = False
            return trainer.current_epoch

        super().loader(dataloader, trainer)  # Refuses what cannot be given out.
        return DispatchedLoader(dataloader, epoch, self._begin, self._take, self._progress)

    @override
    def _begin(self, epoch: int, batches: int, done: str) -> None:
        if self._rests:
            return
        self.seen = self.processed = 0
        theirs = self._group.collectives.begin_epoch(epoch, batches, 1)
        if theirs not in (0, batches):
            raise ConfigurationError(
                f"an epoch of the run has {theirs} batches and of this configuration {batches}: batches are given out "
                "by their number, so give the run's own data and batch size"
            )

    @override
    def _progress(self, epoch: int) -> str:
        return ""  # It saves nothing.

    @override
    def _take(self, epoch: int) -> Chunk:
        if self._rests:
            return Chunk(epoch, 0, 0)
        first, self.first = self.first, None
        if first is not None:
            return first
        return Chunk(epoch, 0, 0) if self._visitor.leaving else super()._take(epoch)
