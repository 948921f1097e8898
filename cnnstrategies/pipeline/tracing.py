"""Tracing of a network into a torch.fx graph, and the places where the graph can be cut."""

import inspect
import linecache
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.fixed import (
    SAMPLES,
    Decided,
    UndecidedError,
    check_contexts,
    contexts,
    hold_to,
    is_of_shapes,
    known,
    number,
    same_each_time,
    sample_shapes,
)

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
IN_PLACE_OPERATORS = frozenset({"iadd", "isub", "imul", "itruediv", "setitem"})


class DependsOnValuesError(Exception):
    """A network's code branches on values of tensors, so each microbatch would take its own branch."""


class TracedValue(fx.Proxy):
    """Placeholder for a value while a network's code is traced; it can provide numbers that follow from shapes."""

    tracer: "LeafTracer"

    def __int__(self) -> int:
        return int(self.tracer.number(self))

    def __float__(self) -> float:
        return float(self.tracer.number(self))

    __index__ = __int__


class LeafTracer(fx.Tracer):
    """Tracer in whose graph each module of torch.nn, and each module of a subclass, is one node.

    A module of a subclass, such as timm's ``BatchNormAct2d``, is not opened, because its code may depend on
    ``self.training``, which tracing would fix.

    Args:
        whole: Further modules that become one node each.
        numbers: Known numbers that the network's own forward needs, in the order in which it needs them.
    """

    def __init__(self, whole: Collection[nn.Module], numbers: Sequence[Any]) -> None:
        # Functions of einops check the types of their arguments, and a placeholder does not have the type of a tensor.
        super().__init__(autowrap_modules=(math, *([sys.modules["einops"]] if "einops" in sys.modules else [])))
        self._contexts = contexts()
        self._whole = whole
        self._numbers = iter(numbers)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Create one placeholder for all tensors that the network takes. Arguments with defaults keep the defaults."""
        assert isinstance(self.root, nn.Module)
        names = network_inputs(self.root)
        if len(names) == 1:
            return root_fn, [self.root, self.create_proxy("placeholder", names[0], (), {})]
        inputs: Any = self.create_proxy("placeholder", "inputs", (), {})
        return root_fn, [self.root, *(inputs[index] for index in range(len(names)))]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node of the graph, and check that it runs in the contexts in which the trace began."""
        paths = [path for path, _ in self.module_stack.values()]
        check_contexts(self._contexts, paths[-1] if paths else "the network's forward")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the placeholder for a node's result."""
        return TracedValue(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return the condition of a branch."""
        return bool(self.number(obj))

    def number(self, value: fx.Proxy) -> Any:
        """Return a number that the network's code needs.

        Raises:
            DependsOnValuesError: The number does not follow from shapes.
            UndecidedError: The number follows from shapes and is not known. Inside of a module it is never known.
        """
        if not is_of_shapes(value.node):
            raise DependsOnValuesError(f"it branches on a value ({value.node.name})")
        for known_number in () if self.module_stack else self._numbers:
            return known_number
        raise UndecidedError(self.graph, value.node)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node."""
        if m in self._whole:
            return True
        if isinstance(m, CONTAINERS):
            return False
        bases = type(m).__mro__[: type(m).__mro__.index(nn.Module)]
        return any(base.__module__.startswith(("torch.nn", "torch.ao.nn")) for base in bases)


def trace(network: nn.Module, training: bool = True) -> fx.GraphModule:
    """Trace a network into a graph module that shares the network's parameters and buffers, under their names.

    Branches of the network's own code on ``self.training`` are fixed for the given mode. Leaf modules, such as Dropout
    and BatchNorm, still follow their mode when they run. A module whose own code cannot be traced, for example because
    it branches on shapes or computes without gradients, becomes a leaf as well.

    Raises:
        ConfigurationError: The network cannot be traced.
    """
    decided = known.get(network, {}).get(training)
    try:
        graph = _trace(network, training, decided.numbers if decided else ())
    except UndecidedError as error:
        raise ConfigurationError(
            f"torch.fx cannot trace {_where(network, error)[1]}: {error}. Set self.example_input_array in the module, "
            "or image_shape (C, H, W) in the data module"
        ) from error
    if decided:
        hold_to(graph, decided, type(network).__name__)
    graph.lint()
    return fx.GraphModule(network, graph, type(network).__name__)


def decide_by_shapes(network: nn.Module, example: Callable[[int], Any]) -> bool:
    """Determine the numbers that a network's own forward derives from its images' shapes, for :func:`trace`.

    Args:
        network: The network.
        example: Function from a number of samples to example images as the network takes them, or to None if no images
            are known. It is called only if the forward needs a number.

    Returns:
        Whether all numbers are known; False if the forward needs a number and no images are known.
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
            known.setdefault(network, {})[training] = Decided(tuple(numbers), sample_shapes(images))
    return True


def _undecided(network: nn.Module, training: bool, numbers: Sequence[Any]) -> UndecidedError | None:
    """Return the error for the first number that the forward needs beyond the known numbers, or None."""
    try:
        _trace(network, training, numbers)
    except UndecidedError as error:
        return error
    return None


def _trace(network: nn.Module, training: bool, numbers: Sequence[Any]) -> fx.Graph:
    whole: set[nn.Module] = set()
    while True:
        with mode(network, training), same_each_time(network):
            try:
                return LeafTracer(whole, numbers).trace(network)
            except Exception as error:
                module, place = _where(network, error)
                if module is not network and not isinstance(error, DependsOnValuesError):
                    whole.add(module)
                elif isinstance(error, ConfigurationError | UndecidedError):
                    raise
                else:
                    raise ConfigurationError(
                        f"torch.fx cannot trace {place}: {str(error).splitlines()[0] if str(error) else error!r}. A "
                        "network that is cut into stages must not branch on values of tensors: rewrite this code, or "
                        "use strategy ddp"
                    ) from error


def network_inputs(network: nn.Module) -> list[str]:
    """Return the names of the tensors that a network takes: its arguments without defaults, or else the first argument.

    Raises:
        ConfigurationError: An argument without default can be passed by keyword only.
    """
    arguments = list(inspect.signature(network.forward).parameters.values())
    needed = [
        argument
        for argument in arguments
        if argument.default is argument.empty and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    ]
    if any(argument.kind is argument.KEYWORD_ONLY for argument in needed):
        raise ConfigurationError(
            f"{type(network).__name__}.forward takes the argument {needed[-1].name!r} by keyword only: a network that "
            "is cut into stages takes its tensors in order; leave out the * before the argument"
        )
    return [argument.name for argument in needed] or [argument.name for argument in arguments[:1]] or ["images"]


def _where(network: nn.Module, error: Exception) -> tuple[nn.Module, str]:
    """Return the innermost module whose own code could not be traced, and a text with its name and line."""
    names = {module: name for name, module in network.named_modules()}
    culprit, place = network, type(network).__name__
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            file = frame.f_code.co_filename
            culprit, name = module, ".".join(filter(None, (type(network).__name__, names[module])))
            code = linecache.getline(file, line).strip()
            place = f"{name} ({type(module).__name__}, {Path(file).name}:{line}: {code!r})"
    return culprit, place


def ordered_nodes(traced: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that compute, in topological order: all except placeholders, attributes and the output."""
    return [node for node in traced.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def cut_positions(traced: fx.GraphModule) -> list[int]:
    """Return the possible cuts: for each the index of the first node after the cut in :func:`ordered_nodes`, ascending.

    A cut is not possible between two uses of the same parameters or buffers, which must belong to one stage, nor
    between a value and its change in place if the value is used again after the change.
    """
    nodes = ordered_nodes(traced)
    position = {node: index for index, node in enumerate(nodes)}
    spans = list(_uses_of_state(traced, nodes).values())
    for node in nodes:
        if (changed := changed_in_place(traced, node)) in position:
            assert changed is not None
            if any(position.get(user, len(nodes)) > position[node] for user in changed.users):
                spans.append([position[changed], position[node]])
    blocked = {index for span in spans for index in range(min(span) + 1, max(span) + 1)}
    return [index for index in range(1, len(nodes)) if index not in blocked]


def find_cut(traced: fx.GraphModule, name: str) -> int:
    """Return the position of the cut after the last node of a module, such as ``layer2.0``, or after a node.

    Raises:
        ConfigurationError: The network runs no such module or node, or cannot be cut after it.
    """
    nodes = ordered_nodes(traced)
    inside = [
        index
        for index, node in enumerate(nodes)
        if node.name == name or any(path == name or path.startswith(name + ".") for path in module_paths(node))
    ]
    if not inside:
        modules = [path for path, _ in traced.named_modules() if path]
        close = [path for path in modules if path.split(".")[0] == name.split(".")[0]] or modules
        raise ConfigurationError(
            f"cuts: the network runs no module or node {name!r}; use one such as {', '.join(close[:8])}"
        )
    cut = inside[-1] + 1
    possible = cut_positions(traced)
    if cut not in possible:
        near = min(possible, key=lambda index: abs(index - cut), default=None)
        advice = "the network cannot be cut anywhere" if near is None else f"the nearest cut: {nodes[near - 1].name!r}"
        raise ConfigurationError(
            f"cuts: the network cannot be cut after {name!r} (the network ends there, or uses the same parameters "
            f"again later); {advice}"
        )
    return cut


def module_paths(node: fx.Node) -> list[str]:
    """Return the names of the modules that a node belongs to, from the outermost to the innermost."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()] + ([str(node.target)] if node.op == "call_module" else [])


def changed_in_place(traced: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the node whose value ``node`` overwrites, or None if it overwrites none."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.op == "call_module":
        in_place = bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = (
            bool(node.kwargs.get("inplace", False))
            or name in IN_PLACE_OPERATORS
            or (name.endswith("_") and not name.endswith("__"))
        )
    return first if in_place else None


def state_names(traced: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """Yield the names of the parameters and buffers that a node uses, as in the network's state dict."""
    if node.op == "call_module":
        prefix = str(node.target)
        module = traced.get_submodule(prefix)
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            yield f"{prefix}.{name}"
    for source in node.all_input_nodes:
        if source.op == "get_attr" and isinstance(attrgetter(str(source.target))(traced), Tensor):
            yield str(source.target)


@contextmanager
def mode(network: nn.Module, training: bool) -> Iterator[None]:
    """Set a network to training or evaluation mode inside the context, and restore each module's mode afterwards."""
    modes = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, previous in modes:
            module.training = previous


def _uses_of_state(traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[int, list[int]]:
    """Return the positions at which each parameter or buffer is used, by the tensor's id."""
    uses: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in state_names(traced, node):
            uses.setdefault(id(attrgetter(name)(traced)), []).append(index)
    return uses
