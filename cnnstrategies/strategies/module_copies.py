"""Copies of a LightningModule whose steps leave no trace in the module: they log, count and store nothing there."""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from cnnstrategies._torch_private import LoaderIterator, OperationMode
from cnnstrategies.pipeline.recomputed_forward import RecomputedForward
from cnnstrategies.placed.operations import operation_of
from cnnstrategies.runtime.generator_states import GeneratorStates

FEW = 100  # If a list or dictionary has more entries than this, it is copied, but its entries are not.
# Classes of objects that a copy shares with the original module, because copying them would take time or break them.
_SHARED = (
    *(type, FunctionType, ModuleType, torch.device, torch.dtype),
    *(nn.Module, Optimizer, Dataset, DataLoader, Trainer, LightningDataModule),
)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
# Iterators whose copy is independent of the original.
_COPIED_ITERATORS: tuple[type[Any], ...] = (count, type(iter([])), type(iter(())), type(iter(range(0))))


class MutedTrainer:
    """View of a trainer through which its attributes can be read. It has no loggers, and keeps what is set on it."""

    def __init__(self, trainer: Any) -> None:
        self._real = trainer
        self.loggers = [DummyLogger() for _ in trainer.loggers]
        self.logger = self.loggers[0] if self.loggers else None

    def __getattr__(self, name: str) -> Any:
        if name == "_real":
            raise AttributeError(name)
        return getattr(self._real, name)


def _copy_metrics(module: nn.Module) -> dict[int, nn.Module]:
    """Return a copy of each metric in a module. The keys are the original metrics' ``id()``."""
    copies: dict[int, nn.Module] = {}
    for metric in module.modules():
        if isinstance(metric, Metric | MetricCollection):
            copies[id(metric)] = copy.deepcopy(metric)  # Their methods are bound to the object.
    return copies


def muted_copy(module: LightningModule) -> LightningModule:
    """Return a copy of a module in which steps change nothing of the module but parameters.

    Metrics, buffers, lists, numbers and small objects of the user's own classes are copied. The copy shares the
    module's parameters and data; see `tensors_stay`.

    Args:
        module: The module, as it is now.
    """
    copied = _copied_module(module, dict(_copy_metrics(module)))
    _mute(copied, module)
    result: LightningModule = copied
    return result


