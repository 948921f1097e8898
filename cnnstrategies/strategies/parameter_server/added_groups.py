"""Parameters that are added to the optimizer during training, as Lightning's callback BaseFinetuning does.

The servers hold the parameters of a specification. If the optimizer's parameter groups change, all workers take the
optimizer's state from the servers, and publish another specification. The servers begin again with it, and receive the
parameters' values and the state, as at the start of a run.
"""

from collections.abc import Sequence

from lightning.pytorch import LightningModule

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.joined_optimizers import JoinedOptimizers
from cnnstrategies.paramserver.optimizer_state import renumber_state
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy
from cnnstrategies.strategies.parameter_server.start import connection, specification_of, value_tensors
from cnnstrategies.strategies.parameter_server.step import Stepper


def check_added(strategy: CoordinatedStrategy, stepper: Stepper, batch: int) -> None:
    """Raise a ConfigurationError if the run cannot go on with other parameter groups.

    Args:
        strategy: The strategy.
        stepper: The stepper with the optimizer whose parameter groups have changed.
        batch: Index of the batch that begins.
    """
    options = strategy.options
    added = f"{type(stepper.optimizer).__name__} has other parameters than before, which does not work with"
    if isinstance(stepper.optimizer, JoinedOptimizers):
        raise ConfigurationError(f"{added} several optimizers: add all parameters at the start, or use strategy ddp")
    if not isinstance(stepper.worker, Worker):
        raise ConfigurationError(f"{added} `combine_per_node: true`: set it to false, or use strategy ddp")
    if options.max_joiners:
        raise ConfigurationError(f"{added} `max_joiners: {options.max_joiners}`: set it to 0, or use strategy ddp")
    if batch and not options.aggregates:
        raise ConfigurationError(
            f"{added} `mode: {options.mode}` in the middle of an epoch: add parameters in on_train_epoch_start, or use "
            "`mode: sync`"
        )


def follow_groups(strategy: CoordinatedStrategy, module: LightningModule, stepper: Stepper) -> Worker:
    """Give the servers the parameters of the optimizer's current groups. All workers must call this between two steps.

    Before the call, the module has the servers' values.

    Args:
        strategy: The strategy, with an open session.
        module: The module that is trained.
        stepper: The stepper with the previous connection to the servers, which this function closes.

    Returns:
        The new connection to the servers.
    """
    run, optimizer, before = strategy.collectives, stepper.optimizer, stepper.worker
    assert isinstance(before, Worker)
    known = stepper.specification
    state = before.optimizer_state()["state"]
    counters = before.counters
    run.barrier("added parameters")  # Until here other workers may be receiving the state.
    stepper.close()
    before.close()
    number = known.number + 1
    run.put(specification_of(strategy, module, optimizer, number).to_json(), number)
    specification = Specification.from_json(run.get(number))
    worker = connection(run.membership, specification, value_tensors(module, specification))
    vars(worker.counters).update(vars(counters))
    groups = _groups_of_positions(specification)
    renumbered = renumber_state(state, known.held_names, specification.held_names)
    worker.initialise({"state": renumbered, "param_groups": groups})
    worker.join()
    return worker


def _groups_of_positions(specification: Specification) -> list[dict[str, Sequence[int]]]:
    groups: list[dict[str, Sequence[int]]] = []
    first = 0
    for group in specification.groups:
        groups.append({"params": range(first, first + len(group.parameters))})
        first += len(group.parameters)
    return groups
