"""Trace a network into a torch.fx graph, and find where it can be cut."""

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
    """A network's code decides something by the values of tensors: each microbatch would decide by its own."""


class TracedValue(fx.Proxy):
    """Stands for a value while a network's code runs, which may need the number itself."""

    tracer: "LeafTracer"

    def __int__(self) -> int:
        return int(self.tracer.number(self))

    def __float__(self) -> float:
        return float(self.tracer.number(self))

    __index__ = __int__


class LeafTracer(fx.Tracer):
    """Traces down to the modules of torch.nn and their subclasses.

    A subclass, such as timm's ``BatchNormAct2d``, stays whole too: what it does may depend on ``self.training``,
    which tracing would fix.

    Args:
        whole: Other modules that become one node each.
        numbers: What the network's own forward asks for, as far as it is known.
    """

    def __init__(self, whole: Collection[nn.Module], numbers: Sequence[Any]) -> None:
        # Functions of einops look at the types of what they are given, and a stand-in has none.
        super().__init__(autowrap_modules=(math, *([sys.modules["einops"]] if "einops" in sys.modules else [])))
        self._contexts = contexts()
        self._whole = whole
        self._numbers = iter(numbers)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """One placeholder for all that the network takes; what has a default keeps it."""
        assert isinstance(self.root, nn.Module)
        names = network_inputs(self.root)
        if len(names) == 1:
            return root_fn, [self.root, self.create_proxy("placeholder", names[0], (), {})]
        inputs: Any = self.create_proxy("placeholder", "inputs", (), {})
        return root_fn, [self.root, *(inputs[index] for index in range(len(names)))]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the graph, which runs in the context of a whole step."""
        inside = [path for path, _ in self.module_stack.values()]
        check_contexts(self._contexts, inside[-1] if inside else "the network's forward")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What the network's code computes with."""
        return TracedValue(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Which way a branch goes."""
        return bool(self.number(obj))

    def number(self, asked: fx.Proxy) -> Any:
        """A number that the network's code needs; one that follows from shapes is never known inside of a module."""
        if not is_of_shapes(asked.node):
            raise DependsOnValuesError(f"it decides by a value ({asked.node.name})")
        for found in () if self.module_stack else self._numbers:
            return found
        raise UndecidedError(self.graph, asked.node)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node."""
        if m in self._whole:
            return True
        if isinstance(m, CONTAINERS):
            return False
        bases = type(m).__mro__[: type(m).__mro__.index(nn.Module)]
        return any(base.__module__.startswith(("torch.nn", "torch.ao.nn")) for base in bases)


def trace(network: nn.Module, training: bool = True) -> fx.GraphModule:
    """Trace a network into a graph module that shares its parameters and buffers, under their names.

    What the network's own code decides by ``self.training`` is decided as for the mode given; the leaves, such as
    Dropout and BatchNorm, keep looking at their mode when they run. So does a module whose own code cannot be traced,
    since it branches on shapes, say, or computes without gradients: it becomes a leaf, too.
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
    """Find out what a network's own forward decides by the shapes of its images, for :func:`trace`.

    The example gives so many images, as the network takes them, or None, with which nothing is found out and False
    returned; it is asked for only where something is decided.
    """
    known.pop(network, None)
    images: Any = None
    for training in (True, False):
        numbers: list[Any] = []
        while (asked := _asked(network, training, numbers)) is not None:
            images = example(SAMPLES) if images is None else images
            if images is None:
                return False
            with mode(network, training):
                numbers.append(number(network, asked, images))
        if numbers:
            known.setdefault(network, {})[training] = Decided(tuple(numbers), sample_shapes(images))
    return True


def _asked(network: nn.Module, training: bool, numbers: Sequence[Any]) -> UndecidedError | None:
    """What the forward asks for beyond the numbers that are known."""
    try:
        _trace(network, training, numbers)
    except UndecidedError as asked:
        return asked
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
                        "network that is cut into stages must not branch on values of tensors: rewrite that, or use "
                        "strategy ddp"
                    ) from error


def network_inputs(network: nn.Module) -> list[str]:
    """The names of the tensors that a network takes: its arguments without defaults, or else the first one."""
    every = list(inspect.signature(network.forward).parameters.values())
    needed = [
        one for one in every if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if any(one.kind is one.KEYWORD_ONLY for one in needed):
        raise ConfigurationError(
            f"{type(network).__name__}.forward has an argument {needed[-1].name!r} that is given by name alone: a "
            "network that is cut into stages takes its tensors in order; leave out the * before it"
        )
    return [one.name for one in needed] or [one.name for one in every[:1]] or ["images"]


def _where(network: nn.Module, error: Exception) -> tuple[nn.Module, str]:
    """The innermost of a network's modules whose own code could not be traced, and its name and line."""
    names = {module: name for name, module in network.named_modules()}
    found, place = network, type(network).__name__
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            file = frame.f_code.co_filename
            found, name = module, ".".join(filter(None, (type(network).__name__, names[module])))
            code = linecache.getline(file, line).strip()
            place = f"{name} ({type(module).__name__}, {Path(file).name}:{line}: {code!r})"
    return found, place


def ordered_nodes(traced: fx.GraphModule) -> list[fx.Node]:
    """The nodes that compute, in topological order: all but placeholders, attributes and the output."""
    return [node for node in traced.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def cut_positions(traced: fx.GraphModule) -> list[int]:
    """Where a cut is possible: index of the first node after it in :func:`ordered_nodes`, ascending.

    Not between two uses of the same parameters or buffers, which belong to one stage, nor between a value and its
    change in place where the value is used once more afterwards.
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
    """The position of the cut after the last node of a module, such as ``layer2.0``, or after a node of the graph."""
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
            f"cuts: the network has no module or node {name!r} that it runs; for example {', '.join(close[:8])}"
        )
    cut = inside[-1] + 1
    possible = cut_positions(traced)
    if cut not in possible:
        near = min(possible, key=lambda index: abs(index - cut), default=None)
        advice = "the network has no place to cut" if near is None else f"the nearest place: {nodes[near - 1].name!r}"
        raise ConfigurationError(
            f"cuts: after {name!r} the network cannot be cut (its end, or between two uses of the same parameters); "
            + advice
        )
    return cut


def module_paths(node: fx.Node) -> list[str]:
    """Names of the modules that a node belongs to, from the outermost in."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()] + ([str(node.target)] if node.op == "call_module" else [])


def changed_in_place(traced: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The node whose value ``node`` overwrites, if so."""
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
    """Names of the parameters and buffers that a node uses, as the network's state dict has them."""
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
    """Put a network into training or evaluation mode, and each of its modules back afterwards."""
    modes = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, was in modes:
            module.training = was


def _uses_of_state(traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[int, list[int]]:
    """Positions at which each parameter or buffer, by identity, is used."""
    uses: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in state_names(traced, node):
            uses.setdefault(id(attrgetter(name)(traced)), []).append(index)
    return uses
