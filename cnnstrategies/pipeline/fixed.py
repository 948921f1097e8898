"""Checks that a traced graph stays valid: forwards that vary are refused, and the images' shapes are checked."""

import inspect
import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.errors import ConfigurationError

_PLAIN = (int, float, str, bytes, type(None))  # bool is an int
SHAPE_METHODS = ("size", "dim", "numel", "is_contiguous")
SHAPE_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cuda")
SAMPLES = 3  # Numbers are determined with this number of samples and with one sample less, and must be equal.


def check_contexts(began: Mapping[str, Any], where: str) -> None:
    """Refuse an operation in contexts other than those in which tracing ``began``, because a trace loses them.

    Raises:
        ConfigurationError: A context of `where`, the name of a module, has changed.
    """
    for name, present in contexts().items():
        if present != began[name]:
            raise ConfigurationError(
                f"{where} computes under {name}, which is lost when the network is cut into stages: use "
                ".detach() on the values, set the precision for the whole run, or use strategy ddp"
            )
    callers = traceback.walk_stack(inspect.currentframe())
    if any(frame.f_code.co_filename == torch.utils.checkpoint.__file__ for frame, _ in callers):
        raise ConfigurationError(
            f"{where} runs under torch.utils.checkpoint, which is lost when the network is cut into stages: leave it "
            "out (set_grad_checkpointing(False) in timm) and set the pipeline's activation_checkpointing"
        )


def contexts() -> dict[str, Any]:
    """Return the state of the contexts in which operations run now, by name."""
    return {
        "torch.no_grad or torch.enable_grad": torch.is_grad_enabled(),
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cpu"),
            torch.get_autocast_dtype("cuda"),
        ),
    }


@contextmanager
def same_each_time(network: nn.Module) -> Iterator[None]:
    """Check a network's forward, which runs inside the context: it must not branch at random nor change attributes.

    Raises:
        ConfigurationError: The forward draws random numbers outside of leaf modules, or changes a plain attribute.
    """
    name = type(network).__name__
    states, attributes = _random_states(), _attributes(network)
    yield
    for library, state in _random_states().items():
        if state != states[library]:
            raise ConfigurationError(
                f"{name}.forward draws random numbers with {library} to choose what it computes: cut into stages, the "
                "network would make the same choice in every step; draw them with a layer such as nn.Dropout or "
                "torchvision.ops.StochasticDepth, or use strategy ddp"
            )
    for path, value in _attributes(network).items():
        if attributes.get(path, network) != value:
            raise ConfigurationError(
                f"{name}.forward changes the attribute {path!r}: cut into stages, the network would keep the present "
                "value; make it a buffer and change it by a tensor operation, or use strategy ddp"
            )


class TracedModule(nn.Module):
    """Module in place of a module whose own code was traced; the plain attributes are constants of the graph."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a submodule, a tensor or an internal attribute, and refuse new plain attributes.

        Raises:
            ConfigurationError: The attribute is a plain value, of which the graph has a constant copy.
        """
        if not name.startswith("_") and not isinstance(value, nn.Module | Tensor) and name not in self.__dict__:
            raise ConfigurationError(
                f"{name} = {value!r} is set on a part of the network that is cut into stages, whose graph keeps the "
                "value from the beginning: make it a buffer that is changed in place, or use strategy ddp"
            )
        super().__setattr__(name, value)


def _random_states() -> dict[str, Any]:
    """Return the states of the random generators, by the name of the library."""
    numpy: Any = np.random.get_state()
    return {
        "random": random.getstate(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": (numpy[1].tobytes(), numpy[2:]),
    }


def _attributes(network: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of all modules, by path."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in network.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name != "training"
    }


@dataclass(frozen=True)
class Decided:
    """Numbers that a forward derives from shapes.

    Attributes:
        numbers: The numbers, in the order in which the forward needs them.
        shapes: Shape of a sample of each input for which the numbers are valid.
    """

    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]


class UndecidedError(Exception):
    """The forward needs a number that follows from shapes and is not known.

    Attributes:
        graph: The graph that was traced so far.
        node: Node of the graph whose value is the number.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        super().__init__(f"it branches on a shape ({node.name}), and no images are known")
        self.graph = graph
        self.node = node


# Numbers by network, and by mode (True for training). Each rank determines them itself, from images of equal shapes.
known: "WeakKeyDictionary[nn.Module, dict[bool, Decided]]" = WeakKeyDictionary()


def is_of_shapes(node: fx.Node) -> bool:
    """Whether a node's value follows from shapes of tensors only."""
    if node.op == "call_method" and node.target in SHAPE_METHODS:
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in SHAPE_ATTRIBUTES or is_of_shapes(node.all_input_nodes[0])
    return node.op == "call_function" and all(map(is_of_shapes, node.all_input_nodes))


def number(network: nn.Module, undecided: UndecidedError, images: Any) -> Any:
    """Return a number that a network's forward needs in its present mode, determined with some images.

    Raises:
        ConfigurationError: The number depends on the number of images.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(undecided.graph, copies)
    graph.output(copies[undecided.node])
    run = fx.GraphModule(network, graph)
    results = []
    for samples in (SAMPLES, SAMPLES - 1):
        with preserved(network), torch.no_grad():
            results.append(run(tree_map(lambda tensor, samples=samples: tensor[:samples], images)))
    if results[0] != results[1]:
        raise ConfigurationError(
            f"{type(network).__name__}.forward branches on the number of images ({undecided.node.name}), which differs "
            "between a microbatch and the batch: rewrite this code, or use strategy ddp"
        )
    return results[0]


def sample_shapes(images: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shape of a sample of each of a network's inputs."""
    return tuple(tuple(tensor.shape[1:]) for tensor in tree_leaves(images))


def hold_to(graph: fx.Graph, decided: Decided, name: str) -> None:
    """Let a graph refuse images of shapes other than those for which it was traced."""
    placeholder = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(placeholder):
        checked = graph.call_function(of_shapes, (placeholder, decided.shapes, name))
    placeholder.replace_all_uses_with(checked, lambda user: user is not checked)


def of_shapes(images: Any, shapes: Sequence[Sequence[int]], name: str) -> Any:
    """Return the images after checking the shape of a sample of each.

    Raises:
        ConfigurationError: A shape differs.
    """
    for image_shape, shape in zip(sample_shapes(images), shapes, strict=True):
        if image_shape != tuple(shape):
            raise ConfigurationError(
                f"images of shape {image_shape}: {name}.forward branches on their shape, and was cut into stages for "
                f"{tuple(shape)}; use images of one size, or use strategy ddp"
            )
    return images


@contextmanager
def preserved(network: nn.Module) -> Iterator[None]:
    """Restore a network's buffers and gradients and the random generators after the context.

    Parameters must not change inside the context.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in network.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    gradients = [(parameter, parameter.grad) for parameter in network.parameters()]
    tensors = (*network.parameters(), *network.buffers())
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    device_type = next(iter(devices)).type if devices else "cuda"
    try:
        with torch.random.fork_rng(devices=list(devices), device_type=device_type):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer)  # A forward may replace a buffer by another tensor.
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
