"""What a trace fixes: a network whose forward is not the same each time is refused, and held to its images' shapes."""

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
SAMPLES = 3  # with which decisions are made, and with one less


def check_contexts(began: Mapping[str, Any], where: str) -> None:
    """Refuse an operation in other contexts than tracing ``began`` in: the trace would be without them."""
    for name, now in contexts().items():
        if now != began[name]:
            raise ConfigurationError(
                f"{where} computes under {name}, which a network that is cut into stages loses: use "
                ".detach() on the values, set the precision for the whole run, or use strategy ddp"
            )
    callers = traceback.walk_stack(inspect.currentframe())
    if any(frame.f_code.co_filename == torch.utils.checkpoint.__file__ for frame, _ in callers):
        raise ConfigurationError(
            f"{where} is under torch.utils.checkpoint, which a network that is cut into stages loses: leave it out "
            "(set_grad_checkpointing(False) in timm) and set the pipeline's activation_checkpointing"
        )


def contexts() -> dict[str, Any]:
    """The contexts in which operations run now, by their names."""
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
    """Run a network's forward inside: it must decide nothing by chance, and change none of its modules' attributes."""
    name = type(network).__name__
    numbers, attributes = _random_numbers(), _attributes(network)
    yield
    for library, now in _random_numbers().items():
        if now != numbers[library]:
            raise ConfigurationError(
                f"{name}.forward draws random numbers with {library} to decide what it does: cut into stages, it would "
                "do the same in every step; draw them with a layer such as nn.Dropout or torchvision.ops."
                "StochasticDepth, or use strategy ddp"
            )
    for path, value in _attributes(network).items():
        if attributes.get(path, network) != value:
            raise ConfigurationError(
                f"{name}.forward changes the attribute {path!r}: cut into stages, it would keep the value that it has "
                "now; make it a buffer and a tensor operation, or use strategy ddp"
            )


class TracedModule(nn.Module):
    """Has the place of a module whose own code was traced: its plain attributes are constants of the graph."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what a module needs, but none of the traced module's attributes."""
        if not name.startswith("_") and not isinstance(value, nn.Module | Tensor) and name not in self.__dict__:
            raise ConfigurationError(
                f"{name} = {value!r} is set on a part of the network that is cut into stages, which has the value of "
                "the beginning in its graph: make it a buffer that is changed in place, or use strategy ddp"
            )
        super().__setattr__(name, value)


def _random_numbers() -> dict[str, Any]:
    """What is equal where the same random numbers come next, by the name of the library."""
    numpy: Any = np.random.get_state()
    return {
        "random": random.getstate(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": (numpy[1].tobytes(), numpy[2:]),
    }


def _attributes(network: nn.Module) -> dict[str, Any]:
    """The plain attributes of all modules by path."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in network.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name != "training"
    }


@dataclass(frozen=True)
class Decided:
    """The numbers that a forward asks for, in order, and the shapes of a sample of each input for which they are."""

    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]


class UndecidedError(Exception):
    """The forward needs a number that follows from shapes, and it is not known: a node of what was traced before."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        super().__init__(f"it branches on a shape ({node.name}), and no images are known")
        self.graph = graph
        self.node = node


# By the network and whether it is in training. Each rank finds out for itself, from images of the same shapes.
known: "WeakKeyDictionary[nn.Module, dict[bool, Decided]]" = WeakKeyDictionary()


def is_of_shapes(node: fx.Node) -> bool:
    """Whether a value follows from the shapes of tensors alone."""
    if node.op == "call_method" and node.target in SHAPE_METHODS:
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in SHAPE_ATTRIBUTES or is_of_shapes(node.all_input_nodes[0])
    return node.op == "call_function" and all(map(is_of_shapes, node.all_input_nodes))


def number(network: nn.Module, asked: UndecidedError, images: Any) -> Any:
    """A number that the forward of a network asks for, in the mode that it is in, found with some images."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(asked.graph, copies)
    graph.output(copies[asked.node])
    run = fx.GraphModule(network, graph)
    found = []
    for samples in (SAMPLES, SAMPLES - 1):
        with preserved(network), torch.no_grad():
            found.append(run(tree_map(lambda one, samples=samples: one[:samples], images)))
    if found[0] != found[1]:
        raise ConfigurationError(
            f"{type(network).__name__}.forward branches on how many images there are ({asked.node.name}), which for a "
            "microbatch are others than for the batch: rewrite that, or use strategy ddp"
        )
    return found[0]


def sample_shapes(images: Any) -> tuple[tuple[int, ...], ...]:
    """The shape of a sample of each of a network's inputs."""
    return tuple(tuple(one.shape[1:]) for one in tree_leaves(images))


def hold_to(graph: fx.Graph, decided: Decided, name: str) -> None:
    """Have a graph refuse images of other shapes than it was traced for."""
    given = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(given):
        held = graph.call_function(of_shapes, (given, decided.shapes, name))
    given.replace_all_uses_with(held, lambda user: user is not held)


def of_shapes(images: Any, shapes: Sequence[Sequence[int]], name: str) -> Any:
    """The images, if a sample of each has its shape."""
    for given, shape in zip(sample_shapes(images), shapes, strict=True):
        if given != tuple(shape):
            raise ConfigurationError(
                f"images of shape {given}: {name}.forward branches on their shape, and was cut into stages for "
                f"{tuple(shape)}; give images of one size, or use strategy ddp"
            )
    return images


@contextmanager
def preserved(network: nn.Module) -> Iterator[None]:
    """Put a network's buffers and gradients and the random numbers back as they were; parameters do not change."""
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
                setattr(module, name, buffer)  # Some are replaced.
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
