"""The check whether servers make the same optimizer steps as a single process."""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from cnnstrategies.codec import CodecError
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.optimizer_trial import (
    FACTORS,
    OptimizerTrial,
    are_different,
    attribute_with_tensors,
    counters_of,
    draws_random_numbers,
    is_elementwise,
    mixes_parameters,
    trial_of,
    values_of_all,
)
from cnnstrategies.paramserver.optimizer_state import cut_state, join_state, pack_state, unpack_state
from cnnstrategies.paramserver.optimizers import check_before_sending, load_optimizer, sent_options
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import Slice, cut
from cnnstrategies.paramserver.specification import Specification, hyperparameters

CPU = torch.device("cpu")  # Servers keep parameters in CPU memory.
SLICE_BYTES = 64  # Small slices, so that made-up parameters are cut if the optimizer allows cut parameters.
REMEDY = (
    "servers create the optimizer again for the parameters that they hold; use SGD, AdamW or another optimizer whose "
    "step is the same then, `mode: local`, or strategy ddp"
)


@dataclass(frozen=True)
class ServedOptimizer:
    """How servers run an optimizer.

    Attributes:
        is_joint: Whether the optimizer's step of a parameter depends on other parameters. One server then holds all
            parameters.
        counters: Entries by name, with the value 0, that the optimizer's first step would add to its parameter groups,
            such as the number of steps. If the groups have these entries from the start, workers send them to the
            servers like hyperparameters, so a parameter without a gradient in some steps has the right number of steps.
    """

    is_joint: bool = False
    counters: Mapping[str, float | Tensor] = field(default_factory=dict)

    def add_counters(self, optimizer: Optimizer) -> None:
        """Add the counters to the parameter groups of an optimizer that has not made steps."""
        for group in optimizer.param_groups:
            for name, value in self.counters.items():
                group.setdefault(name, copy.deepcopy(value))


def check_on_servers(optimizer: Optimizer) -> ServedOptimizer:
    """Refuse an optimizer that would make different steps on servers, or that would fail on servers.

    Copies of the optimizer make steps with made-up parameters in this process: one copy as a single process would use
    it, and another copy as the worker and the servers use it.

    Args:
        optimizer: The user's optimizer, which is not changed.

    Raises:
        ConfigurationError: Servers cannot run the optimizer. The error message says why.
    """
    name = type(optimizer).__name__
    if is_elementwise(load_optimizer(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")):
        return ServedOptimizer()
    attribute = attribute_with_tensors(optimizer)
    if attribute is not None:
        raise ConfigurationError(f"{name} keeps tensors of all parameters in its attribute {attribute}: {REMEDY}")
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        try:
            dtype, expected = values_of_all(optimizer, CPU)
            if draws_random_numbers(optimizer, expected, CPU, dtype):
                raise ConfigurationError(
                    f"{name} draws random numbers in its steps, and each server would draw different ones: {REMEDY}"
                )
            is_joint = mixes_parameters(optimizer, expected, CPU, dtype)
            counters = counters_of(optimizer, CPU, dtype)
            # Some optimizers count only steps with gradients. The workers' own optimizers do not count for these.
            ways = [ServedOptimizer(is_joint, counters), ServedOptimizer(is_joint)][not counters :]
            for served in ways:
                if not are_different(_values_on_server(optimizer, dtype, served), expected):
                    return served
        except Exception as error:
            if isinstance(error, ConfigurationError) and not isinstance(error, CodecError):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigurationError(f"{name} fails with made-up gradients ({reason}): {REMEDY}") from error
        raise ConfigurationError(
            f"{name} makes different steps on servers, for example because an argument of its constructor is not in "
            f"its parameter groups, or because its steps change its hyperparameters: {REMEDY}"
        )


def _values_on_server(optimizer: Optimizer, dtype: torch.dtype, served: ServedOptimizer) -> dict[int, Tensor]:
    """Return the values of made-up parameters after steps on a server, to which a worker sends gradients.

    Args:
        optimizer: The user's optimizer.
        dtype: Dtype of the made-up parameters.
        served: How the server runs the optimizer.
    """
    worker = trial_of(optimizer, CPU, dtype=dtype)
    served.add_counters(worker.optimizer)
    named = [(str(place), parameter) for place, parameter in enumerate(worker.parameters)]
    settings = {"slice_bytes": SLICE_BYTES, "is_joint": served.is_joint}
    specification = Specification.of(named, worker.optimizer, 1, **settings)
    slices = cut(specification)
    store = _store(specification, slices, worker)
    for number, factor in enumerate(FACTORS):
        options = hyperparameters(worker.optimizer)
        check_before_sending(options, specification.groups, number)
        if number == len(FACTORS) // 2:
            # A checkpoint and a backup hold the state in another form, which must lead to the same steps.
            states = {slice_.key: store.state(slice_.key) for slice_ in slices}
            specification = Specification.of(named, worker.optimizer, 1, **settings)
            joined = join_state(specification, slices, states, options)
            store = _store(specification, slices, worker)
            for key, state in cut_state(specification, slices, joined).items():
                store.set_state(key, unpack_state(memoryview(pack_state(state)), slices[key]))
        sent = json.loads(json.dumps(sent_options(options, specification.groups)))
        gradients = worker.gradients(factor)
        store.apply_all({slice_.key: (_flat(slice_, gradients), 0) for slice_ in slices}, sent)
        before = [parameter.detach().clone() for parameter in worker.parameters]
        worker.step_without_gradients()
        if not all(map(torch.equal, worker.parameters, before)):
            raise ConfigurationError(f"{type(optimizer).__name__} changes parameters that have no gradient: {REMEDY}")
        for slice_ in slices:
            for part, values in zip(slice_.parts, slice_.views(store.values[slice_.key]), strict=True):
                worker.parameters[part.parameter].detach().view(-1)[part.start : part.stop] = values.reshape(-1)
    return worker.values()


def _store(specification: Specification, slices: tuple[Slice, ...], worker: OptimizerTrial) -> Store:
    """Return a new server's store with the current values of the trial's parameters."""
    store = Store(specification, slices)
    for slice_ in slices:
        store.put(slice_.key, _flat(slice_, [parameter.detach() for parameter in worker.parameters]), 0)
    return store


def _flat(slice_: Slice, tensors: list[Tensor]) -> Tensor:
    """Return the elements of some tensors that belong to a slice. The tensors are in the order of the parameters."""
    parts = [tensors[part.parameter].reshape(-1)[part.start : part.stop] for part in slice_.parts]
    return torch.cat(parts)
