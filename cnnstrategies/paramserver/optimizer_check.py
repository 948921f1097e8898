"""The check whether servers make the same optimizer steps as a single process."""

import json

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
    mixes_parameters,
    trial_of,
    values_after_steps,
)
from cnnstrategies.paramserver.optimizer_state import cut_state, join_state, pack_state, unpack_state
from cnnstrategies.paramserver.optimizers import is_elementwise, load_optimizer
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import Slice, cut
from cnnstrategies.paramserver.specification import Specification, check_before_sending, hyperparameters

CPU = torch.device("cpu")  # Servers keep parameters in CPU memory.
SLICE_BYTES = 64  # Small slices, so that made-up parameters are cut if the optimizer allows cut parameters.
REMEDY = (
    "servers create the optimizer again for each part of the parameters, and treat each parameter by itself; use SGD, "
    "AdamW or another optimizer that does so, `mode: local`, or strategy ddp"
)


def check_on_servers(optimizer: Optimizer) -> None:
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
        return
    attribute = attribute_with_tensors(optimizer)
    if attribute is not None:
        raise ConfigurationError(f"{name} keeps tensors of all parameters in its attribute {attribute}: {REMEDY}")
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        try:
            dtype, expected = _whole(optimizer)
            torch.manual_seed(1)
            if are_different(values_after_steps(optimizer, CPU, dtype=dtype), expected):
                raise ConfigurationError(
                    f"{name} draws random numbers in its steps, and each server would draw different ones: {REMEDY}"
                )
            if mixes_parameters(optimizer, expected, CPU, dtype):
                raise ConfigurationError(
                    f"{name} changes a parameter depending on other parameters or their gradients, for example by a "
                    f"norm or a step size of all parameters: {REMEDY}"
                )
            served = _served(optimizer, dtype)
        except Exception as error:
            if isinstance(error, ConfigurationError) and not isinstance(error, CodecError):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigurationError(f"{name} fails with made-up gradients ({reason}): {REMEDY}") from error
        if are_different(served, expected):
            raise ConfigurationError(
                f"{name} makes different steps on servers, for example because an argument of its constructor is "
                f"not in its parameter groups: {REMEDY}"
            )


def _whole(optimizer: Optimizer) -> tuple[torch.dtype, dict[int, Tensor]]:
    """Return the values of made-up parameters after a single process's steps, and the dtype of the parameters.

    The dtype is float64, which shows small differences, or float32 if the optimizer fails with float64.
    """
    torch.manual_seed(0)
    try:
        return torch.float64, values_after_steps(optimizer, CPU)
    except Exception:
        return torch.float32, values_after_steps(optimizer, CPU, dtype=torch.float32)


def _served(optimizer: Optimizer, dtype: torch.dtype) -> dict[int, Tensor]:
    """Return the values of made-up parameters after steps on a server, to which a worker sends gradients."""
    worker = trial_of(optimizer, CPU, dtype=dtype)
    named = [(str(place), parameter) for place, parameter in enumerate(worker.parameters)]
    specification = Specification.of(named, worker.optimizer, 1, slice_bytes=SLICE_BYTES)
    slices = cut(specification)
    store = _store(specification, slices, worker)
    for number, factor in enumerate(FACTORS):
        options = hyperparameters(worker.optimizer)
        check_before_sending(options, specification.groups, number)
        sent = json.loads(json.dumps(options))
        gradients = worker.gradients(factor)
        if number == len(FACTORS) // 2:
            # A checkpoint and a backup hold the state in another form, which must lead to the same steps.
            states = {slice_.key: store.state(slice_.key) for slice_ in slices}
            joined = join_state(specification, slices, states, sent)
            store = _store(specification, slices, worker)
            for key, state in cut_state(specification, slices, joined).items():
                store.set_state(key, unpack_state(memoryview(pack_state(state)), slices[key]))
        for slice_ in slices:
            store.apply(slice_.key, _flat(slice_, gradients), sent)
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
