"""A worker that joins a run: its place there, its batches, and its way in and out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.collectives import Collectives
from cnnstrategies.paramserver.coordinator.settings import WORKER, Address
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.places import ANSWER_SECONDS, Place, RunAddress
from cnnstrategies.paramserver.services import load_keys
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.strategies.parameter_server.base import WorkerGroup
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.state import seed

LEAST_BEATS = 4  # signs of life in the coordinator's time-out


class JoinerEnvironment(LightningEnvironment):
    """One process, whose number is its place in the run; whatever has started it."""

    creates_processes_externally = True

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    @override
    def world_size(self) -> int:
        return self._place.workers

    @override
    def global_rank(self) -> int:
        return self._place.id

    @override
    def set_world_size(self, size: int) -> None:
        """It is the place's."""

    @override
    def set_global_rank(self, rank: int) -> None:
        """It is the place's."""

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


class JoinerGroup(WorkerGroup):
    """A worker that asks the coordinator for its batches, and is alone for all that Lightning wants to know."""

    def __init__(self, address: RunAddress, options: Options, place: Place) -> None:
        super().__init__()
        self.world_size = place.workers
        self.run_address = address
        self._alone = True
        self._heartbeat = min(options.heartbeat, place.timeout / LEAST_BEATS)

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


def check_parameters(wanted: Specification, own: Specification) -> None:
    """Refuse a network that is not the run's."""
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
    """Refuse another order of the samples."""
    mine = seed()
    if theirs != mine:
        raise ConfigurationError(
            f"the run has seed_everything {theirs or 'false'} and this configuration {mine or 'false'}, so samples are "
            "in another order here: give the run's own configuration"
        )


def as_of_the_run(options: Options, specification: Specification) -> Options:
    """A joiner's options with what the run has decided."""
    return replace(options, mode=specification.mode, staleness=specification.staleness)