def trial_of(module: LightningModule) -> LightningModule:
    """Return a copy of a module in which steps, and their backward passes, change nothing of the module but parameters.

    Buffers are copied as well. The copy's parameters are new parameters with the memory of the module's, because a
    second network can need more memory than a training step; see `tensors_stay`. Hooks that the user has registered on
    submodules run in the copy, with copies of the objects that they use. Hooks of this package, and hooks on
    parameters, do not run.
    """
    made: dict[int, Any] = dict(_copy_metrics(module))
    for parameter in module.parameters():
        made[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    copied = _copied_module(module, made)
    for child in copied.modules():
        parameters = vars(child)["_parameters"]
        parameters.update({name: made[id(value)] for name, value in parameters.items() if value is not None})
        for name, hooks in vars(child).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                kept = {number: _bound(hook, made) for number, hook in hooks.items() if not _is_ours(hook)}
                hooks.clear()
                hooks.update(kept)
    _mute(copied, module)
    result: LightningModule = copied
    return result


def _mute(copied: Any, module: LightningModule) -> None:
    """Let a copy of a module log and print nothing."""
    copied.trainer = MutedTrainer(module.trainer)
    for name in ("log", "log_dict", "print"):
        vars(copied)[name] = _say_nothing


def _is_ours(hook: Any) -> bool:
    """Return whether a hook belongs to this package."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("cnnstrategies.")


def _bound(hook: Any, made: dict[int, Any]) -> Any:
    """Return a hook that uses copies of the objects that the original hook uses.

    Args:
        hook: The original hook.
        made: Copies of a module's objects, by the ``id()`` of the originals.
    """
    if not isinstance(hook, FunctionType) or hook.__closure__ is None:
        return hook
    cells = tuple(CellType(_copied(cell.cell_contents, made)) for cell in hook.__closure__)
    bound = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)
    bound.__kwdefaults__ = hook.__kwdefaults__
    return bound


def copy_of_module(module: LightningModule) -> LightningModule:
    """Return a copy of a module that hooks may change. The copy shares the module's parameters and data."""
    result: LightningModule = _copied_module(module, {})
    return result


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the states of all random number generators when the context ends, also by an exception."""
    states = GeneratorStates.current(device)
    try:
        yield
    finally:
        states.restore(device)


@contextmanager
def tensors_stay(module: nn.Module) -> Iterator[None]:
    """Undo what a step on a copy of a module does to tensors that the module and the copy share.

    A step may average a teacher's weights, add noise to weights, or freeze one of two networks.

    Args:
        module: The module. Its parameters also get their gradients' flags and their memory back.
    """
    noted = [(parameter, parameter.requires_grad, parameter.detach()) for parameter in module.parameters()]
    writes = _UndoneWrites()
    try:
        with writes:
            yield
    finally:
        writes.undo()
        for parameter, is_trained, values in noted:
            parameter.requires_grad_(is_trained)
            if type(values) is Tensor and not values.is_meta and parameter.data_ptr() != values.data_ptr():
                parameter.data = values


class _UndoneWrites(OperationMode):  # type: ignore[no-untyped-call]
    """Mode that copies the memory of each tensor before an operation writes it for the first time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By address, the whole memory as bytes, and a copy. Memory that is referred to is not used again.
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, after copies of what it writes."""
        kwargs = kwargs or {}
        for tensor in tree_leaves(operation_of(func).written_values(args, kwargs)):
            self._copy(tensor)
        return func(*args, **kwargs)

    def _copy(self, written: Any) -> None:
        if type(written) not in (Tensor, nn.Parameter) or written.is_meta or written.layout is not torch.strided:
            return
        storage = written.untyped_storage()
        if storage.data_ptr() and storage.data_ptr() not in self._copies:
            memory = torch.empty(0, dtype=torch.uint8, device=written.device).set_(storage)
            self._copies[storage.data_ptr()] = memory, memory.clone()

    def undo(self) -> None:
        """Give all tensors their values from before the mode."""
        for memory, values in self._copies.values():
            memory.copy_(values)


class CollectiveError(RuntimeError):
    """A step on a copy of a module has called a collective."""


class NoCollectives(OperationMode):  # type: ignore[no-untyped-call]
    """Mode that ends a step on a copy of a module at a collective of the user, as other ranks would never answer.

    Attributes:
        collective: Name of the collective; None if no collective was called. The caller reads it because a user's code
            may catch the error.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collective: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, unless it is a collective."""
        if func.namespace == "c10d":
            self.collective = func.name().partition("::")[2].strip("_")
            raise CollectiveError(self.collective)
        return func(*args, **(kwargs or {}))


def _copied_module(module: nn.Module, made: dict[int, Any]) -> Any:
    if id(module) in made:
        return made[id(module)]
    made[id(module)] = copied = object.__new__(type(module))
    attributes = dict(vars(module))
    children = attributes.pop("_modules")
    buffers = attributes.pop("_buffers")
    vars(copied)["_modules"] = {name: child and _copied_module(child, made) for name, child in children.items()}
    vars(copied)["_buffers"] = {name: buffer if buffer is None else buffer.clone() for name, buffer in buffers.items()}
    vars(copied)["_parameters"] = dict(attributes.pop("_parameters"))
    vars(copied).update({name: _copied(value, made) for name, value in attributes.items()})
    return copied


class _Spared:
    """Stands for an iterator that cannot be copied. A step on a copy of a module must not take elements from it."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __iter__(self) -> "_Spared":
        return self

    def __next__(self) -> Any:
        raise RuntimeError("a trial of a step does not take elements from an iterator that the module keeps")


def _copied(value: Any, made: dict[int, Any], depth: int = 3) -> Any:
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in made:
        return MethodType(value.__func__, made[id(value.__self__)])
    if isinstance(value, RecomputedForward):
        return value.for_copy(made[id(value.network)])
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if value is None or isinstance(value, (str, int, float, bytes, *_SHARED)) or not depth:
        return value
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, (*_GENERATORS, *_COPIED_ITERATORS)):
        return copy.deepcopy(value)
    if isinstance(value, (LoaderIterator, GeneratorType)):
        return _Spared(value)
    if isinstance(value, (list, set, dict)):
        result: Any = copy.copy(value)
        if len(value) <= FEW and isinstance(value, list):
            result[:] = [_copied(entry, made, depth - 1) for entry in value]
        elif len(value) <= FEW and isinstance(value, dict):
            result.update({key: _copied(entry, made, depth - 1) for key, entry in value.items()})
        return result
    if not hasattr(value, "__dict__") or type(value).__module__.partition(".")[0] in ("torch", "lightning"):
        return value
    try:
        result = copy.copy(value)
        vars(result).update({name: _copied(entry, made, depth - 1) for name, entry in vars(value).items()})
    except Exception:
        return value
    return result


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    pass
