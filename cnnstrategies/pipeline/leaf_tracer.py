"""The tracer that determines which modules of a network can be opened, and which run as a whole."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from operator import getitem
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from cnnstrategies._torch_private import applied_functions, has_hooks, is_checkpoint, with_functions
from cnnstrategies.codec import with_fields
from cnnstrategies.pipeline.graph_checks import UndecidedError, contexts, is_of_shapes, keys_of, with_keys
from cnnstrategies.pipeline.network_inputs import network_inputs
from cnnstrategies.pipeline.own_code import OwnCode
from cnnstrategies.pipeline.whole_modules import (
    DependsOnValuesError,
    EntersContextError,
    Seal,
    drawn_from,
    draws,
    first_line,
    warn_of_checkpoint,
    where,
)
from cnnstrategies.runtime.generator_states import GeneratorStates

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# Stands for a tensor in a nested result.
VALUE = object()
# Key of a call of a module, see `call_keys`.
CallKey = tuple[str, ...]


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


@contextmanager
def _tensors_in_torchscript() -> Iterator[None]:
    """Return a context in which ``torch.jit.isinstance`` counts proxies as tensors.

    MONAI's ``UpCat`` leaves out the features of the encoder if they are not tensors.
    """
    original: Callable[[Any, Any], bool] = torch.jit.isinstance

    def answer(value: Any, kind: Any) -> bool:
        return kind is Tensor if isinstance(value, fx.Proxy) else original(value, kind)

    torch.jit.isinstance = answer
    try:
        yield
    finally:
        torch.jit.isinstance = original


class LeafTracer(fx.Tracer):
    """A tracer that makes one node of each torch.nn layer, without tracing into the layer.

    Layers whose class is derived from a torch.nn layer, such as timm's ``BatchNormAct2d``, also become one node each.
    The code of a layer is not traced because it may depend on ``self.training``: the graph would then contain the code
    for only one mode.

    A module that has hooks, or whose code cannot be traced, also becomes one node. The tracer finds such a module while
    it traces, and adds it to ``seals``. The nodes that it has made of the module's code until then are removed.

    Args:
        seals: Modules that become one node each, with the reasons. The tracer adds modules.
        numbers: Known numbers that the network's own forward needs, in the order in which the forward needs them.

    Attributes:
        own_code: Makes nodes for what the network's own forward does besides computing.
        constants: Tensors that the network's code has made or read during the trace, and that are not attributes of
            the network. Keys are names of attributes that the graph reads.
        structures: Results of calls of traced modules that are not a single tensor, with `VALUE` in the place of each
            tensor. For the keys see `call_keys`.
        unfoldable: Modules that return an object that contains tensors and is not a list, a tuple or a dictionary.
    """

    def __init__(self, seals: dict[nn.Module, Seal], numbers: Sequence[Any]) -> None:
        # Functions of einops become one node each. Their code cannot be traced, because it checks that the arguments
        # are tensors, and proxies are not tensors.
        super().__init__(autowrap_modules=(math, *([sys.modules["einops"]] if "einops" in sys.modules else [])))
        self._contexts = contexts()
        self._thread = threading.get_ident()
        self.own_code = OwnCode(self, lambda: not self.module_stack)
        self._seals = seals
        self._numbers = iter(numbers)
        self.constants: dict[str, Tensor] = {}
        self.structures: dict[CallKey, Any] = {}
        self.unfoldable: set[nn.Module] = set()
        self._tensors: dict[int, str] = {}
        self._state: dict[str, Tensor] = {}
        self._tensor_proxies: dict[str, fx.Proxy] = {}
        self._proxies: list[ReferenceType[fx.Proxy]] = []

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace a network into a graph."""
        assert isinstance(root, nn.Module)
        self._state = {**dict(root.named_parameters()), **dict(root.named_buffers())}
        self._tensors = {id(tensor): name for name, tensor in self._state.items()}
        try:
            # A copy of a network is traced in a context without functions of classes. Proxies have such functions.
            with (
                with_functions(),
                _tensors_in_torchscript(),
                self._noted_contexts(),
                self.own_code.noted(root),
                applied_functions(self._applied),
            ):
                return super().trace(root, concrete_args)
        finally:
            self._tensor_proxies.clear()

    def stored(self) -> set[str]:
        """Return the names of the network's attributes to which its own forward assigns traced values.

        The graph contains nodes for these assignments.
        """
        return self.own_code.stored

    def leaked(self) -> tuple[fx.Proxy, ...]:
        """Return the proxies that still exist after the trace, because the network's code has stored them."""
        return tuple(proxy for reference in self._proxies if (proxy := reference()) is not None)

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
        """Create a node, and check that grad mode, inference mode and autocast are as the graph says.

        Raises:
            EntersContextError: One of the modes is different.
        """
        if (args[0] if args else kwargs["kind"]) == "output":
            assert isinstance(self.root, nn.Module)
            self.own_code.finish(self.root)
        if changed := [name for name, state in contexts().items() if state != self._contexts[name]]:
            raise EntersContextError(self._current(), changed[0])
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """Return the argument of a node for a value, which may be nested.

        torch.fx makes constants attributes of the network. This method keeps them in ``constants``, because a trace
        must not change the network. And torch.fx makes a plain dictionary of an object that is a dictionary and a
        dataclass, as the results of transformers' models are. This method keeps the class if it is a pytree node.
        """
        if isinstance(a, dict) and is_dataclass(a) and type(a) in SUPPORTED_NODES:
            values = {field.name: self.create_arg(getattr(a, field.name)) for field in fields(a)}
            return self.create_node("call_function", type(a), (), values)
        if not isinstance(a, Tensor):
            register_dataclass(type(a))
            return super().create_arg(a)
        name = self._tensors.get(id(a)) or self.tensor_attrs.get(a)
        if name is None:
            mode = "training" if self.root.training else "evaluation"  # A network has constants of both traces.
            name = f"_tensor_constant_{mode}{len(self.constants)}"
            self.constants[name], self.tensor_attrs[a] = a, name
        return self.create_node("get_attr", name, (), {})

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy for a node's result. torch.fx calls this for each node."""
        proxy = TracedValue(node, self)
        self._proxies.append(ref(proxy))
        return proxy

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Return a proxy for a parameter or buffer that the network's code reads, and any other attribute as it is.

        The graph therefore reads parameters and buffers each time it runs. torch.fx has a method of this kind, but its
        search through the names of all parameters would take most of the time of a trace.
        """
        name = self._tensors.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in self._tensor_proxies:
            self._tensor_proxies[name] = self.create_proxy("get_attr", name, (), {})
        return self._tensor_proxies[name]

    def keys(self, obj: fx.Proxy) -> Any:
        """Return the keys of a dictionary that the network takes, for code such as ``{**batch}``.

        The method raises the same errors as :meth:`number`.
        """
        keys = self.number(self.create_proxy("call_function", keys_of, (obj,), {}))
        # From now on, the proxy stands for a dictionary whose keys are checked in each step.
        obj.node = self.create_node("call_function", with_keys, (obj.node, keys, type(self.root).__name__), {})
        return iter(keys)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Return the numbers of a shape, for code such as ``all(size % 8 == 0 for size in x.shape[2:])``.

        The method raises the same errors as :meth:`number`.
        """
        if not is_of_shapes(obj.node):
            return super().iter(obj)
        count = self.number(self.create_proxy("call_function", len, (obj,), {}))
        return iter([self.create_proxy("call_function", getitem, (obj, index), {}) for index in range(count)])

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
        if is_of_attributes(value.node):
            return self._value(value.node)
        for known_number in () if self.module_stack else self._numbers:
            return known_number
        raise UndecidedError(self.graph, value.node, self.constants)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module becomes one node of the graph. The module's code is then not traced."""
        if m in self._seals:
            return True
        if isinstance(m, CONTAINERS):
            return False
        bases = type(m).__mro__[: type(m).__mro__.index(nn.Module)]
        return any(base.__module__.startswith(("torch.nn", "torch.ao.nn")) for base in bases)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace into a module, or make one node of it. torch.fx calls this for each call of a module."""
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        if has_hooks(m):
            self._seals[m] = Seal("hooks", name, "it has hooks, which must not see proxies", self._place(m))
            return super().call_module(m, forward, args, kwargs)
        number = self.num_calls.get(name, 0)
        began, calls, stack = len(self.graph.nodes), self.num_calls, list(self.module_stack)
        states = GeneratorStates.current()

        def counted(*inputs: Any, **options: Any) -> Any:
            # The calls inside this call are counted from zero. A call therefore has the same key in a trace that does
            # not go into all modules.
            self.num_calls = {}
            return forward(*inputs, **options)

        try:
            result = super().call_module(m, counted, args, kwargs)
            library = drawn_from(states)
            seal = Seal("random", name, draws(library), self._place(m)) if library else None
            if seal is None and self._uses_kept_tensor(m, result, began):
                reason = "its forward uses a tensor that a hook on one of its submodules may have stored"
                seal = Seal("stores", name, reason, self._place(m))
        except Exception as error:
            seal = self._seal_of(name, error)
        self.num_calls = calls
        if seal is None:
            if not isinstance(result, fx.Proxy):
                key = f"{name}@{number}" if number else name
                self._note_structure(m, (*self.module_stack, key), result)
            return result
        states.restore()
        self._remove_nodes(began)
        calls[name] = number
        for key in [key for key in self.module_stack if key not in stack]:
            del self.module_stack[key]
        self._seals[m] = seal
        return super().call_module(m, forward, args, kwargs)

    @contextmanager
    def _noted_contexts(self) -> Iterator[None]:
        """Make nodes of the contexts that the network's own forward enters. Raise an error for other contexts.

        A comparison of modes, as in :meth:`create_node`, cannot detect ``autocast(enabled=False)`` outside of autocast.
        ``torch.utils.checkpoint`` uses hooks of saved tensors. A submodule that enters a context runs as a whole. What
        the network's own forward calls by ``torch.utils.checkpoint(..., use_reentrant=False)`` is traced as if it were
        called without it.

        Raises:
            EntersContextError: A submodule enters autocast, or a module enters hooks of saved tensors.
        """
        thread = threading.get_ident()
        names: dict[Any, str] = {
            torch.autocast: "torch.autocast",
            torch.no_grad: "torch.no_grad",
            torch.enable_grad: "torch.enable_grad",
            torch.set_grad_enabled: "torch.set_grad_enabled",
            saved_tensors_hooks: "torch.utils.checkpoint",
        }
        originals = {kind: (kind.__enter__, kind.__exit__) for kind in names}

        def enter(kind: Any, context: Any) -> Any:
            if threading.get_ident() != thread:
                return originals[kind][0](context)
            if kind is saved_tensors_hooks and not self.module_stack and is_checkpoint(context):
                warn_of_checkpoint()
                return context
            if kind is saved_tensors_hooks or (kind is torch.autocast and self.module_stack):
                raise EntersContextError(self._current(), names[kind])
            if not self.module_stack:
                self.own_code.entered(context, names[kind])
            result = originals[kind][0](context)
            if not self.module_stack:
                self._contexts = contexts()
            return result

        def leave(kind: Any, context: Any, *error: Any) -> Any:
            if threading.get_ident() == thread and kind is saved_tensors_hooks:
                return None  # The only hooks that were not refused are those of a checkpoint, which were not entered.
            result = originals[kind][1](context, *error)
            if threading.get_ident() == thread and not self.module_stack and self.own_code.left(context):
                self._contexts = contexts()
            return result

        for kind in names:
            kind.__enter__ = _method_of(enter, kind)
            kind.__exit__ = _method_of(leave, kind)
        try:
            yield
        finally:
            for kind, (entering, leaving) in originals.items():
                kind.__enter__, kind.__exit__ = entering, leaving

    def _applied(self, kind: Any, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        """Make one node of an autograd function that the network's own forward applies."""
        if threading.get_ident() != self._thread or self.module_stack or not any(map(is_traced, tree_leaves(args))):
            return apply(*args)
        return self.create_proxy("call_function", function_of(kind), args, {})

    def _note_structure(self, module: nn.Module, key: CallKey, result: Any) -> None:
        register_dataclass(type(result))
        leaves, spec = tree_flatten(result)
        if any(hasattr(leaf, "__dict__") and not isinstance(leaf, fx.Proxy | Tensor) for leaf in leaves):
            self.unfoldable.add(module)
        else:
            structure = [VALUE if isinstance(leaf, fx.Proxy | Tensor) else leaf for leaf in leaves]
            self.structures[key] = tree_unflatten(structure, spec)

    def _uses_kept_tensor(self, module: nn.Module, result: Any, began: int) -> bool:
        """Whether a traced module may use a tensor that a hook of one of its submodules stores in an attribute of it.

        The trace does not run the hooks, so the graph would contain an old tensor.
        """
        if not any(isinstance(value, Tensor) for value in vars(module).values()):
            return False
        if not any(has_hooks(child) for child in module.modules()):
            return False
        nodes = list(self.graph.nodes)[began:]
        is_constant = any(node.op == "get_attr" and node.target not in self._state for node in nodes)
        return is_constant or any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))

    def _current(self) -> str:
        """Return the name of the module whose code is being traced."""
        paths = [path for path, _ in self.module_stack.values()]
        return paths[-1] if paths else "the network's forward"

    def _place(self, module: nn.Module) -> str:
        assert isinstance(self.root, nn.Module)
        return f"{type(self.root).__name__}.{self.path_of_module(module)} ({type(module).__name__})"

    def _seal_of(self, path: str, error: Exception) -> Seal:
        assert isinstance(self.root, nn.Module)
        place = where(self.root, error)
        if isinstance(error, DependsOnValuesError):
            return Seal("values", path, str(error), place)
        if isinstance(error, EntersContextError):
            return Seal("context", path, f"its forward computes under {error.context}", place)
        return Seal("untraceable", path, f"torch.fx cannot trace its forward: {first_line(error)}", place)

    def _remove_nodes(self, began: int) -> None:
        """Remove the nodes that were made after the graph had ``began`` nodes."""
        nodes = list(self.graph.nodes)[began:]
        removed = {id(node) for node in nodes}
        for name, proxy in list(self._tensor_proxies.items()):
            if id(proxy.node) in removed:
                del self._tensor_proxies[name]
        for node in reversed(nodes):
            self.graph.erase_node(node)

    def _value(self, node: fx.Node) -> Any:
        """Compute a node's value, which depends only on shapes, dtypes and devices of parameters and buffers."""
        if node.op == "get_attr":
            # While torch.fx traces, an attribute of a module that is a parameter or buffer is a proxy.
            return self._state[str(node.target)] if node.target in self._state else self.constants[str(node.target)]
        args = fx.node.map_arg(node.args, self._value)
        kwargs = fx.node.map_arg(node.kwargs, self._value)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _method_of(function: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    """Return a method that calls a function with a class and the method's arguments."""

    def method(context: Any, *arguments: Any) -> Any:
        return function(kind, context, *arguments)

    return method


def register_dataclass(kind: type[Any]) -> None:
    """Let torch's functions for nested containers look into instances of a class, if the class is a dataclass."""
    if not is_dataclass(kind) or kind in SUPPORTED_NODES:
        return
    names = [field.name for field in fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    register_pytree_node(kind, flatten, lambda parts, _: with_fields(kind, names, list(parts)))


def is_traced(value: Any) -> bool:
    """Whether a value is a proxy."""
    return isinstance(value, fx.Proxy)


@cache
def function_of(kind: Any) -> Callable[..., Any]:
    """Return a function that applies an autograd function. A node of a graph calls a function with a name."""

    def function(*args: Any) -> Any:
        return kind.apply(*args)

    function.__name__, function.__module__ = kind.__name__, kind.__module__
    return function


def call_keys(node: fx.Node) -> list[CallKey]:
    """Return the keys of the module calls around a node, from the outermost to the innermost call.

    Each call of a module has a different key: the names that torch.fx gives to the calls around it, and its own name.
    For a node that is a call of a module, the last key belongs to this call.
    """
    names = [str(name) for name in node.meta.get("nn_module_stack") or ()]
    return [tuple(names[: depth + 1]) for depth in range(len(names))]


def is_of_attributes(node: fx.Node) -> bool:
    """Whether a node's value depends on parameters and buffers only, and not on the network's inputs."""
    if node.op == "get_attr":
        return True
    return bool(node.all_input_nodes) and all(map(is_of_attributes, node.all_input_nodes))
