"""Trace a network into a torch.fx graph, and find the positions at which the graph can be cut."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.graph_checks import (
    SAMPLES,
    Decided,
    UndecidedError,
    graph_module,
    hold_to,
    known,
    number,
    sample_shapes,
)
from cnnstrategies.pipeline.leaf_tracer import LeafTracer
from cnnstrategies.pipeline.node_uses import changes_of_shared_values, nodes_that_change, ordered_nodes, uses_of_state
from cnnstrategies.pipeline.open_tracer import Attribute, OpenTracer
from cnnstrategies.pipeline.own_code import context_spans
from cnnstrategies.pipeline.untouched import Change, Untouched
from cnnstrategies.pipeline.whole_modules import (
    OUTSIDE,
    Seal,
    cannot_trace,
    drawn_from,
    draws,
    first_line,
    seal_changed,
    seal_in_place,
    where,
)
from cnnstrategies.runtime.generator_states import GeneratorStates

# Keys of a traced network's metadata; see the attributes of `LeafTracer`.
_SEALS, _STRUCTURES, _UNFOLDABLE = "seals", "structures", "unfoldable"
MakeTracer = Callable[[dict[nn.Module, Seal], Sequence[Any]], LeafTracer]


def trace(network: nn.Module, training: bool = True) -> fx.GraphModule:
    """Trace a network, as :func:`trace_open` does, and refuse behaviour that depends on the batch or on earlier steps.

    A module that branches on values of tensors, draws random numbers to choose what it computes, or counts its calls is
    right under :func:`trace_open`, because it runs as a whole, but it does these things for each microbatch.

    Raises:
        ConfigurationError: The network cannot be traced, or has such behaviour.
    """
    traced = trace_open(network, training)
    for module, seal in seals(traced).items():
        name = type(module).__name__
        if seal.kind == "values":
            raise cannot_trace(seal.place, seal.reason)
        if seal.kind == "random":
            raise ConfigurationError(f"{name}: {seal.reason}; {_DRAWN}")
        if seal.kind == "state":
            raise ConfigurationError(
                f"{name}: {seal.reason}: when the network is cut into stages, the change would have no effect, or "
                "would happen for each microbatch; make the attribute a buffer and change it by a tensor operation, or "
                "use strategy ddp"
            )
    return traced


_DRAWN = (
    "when the network is cut into stages, it makes a choice for each microbatch, or the same choice in every step; "
    "draw the numbers in a layer such as nn.Dropout or torchvision.ops.StochasticDepth, or use strategy ddp"
)


def trace_open(network: nn.Module, training: bool | None = None) -> fx.GraphModule:
    """Trace a network into a graph module that has the network's own parameters and buffers, under their own names.

    If the network's own code depends on ``self.training``, the graph contains the code for the given mode. Leaf
    modules, such as Dropout and BatchNorm, still depend on their current mode when they run. A submodule that has
    hooks, that cannot be traced, or whose code a graph could not repeat, also becomes a leaf; :func:`seals` returns
    these submodules. The trace leaves the network unchanged.

    Args:
        network: The network.
        training: Whether to trace the network in training mode; otherwise in evaluation mode. By default the network is
            traced in its current mode, which may be a different one for each of its modules.

    Raises:
        ConfigurationError: The network cannot be traced.
    """
    if training is None:
        return _traced_as(network, network.training, {}, LeafTracer)
    with mode(network, training):
        return _traced_as(network, training, {}, LeafTracer)


def trace_opened(
    network: nn.Module, full: fx.GraphModule, opened: Collection[nn.Module]
) -> tuple[fx.GraphModule, list[Attribute]]:
    """Trace only the code of some containers of a network, in the network's current mode.

    Args:
        network: The network.
        full: The result of :func:`trace_open` for the same mode.
        opened: The containers, among them the network itself. All other modules become leaves.

    Returns:
        The traced network, and the attributes whose values the graph contains, see `OpenTracer.reads`.
    """
    reads: dict[Attribute, None] = {}

    def tracer(sealed: dict[nn.Module, Seal], numbers: Sequence[Any]) -> LeafTracer:
        return OpenTracer(opened, full.meta[_STRUCTURES], reads, sealed, numbers)

    return _traced_as(network, network.training, dict(seals(full)), tracer), list(reads)


def _traced_as(network: nn.Module, training: bool, sealed: dict[nn.Module, Seal], tracer: MakeTracer) -> fx.GraphModule:
    """Trace a network in its current mode, with the known numbers for training or evaluation."""
    decided = known.get(network, {}).get(training)
    try:
        traced = _trace(network, sealed, decided.numbers if decided else (), tracer)
    except UndecidedError as error:
        raise ConfigurationError(
            f"torch.fx cannot trace {where(network, error)}: {error}; set self.example_input_array in the module, "
            "or image_shape (C, H, W) in the data module"
        ) from error
    if decided:
        hold_to(traced.graph, decided, type(network).__name__)
        traced.recompile()
    traced.graph.lint()
    return traced


def seals(traced: fx.GraphModule) -> Mapping[nn.Module, Seal]:
    """Return the network's modules that are leaves of a traced graph for a reason, with the reason.

    The network itself is among them if its own forward changes attributes or stores tensors.
    """
    sealed: Mapping[nn.Module, Seal] = traced.meta[_SEALS]
    return sealed


def unfoldable(traced: fx.GraphModule) -> Collection[nn.Module]:
    """Return the modules that cannot become leaves, because a graph cannot unpack what they return."""
    modules: Collection[nn.Module] = traced.meta[_UNFOLDABLE]
    return modules


def decide_by_shapes(network: nn.Module, example: Callable[[int], Any]) -> bool:
    """Determine the numbers that a network's own forward derives from the shapes of its images.

    Call this before :func:`trace`, which needs the numbers, for example to follow a branch on a shape.

    Args:
        network: The network.
        example: Function that takes a count and returns this many example images, as the network takes them. It returns
            None if no example images are available. It is called only if the forward needs a number.

    Returns:
        Whether all numbers are known. This is False if the forward needs a number and no example images are available.
    """
    known.pop(network, None)
    images: Any = None
    for training in (True, False):
        numbers: list[Any] = []
        while (undecided := _undecided(network, training, numbers)) is not None:
            images = example(SAMPLES) if images is None else images
            if images is None:
                return False
            with mode(network, training):
                numbers.append(number(network, undecided, images))
        if numbers:
            are_keys = all(isinstance(known_number, tuple) for known_number in numbers)
            shapes = None if are_keys else sample_shapes(images)
            known.setdefault(network, {})[training] = Decided(tuple(numbers), shapes)
    return True


def _undecided(network: nn.Module, training: bool, numbers: Sequence[Any]) -> UndecidedError | None:
    """Trace a network with the known numbers, to find the next number that the network's forward needs.

    Returns:
        The error that describes the next number; None if the forward needs only the known numbers.
    """
    try:
        with mode(network, training):
            _trace(network, {}, numbers)
    except UndecidedError as error:
        return error
    return None


def _trace(
    network: nn.Module, sealed: dict[nn.Module, Seal], numbers: Sequence[Any], make: MakeTracer = LeafTracer
) -> fx.GraphModule:
    """Trace a network in its current mode, again and again until the trace finds no more modules to seal.

    A trace that seals a module leaves gaps in the nodes' names, and what the module's code has changed until then does
    not count. Only a trace without new seals shows what the remaining code changes.

    Args:
        network: The network.
        sealed: Modules that become leaves. The function adds modules.
        numbers: Known numbers that the network's own forward needs.
        make: Function that makes a tracer from ``sealed`` and ``numbers``.
    """
    while True:
        count = len(sealed)
        tracer, untouched = make(sealed, numbers), Untouched(network)
        try:
            with untouched:
                states = GeneratorStates.current()
                graph = tracer.trace(network)
                library = drawn_from(states)
            is_last = len(sealed) == count
            changed = {**untouched.changed, **(_leaks(network, tracer) if is_last else {})}
            _forget(changed, network, tracer.stored())
        except (ConfigurationError, UndecidedError):
            raise
        except Exception as error:
            raise cannot_trace(where(network, error), first_line(error)) from error
        finally:
            untouched.restore_outside()
        if not is_last:
            continue
        if library:
            raise ConfigurationError(f"{type(network).__name__}: {draws(library)}; {_DRAWN}")
        seal_changed(network, sealed, changed)
        traced = graph_module(network, graph, tracer.constants, type(network).__name__)
        # In each call the graph reads the tensor that the trace has seen, with what earlier calls have made of it.
        for node in nodes_that_change(traced, tracer.constants):
            paths = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            seal_in_place(network, sealed, ["", *paths][-2 if node.op == "call_module" else -1])
        if len(sealed) == count:
            traced.meta |= {_SEALS: sealed, _STRUCTURES: tracer.structures, _UNFOLDABLE: tracer.unfoldable}
            return traced


def _forget(changed: dict[nn.Module, dict[str, Change]], network: nn.Module, names: Collection[str]) -> None:
    """Remove attributes of the network from the changed ones, because the graph stores values in them."""
    of_network = {name: kind for name, kind in changed.pop(network, {}).items() if name not in names}
    if of_network:
        changed[network] = of_network


def _leaks(network: nn.Module, tracer: LeafTracer) -> dict[nn.Module, dict[str, Change]]:
    """Return the modules whose code has stored proxies outside of the network, in the form of `Untouched.changed`."""
    if tracer.leaked():
        gc.collect()
    changed: dict[nn.Module, dict[str, Change]] = {}
    for proxy in tracer.leaked():
        path = [path for path, _ in (proxy.node.meta.get("nn_module_stack") or {}).values()]
        changed[network.get_submodule(path[-1] if path else "")] = {OUTSIDE: "object"}
    return changed


def cut_positions(traced: fx.GraphModule) -> list[int]:
    """Return the positions at which the network can be cut, ascending.

    A position is the index, in :func:`~cnnstrategies.pipeline.node_uses.ordered_nodes`, of the first node after the
    cut. A cut cannot separate two nodes that use the same parameter or buffer, because a parameter or buffer belongs to
    one stage; buffers that the network only reads are an exception, see
    :func:`~cnnstrategies.pipeline.node_uses.read_buffers`. If a node changes the result of an earlier node in place,
    and a later node uses this result or a view of it, a cut cannot separate the first two nodes. A cut cannot be in a
    context that the network's own code enters, such as ``torch.no_grad``.
    """
    nodes = ordered_nodes(traced)
    spans: list[Sequence[int]] = [*uses_of_state(traced, nodes).values(), *context_spans(nodes)]
    spans += changes_of_shared_values(traced, nodes)
    blocked = {index for span in spans for index in range(min(span) + 1, max(span) + 1)}
    return [index for index in range(1, len(nodes)) if index not in blocked]


def find_cut(traced: fx.GraphModule, name: str) -> int:
    """Return the position of the cut after a module or a node; see :func:`cut_positions`.

    Args:
        traced: The traced network.
        name: Name of a module, such as ``layer2.0``, or of a node. The cut is after the module's last node.

    Raises:
        ConfigurationError: The network does not run a module or node with this name, or a cut is not possible there.
    """
    nodes = ordered_nodes(traced)
    inside = [
        index
        for index, node in enumerate(nodes)
        if node.name == name or any(path == name or path.startswith(name + ".") for path in module_paths(node))
    ]
    for module, seal in seals(traced).items() if not inside else ():
        if name.startswith(f"{seal.path}."):
            raise ConfigurationError(
                f"cuts: the network cannot be cut after {name!r}, inside of {seal.path} ({type(module).__name__}), "
                f"which runs as a whole because {seal.reason}; cut before or after {seal.path}"
            )
    if not inside:
        modules = [path for path, _ in traced.named_modules() if path]
        close = [path for path in modules if path.split(".")[0] == name.split(".")[0]] or modules
        raise ConfigurationError(
            f"cuts: the network does not run a module or node {name!r}; use a name such as {', '.join(close[:8])}"
        )
    cut = inside[-1] + 1
    possible = cut_positions(traced)
    if cut not in possible:
        near = min(possible, key=lambda index: abs(index - cut), default=None)
        advice = "it cannot be cut anywhere" if near is None else f"the nearest cut is after {nodes[near - 1].name!r}"
        raise ConfigurationError(
            f"cuts: the network cannot be cut after {name!r} (the network ends there, uses the same parameters again "
            f"later, changes a value in place that it uses again later, or computes in a context such as "
            f"torch.no_grad); {advice}"
        )
    return cut


def module_paths(node: fx.Node) -> list[str]:
    """Return the names of the modules that contain a node, from the outermost to the innermost."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()] + ([str(node.target)] if node.op == "call_module" else [])


@contextmanager
def mode(network: nn.Module, training: bool) -> Iterator[None]:
    """Set a network to training or evaluation mode, and restore the mode of each module on exit."""
    modes = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, previous in modes:
            module.training = previous
