"""Trace a network into a torch.fx graph, and find the positions at which the graph can be cut."""

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
    """A network's code branches on values of tensors, so different microbatches might take different branches."""


class TracedValue(fx.Proxy):
    """A proxy for a value while torch.fx traces a network.

    If the value follows from shapes, ``int()`` and ``float()`` return it as a number. Otherwise they raise an error.
    """

    tracer: "LeafTracer"

    def __int__(self) -> int:
        return int(self.tracer.number(self))

    def __float__(self) -> float:
        return float(self.tracer.number(self))

    __index__ = __int__


class LeafTracer(fx.Tracer):
    """A tracer that makes one node of each torch.nn layer, without tracing into the layer.

    Layers whose class is derived from a torch.nn layer, such as timm's ``BatchNormAct2d``, also become one node each.
    The code of a layer is not traced because it may depend on ``self.training``: the graph would then contain the code
    for only one mode.

    Args:
        whole: Other modules that also become one node each.
        numbers: Known numbers that the network's own forward needs, in the order in which the forward needs them.
    """

    def __init__(self, whole: Collection[nn.Module], numbers: Sequence[Any]) -> None:
        # Functions of einops become one node each. Their code cannot be traced, because it checks that the arguments
        # are tensors, and proxies are not tensors.
        super().__init__(autowrap_modules=(math, *([sys.modules["einops"]] if "einops" in sys.modules else [])))
        self._contexts = contexts()
        self._whole = whole
        self._numbers = iter(numbers)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Create one input of the graph for all tensors that the network takes.

        Other arguments of the network's forward have their default values. torch.fx calls this when a trace begins.
        """
        assert isinstance(self.root, nn.Module)
        names = network_inputs(self.root)
        if len(names) == 1:
            return root_fn, [self.root, self.create_proxy("placeholder", names[0], (), {})]
        inputs: Any = self.create_proxy("placeholder", "inputs", (), {})
        return root_fn, [self.root, *(inputs[index] for index in range(len(names)))]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node, and check that grad mode, inference mode and autocast are as at the start of the trace."""
        paths = [path for path, _ in self.module_stack.values()]
        check_contexts(self._contexts, paths[-1] if paths else "the network's forward")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy for a node's result. torch.fx calls this for each node."""
        return TracedValue(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return the value of a condition on which the network's code branches, such as the condition of an ``if``.

        The method raises the same errors as :meth:`number`.
        """
        return bool(self.number(obj))

    def number(self, value: fx.Proxy) -> Any:
        """Return the number that a proxy stands for, because the network's code needs the number during the trace.

        Args:
            value: The proxy.

        Raises:
            DependsOnValuesError: The number does not follow from shapes.
            UndecidedError: The number follows from shapes, but it is not known. Only numbers that the network's own
                forward needs can be known, not numbers that the code of a submodule needs.
        """
        if not is_of_shapes(value.node):
            raise DependsOnValuesError(f"its code branches on the value of a tensor ({value.node.name})")
        for known_number in () if self.module_stack else self._numbers:
            return known_number
        raise UndecidedError(self.graph, value.node)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node of the graph. The module's code is then not traced."""
        if m in self._whole:
            return True
        if isinstance(m, CONTAINERS):
            return False
        bases = type(m).__mro__[: type(m).__mro__.index(nn.Module)]
        return any(base.__module__.startswith(("torch.nn", "torch.ao.nn")) for base in bases)


def trace(network: nn.Module, training: bool = True) -> fx.GraphModule:
    """Trace a network into a graph module that has the network's own parameters and buffers, under their own names.

    If the network's own code depends on ``self.training``, the graph contains the code for the given mode. Leaf
    modules, such as Dropout and BatchNorm, still depend on their current mode when they run. A submodule that cannot be
    traced, for example because it branches on shapes or computes under ``torch.no_grad``, also becomes a leaf.

    Args:
        network: The network.
        training: Whether to trace the network in training mode; otherwise in evaluation mode.

    Raises:
        ConfigurationError: The network cannot be traced.
    """
    decided = known.get(network, {}).get(training)
    try:
        graph = _trace(network, training, decided.numbers if decided else ())
    except UndecidedError as error:
        raise ConfigurationError(
            f"torch.fx cannot trace {_where(network, error)[1]}: {error}; set self.example_input_array in the module, "
            "or image_shape (C, H, W) in the data module"
        ) from error
    if decided:
        hold_to(graph, decided, type(network).__name__)
    graph.lint()
    return fx.GraphModule(network, graph, type(network).__name__)


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
            known.setdefault(network, {})[training] = Decided(tuple(numbers), sample_shapes(images))
    return True


def _undecided(network: nn.Module, training: bool, numbers: Sequence[Any]) -> UndecidedError | None:
    """Trace a network with the known numbers, to find the next number that the network's forward needs.

    Returns:
        The error that describes the next number; None if the forward needs only the known numbers.
    """
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
                        f"torch.fx cannot trace {place}: {str(error).splitlines()[0] if str(error) else error!r}; a "
                        "network that is cut into stages must not branch on values of tensors: rewrite this code, or "
                        "use strategy ddp"
                    ) from error


def network_inputs(network: nn.Module) -> list[str]:
    """Return the names of the tensors that a network's forward takes.

    The arguments without a default are assumed to be tensors. If all arguments have a default, only the first argument
    is assumed to be a tensor.

    Raises:
        ConfigurationError: An argument without a default is keyword-only.
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
            "is cut into stages takes its tensors by position; remove the * before the argument"
        )
    return [argument.name for argument in needed] or [argument.name for argument in arguments[:1]] or ["images"]


def _where(network: nn.Module, error: Exception) -> tuple[nn.Module, str]:
    """Return the innermost module whose code raised an error, and a text that names the module and the line of code."""
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
    """Return the nodes that compute something, in topological order.

    The result contains all nodes except the inputs of the graph, nodes that read an attribute, and the output node.
    """
    return [node for node in traced.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def cut_positions(traced: fx.GraphModule) -> list[int]:
    """Return the positions at which the network can be cut, ascending.

    A position is the index, in :func:`ordered_nodes`, of the first node after the cut. A cut cannot separate two nodes
    that use the same parameter or buffer, because a parameter or buffer belongs to one stage. If a node changes the
    result of an earlier node in place, and a later node uses this result, a cut cannot separate the first two nodes.
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
            f"cuts: the network cannot be cut after {name!r} (the network ends there, or uses the same parameters "
            f"again later); {advice}"
        )
    return cut


def module_paths(node: fx.Node) -> list[str]:
    """Return the names of the modules that contain a node, from the outermost to the innermost."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()] + ([str(node.target)] if node.op == "call_module" else [])


def changed_in_place(traced: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the node whose result ``node`` changes in place. Return None if ``node`` changes nothing in place."""
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
    """Yield the names of the parameters and buffers that a node uses. The network's state dict has the same names."""
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
    """Set a network to training or evaluation mode, and restore the mode of each module on exit."""
    modes = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, previous in modes:
            module.training = previous


def _uses_of_state(traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[int, list[int]]:
    """Return, for each parameter and buffer, the indices of the nodes that use it.

    Keys are the ids of the parameters and buffers. Indices refer to ``nodes``.
    """
    uses: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in state_names(traced, node):
            uses.setdefault(id(attrgetter(name)(traced)), []).append(index)
    return uses
