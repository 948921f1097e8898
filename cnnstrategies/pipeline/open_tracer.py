"""The tracer that opens the containers which a cut passes through, and keeps every other module whole."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import getitem
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten_with_path, tree_unflatten

from cnnstrategies.pipeline.leaf_tracer import VALUE, CallKey, LeafTracer, call_keys
from cnnstrategies.pipeline.whole_modules import Seal

# Key of a node's metadata: the node takes a value from the nested result of a module, and was not in the full graph.
TAKEN = "taken"
_PLAIN = (int, str, bytes, type(None))
_NUMBERS_AND_TEXTS = (*_PLAIN, float, complex)
# Attributes of every module. A change of a parameter, buffer or submodule needs no new trace, because the graph reads
# it each time it runs.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_OF_CLASS = frozenset(dir(nn.Module))

# A module and the name of one of its attributes.
Attribute = tuple[nn.Module, str]


class OpenTracer(LeafTracer):
    """A tracer that traces into opened containers only. Each other module becomes one node, hooks included.

    Args:
        opened: Modules to trace into.
        structures: Nested results of modules that are not opened, see `LeafTracer.structures`.
        reads: The tracer adds the attributes that the code of the opened containers reads and that are not parameters,
            buffers or modules. The graph contains the values of these attributes. Attributes of classes, properties,
            and attributes of modules that are not opened count only if they are numbers or texts.
        seals: Modules that a trace without cuts has not opened.
        numbers: Known numbers that the network's own forward needs, in the order in which the forward needs them.
    """

    def __init__(
        self,
        opened: Collection[nn.Module],
        structures: Mapping[CallKey, Any],
        reads: dict[Attribute, None],
        seals: dict[nn.Module, Seal],
        numbers: Sequence[Any],
    ) -> None:
        super().__init__(seals, numbers)
        self._opened = opened
        self._known_structures = structures
        self._reads = reads

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a network into a graph."""
        with self._noted_reads():
            return super().trace(root, concrete_args)

    def stored(self) -> set[str]:
        """Return the names of the network's attributes to which its own forward only assigns traced values.

        A graph would not contain the value of an attribute that the forward reads before the assignment.
        """
        return super().stored() - {name for module, name in self._reads if module is self.root}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node of the graph. The module's code is then not traced."""
        return m in self._seals or m not in self._opened

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace into a module, or make one node of it.

        If the module's result is nested, the method returns the same structure, so that the container's code can
        unpack the result.
        """
        result = super().call_module(m, forward, args, kwargs)
        if m in self._opened:
            return result
        key = call_keys(result.node)[-1]
        if key not in self._known_structures:
            return result
        paths, spec = tree_flatten_with_path(self._known_structures[key])
        return tree_unflatten([self._take(result, path) if leaf is VALUE else leaf for path, leaf in paths], spec)

    def _take(self, value: Any, path: Sequence[Any]) -> fx.Proxy:
        """Return the proxy for an element of a nested value."""
        for key in path:
            match key:
                case SequenceKey(idx=index):
                    value = self.create_proxy("call_function", getitem, (value, index), {})
                case MappingKey(key=name):
                    value = self.create_proxy("call_function", getitem, (value, name), {})
                case GetAttrKey(name=name):
                    value = self.create_proxy("call_function", getattr, (value, name), {})
            value.node.meta[TAKEN] = True
        element: fx.Proxy = value
        return element

    @contextmanager
    def _noted_reads(self) -> Iterator[None]:
        """Note which attributes of modules the code in this thread reads."""
        thread, reads = threading.get_ident(), self._reads
        # By id, because the hash of a torchmetrics metric reads the metric's attributes.
        opened = {id(module) for module in self._opened}
        original = nn.Module.__getattribute__

        def read(module: nn.Module, name: str) -> Any:
            value = original(module, name)
            if name in _OF_TORCH or name[:2] == "__" or threading.get_ident() != thread:
                return value
            if module is getattr(self, "root", None) and name in self.own_code.assigned:
                return value  # The graph contains the value that the network's own code has stored before.
            is_own = id(module) in opened and name in original(module, "__dict__")
            if is_own or (isinstance(value, _NUMBERS_AND_TEXTS) and name not in _OF_CLASS):
                reads[module, name] = None
            return value

        kind: Any = nn.Module
        kind.__getattribute__ = read
        try:
            yield
        finally:
            del kind.__getattribute__


def fingerprint(value: Any, depth: int = 0) -> Any:
    """Return a value that is equal as long as an attribute has the same content.

    Args:
        value: The attribute's value.
        depth: Number of objects and containers around the value.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)  # Not-a-number does not equal itself.
    if depth < 2 and not isinstance(value, Tensor | nn.Module | type):
        if isinstance(value, list | tuple):
            return type(value), tuple(fingerprint(element, depth + 1) for element in value)
        if isinstance(value, dict):
            return tuple((key, fingerprint(element, depth + 1)) for key, element in value.items())
        if hasattr(value, "__dict__"):
            return id(value), fingerprint(vars(value), depth + 1)
    return id(value)
