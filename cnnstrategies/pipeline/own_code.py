"""Nodes of a traced graph for what a network's own forward does besides computing: store attributes, enter contexts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from cnnstrategies._torch_private import autocast_settings

# Contexts that a graph can contain, by name.
_CONTEXTS: dict[str, Callable[..., Any]] = {
    "torch.autocast": torch.autocast,
    "torch.no_grad": torch.no_grad,
    "torch.enable_grad": torch.enable_grad,
    "torch.set_grad_enabled": torch.set_grad_enabled,
}


class _Entered(threading.local):
    """The contexts that graphs in this thread have entered and not left."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []


_entered = _Entered()


def enter_context(name: str, *settings: Any) -> Any:
    """Enter a context, and return it. A node of a graph calls this function."""
    context = _CONTEXTS[name](*settings)
    context.__enter__()
    _entered.contexts.append(context)
    return context


def exit_context(context: Any) -> None:
    """Leave a context that :func:`enter_context` has entered. A node of a graph calls this function."""
    _entered.contexts.remove(context)
    context.__exit__(None, None, None)


@contextmanager
def contexts_left() -> Iterator[None]:
    """Return a context for the run of a graph. An error in the run leaves the contexts that the graph has entered."""
    count = len(_entered.contexts)
    try:
        yield
    finally:
        while len(_entered.contexts) > count:
            _entered.contexts.pop().__exit__(None, None, None)


def keep_attribute(name: str, value: Any) -> None:
    """Stand for an assignment to an attribute of the network. A node of a traced graph calls this function.

    The function does nothing, because a graph does not know its network. See :func:`with_stores`.
    """


def with_stores(graph: fx.Graph, network: nn.Module) -> None:
    """Make the nodes of a graph that stand for assignments store the values in attributes of a network."""

    def store_attribute(name: str, value: Any) -> None:
        setattr(network, name, value)

    for node in graph.nodes:
        if node.target is keep_attribute:
            node.target = store_attribute


def context_spans(nodes: list[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yield the indices of the first and the last node of each context.

    Args:
        nodes: All nodes of a graph that compute something, in order.
    """
    for index, node in enumerate(nodes):
        if node.target is exit_context:
            yield nodes.index(node.all_input_nodes[0]), index


class OwnCode:
    """Makes the nodes of this module while a tracer traces a network.

    Args:
        tracer: The tracer.
        is_own: Function that says whether the code that runs now is that of the network's own forward.

    Attributes:
        assigned: Names of the network's attributes to which its own forward has assigned any value.
    """

    def __init__(self, tracer: fx.Tracer, is_own: Callable[[], bool]) -> None:
        self._tracer, self._is_own = tracer, is_own
        self._thread = threading.get_ident()
        self._nodes: dict[int, list[fx.Node]] = {}
        self._before: dict[str, Any] = {}
        self._stored: dict[str, Any] = {}
        self.assigned: set[str] = set()

    @property
    def stored(self) -> set[str]:
        """Names of the attributes for which the graph has nodes."""
        return set(self._stored)

    def entered(self, context: Any, name: str) -> None:
        """Make a node that enters a context."""
        settings: tuple[Any, ...] = ()
        if isinstance(context, torch.autocast):
            settings = autocast_settings(context)
        elif isinstance(context, torch.set_grad_enabled):
            settings = (context.mode,)
        node = fx.Tracer.create_node(self._tracer, "call_function", enter_context, (name, *settings), {})
        self._nodes.setdefault(id(context), []).append(node)

    def left(self, context: Any) -> bool:
        """Make a node that leaves a context. Return False if the context was not entered by :meth:`entered`."""
        nodes = self._nodes.get(id(context))
        if not nodes:
            return False
        fx.Tracer.create_node(self._tracer, "call_function", exit_context, (nodes.pop(),), {})
        return True

    @contextmanager
    def noted(self, network: nn.Module) -> Iterator[None]:
        """Return a context in which assignments of traced values to attributes of a network become nodes."""
        self._before = dict(vars(network))
        original = nn.Module.__setattr__

        def write(module: nn.Module, name: str, value: Any) -> None:
            original(module, name, value)
            if module is network and self._is_own() and threading.get_ident() == self._thread:
                self.assigned.add(name)
                if isinstance(value, fx.Proxy):
                    self._store(name, value)

        kind: Any = nn.Module
        kind.__setattr__ = write
        try:
            yield
        finally:
            kind.__setattr__ = original
            self._before.clear()
            self._stored = dict.fromkeys(self._stored)

    def finish(self, network: nn.Module) -> None:
        """Make nodes for new containers of traced values in attributes, before the graph ends."""
        for name, value in list(vars(network).items()):
            is_new = name not in self._before or self._before[name] is not value
            if is_new and value is not self._stored.get(name) and _has_proxies(value):
                self._store(name, value)

    def _store(self, name: str, value: Any) -> None:
        self._tracer.create_proxy("call_function", keep_attribute, (name, value), {})
        self._stored[name] = value


def _has_proxies(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_proxies, value))
    if isinstance(value, dict):
        return any(map(_has_proxies, value.values()))
    return isinstance(value, fx.Proxy)
