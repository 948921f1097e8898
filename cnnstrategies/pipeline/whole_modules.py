"""Reasons why modules of a network run as a whole, and the errors for networks that cannot be traced."""

import linecache
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.untouched import Change
from cnnstrategies.runtime.generator_states import GeneratorStates

# Stands for an attribute's name if the network's code has stored something outside of the network.
OUTSIDE = ""

# Why a module runs as a whole.
#   hooks: it has hooks, which must not see proxies
#   context: its forward enters a context, such as autocast
#   random: its forward draws random numbers to choose what it computes
#   values: its forward branches on values of tensors
#   state: its forward changes an attribute that is a number, a string or None
#   stores: its forward stores a tensor, or changes another object
#   untraceable: torch.fx cannot trace its forward for another reason
SealKind = Literal["hooks", "context", "random", "values", "state", "stores", "untraceable"]

_LIBRARIES = {"python": "random", "cpu": "torch", "numpy": "numpy.random", "device": "torch.cuda"}


class DependsOnValuesError(Exception):
    """A network's code branches on values of tensors, so different microbatches might take different branches."""


class EntersContextError(ConfigurationError):
    """A network's code computes in a context that a graph cannot contain.

    The message is for a context that the network's own forward enters. A submodule that enters one runs as a whole.

    Args:
        name: Name of the module whose code computes in the context.
        context: Name of the context.

    Attributes:
        context: Name of the context.
    """

    def __init__(self, name: str, context: str) -> None:
        self.context = context
        advice = "move the with statement and its block into a submodule, which runs as a whole"
        if "grad" in context:
            advice += ", or use .detach() on the values"
        if context == "torch.utils.checkpoint":
            advice = "remove it (set_grad_checkpointing(False) in timm), set the pipeline's activation_checkpointing"
        super().__init__(
            f"{name} computes under {context}, which the network's own forward enters, and a cut must not pass through "
            f"this context: {advice}, or use strategy ddp"
        )


@dataclass(frozen=True)
class Seal:
    """Reason why a module is not opened: it becomes one node of a graph, and the network cannot be cut inside it.

    Attributes:
        kind: Kind of the reason.
        path: Name of the module.
        reason: Clause that follows "because".
        place: The module with its class, and the line of code if the reason is an error.
    """

    kind: SealKind
    path: str
    reason: str
    place: str


def seal_changed(
    network: nn.Module, sealed: dict[nn.Module, Seal], changed: Mapping[nn.Module, Mapping[str, Change]]
) -> None:
    """Seal the modules whose state the network's code has changed during a trace.

    The code of a module's parent may have changed the module. A sealed module's code does not run during a trace, so if
    the module is sealed and still changes, the nearest module above it that is not sealed is sealed instead.

    Args:
        network: The network.
        sealed: Modules that are sealed. The function adds modules.
        changed: Changed modules with the names of the changed attributes, see `Untouched.changed`.
    """
    paths = {module: path for path, module in network.named_modules()}
    for module, attributes in changed.items():
        path = paths[module]
        culprit = module
        while culprit in sealed and path:
            path = path.rpartition(".")[0]
            culprit = network.get_submodule(path)
        if culprit in sealed:
            continue
        # A list to which the network's own code appends numbers is a counter. In a submodule, which runs as a whole,
        # the list may also be a cache.
        counters = ("value", "content") if culprit is network else ("value",)
        name = next((name for name, kind in attributes.items() if kind in counters), None)
        changes = f"its forward changes the attribute {(name or next(iter(attributes)))!r}"
        if OUTSIDE in attributes:
            changes = "its forward stores tensors in a list or dictionary outside of the network"
        place = ".".join(filter(None, (type(network).__name__, path)))
        sealed[culprit] = Seal("state" if name else "stores", path, changes, f"{place} ({type(culprit).__name__})")


def seal_in_place(network: nn.Module, sealed: dict[nn.Module, Seal], path: str) -> None:
    """Seal a module whose code changes a tensor in place that is not a parameter, a buffer or a result.

    Args:
        network: The network.
        sealed: Modules that are sealed. The function adds the module.
        path: Name of the module.

    Raises:
        ConfigurationError: The code is the network's own.
    """
    reason = (
        "its forward changes a tensor in place that is not a parameter or buffer and does not follow from the input"
    )
    module = network.get_submodule(path)
    if module is network:
        raise ConfigurationError(
            f"{type(network).__name__} cannot be cut into stages: {reason}; make the tensor from a result, as with "
            "x.new_zeros(4), or move this code into a submodule, which runs as a whole"
        )
    sealed[module] = Seal("stores", path, reason, f"{type(network).__name__}.{path} ({type(module).__name__})")


def cannot_trace(place: str, reason: str) -> ConfigurationError:
    """Return the error for a network that torch.fx cannot trace.

    Args:
        place: The module with its class and the line of code.
        reason: The reason.
    """
    return ConfigurationError(
        f"torch.fx cannot trace {place}: {reason}; a network that is cut into stages must not branch on values of "
        "tensors: under strategy hybrid_pipeline, move this code into a submodule, which then runs as a whole, or name "
        "a submodule without such code by the option submodule (such as model.backbone for a detector); otherwise "
        "rewrite this code, or use strategy ddp"
    )


def warn_of_checkpoint() -> None:
    """Warn that a checkpoint saves no memory."""
    warnings.warn(
        "the network's own forward calls torch.utils.checkpoint, which saves no memory in a pipeline, because a cut "
        "may pass through the call: set the strategy's activation_checkpointing, or call it in a submodule",
        stacklevel=2,
    )


def draws(library: str) -> str:
    """Return the reason of a seal for a forward that draws random numbers with a library."""
    return f"its forward draws random numbers with {library} to choose what it computes"


def drawn_from(states: GeneratorStates) -> str | None:
    """Return the library of a generator whose state differs from an earlier state; None if no state differs."""
    changed = states.changed(GeneratorStates.current())
    return next((library for name, library in _LIBRARIES.items() if name in changed), None)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).splitlines()[0] if str(error) else repr(error)


def where(network: nn.Module, error: Exception) -> str:
    """Return a text that names the innermost module whose code raised an error, and the line of code."""
    names = {module: name for name, module in network.named_modules()}
    place = type(network).__name__
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            file = frame.f_code.co_filename
            name = ".".join(filter(None, (type(network).__name__, names[module])))
            code = linecache.getline(file, line).strip()
            place = f"{name} ({type(module).__name__}, {Path(file).name}:{line}: {code!r})"
    return place
