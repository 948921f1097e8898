"""A worker that joins a run: its place there, and its way in and out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.collectives import Collectives, Gathered
from cnnstrategies.paramserver.coordinator.roster import WORKER
from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.places import ANSWER_SECONDS, Place
from cnnstrategies.paramserver.run_address import RunAddress
from cnnstrategies.paramserver.services import SPECIFICATION, load_keys
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.strategies.parameter_server.group import WorkerGroup
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.start import places
from cnnstrategies.strategies.parameter_server.state import restore_trainer, seed

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
