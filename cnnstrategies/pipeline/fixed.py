"""Checks that a traced graph stays valid in every step.

A network is refused if its forward may run different operations in different steps. If a forward branches on the shapes
of its images, the graph checks these shapes in every step.
"""

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

# Attributes with values of these types must not change while a forward runs. bool is included as a subclass of int.
_PLAIN = (int, float, str, bytes, type(None))
SHAPE_METHODS = ("size", "dim", "numel", "is_contiguous")
SHAPE_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cuda")
# A number that a forward derives from shapes is determined twice: with this number of samples, and with one sample
# less. If the two results differ, the number depends on the number of samples, and the network is refused.
SAMPLES = 3


def check_contexts(began: Mapping[str, Any], where: str) -> None:
    """Refuse a traced operation if grad mode, inference mode or autocast have changed since the start of the trace.

    A graph cannot contain a change of these modes, so the stages would run the operation in the wrong mode. A graph
    cannot contain ``torch.utils.checkpoint`` either, so an operation under it is also refused.

    Args:
        began: Result of :func:`contexts` at the start of the trace.
        where: Name of the module whose forward contains the operation, for the error message.

    Raises:
        ConfigurationError: The operation is refused.
    """
    for name, state in contexts().items():
        if state != began[name]:
            raise ConfigurationError(
                f"{where} computes under {name}, which has no effect when the network is cut into stages: use "
                ".detach() on the values, set the precision for the whole run, or use strategy ddp"
            )
    callers = traceback.walk_stack(inspect.currentframe())
    if any(frame.f_code.co_filename == torch.utils.checkpoint.__file__ for frame, _ in callers):
        raise ConfigurationError(
            f"{where} runs under torch.utils.checkpoint, which has no effect when the network is cut into stages: "
            "remove it (set_grad_checkpointing(False) in timm) and set the pipeline's activation_checkpointing"
        )


def contexts() -> dict[str, Any]:
    """Return the current states of grad mode, inference mode and autocast.

    Keys are texts that name the mode in error messages.
    """
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
    """Check that a network's forward runs the same operations in every step. Run the forward inside this context.

    Raises:
        ConfigurationError: The forward draws random numbers outside of leaf modules, or changes an attribute that is a
            number, a string or None.
    """
    name = type(network).__name__
    states, attributes = _random_states(), _attributes(network)
    yield
    for library, state in _random_states().items():
        if state != states[library]:
            raise ConfigurationError(
                f"{name}.forward draws random numbers with {library} to choose what it computes: when the network is "
                "cut into stages, it makes the same choice in every step; draw the numbers in a layer such as "
                "nn.Dropout or torchvision.ops.StochasticDepth, or use strategy ddp"
            )
    for path, value in _attributes(network).items():
        if attributes.get(path, network) != value:
            raise ConfigurationError(
                f"{name}.forward changes the attribute {path!r}: when the network is cut into stages, the change would "
                "have no effect; make the attribute a buffer and change it by a tensor operation, or use strategy ddp"
            )


class TracedModule(nn.Module):
    """A module that runs a traced graph in place of the original module's code."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a submodule, a tensor, an existing attribute, or an attribute whose name begins with an underscore.

        Any other new attribute is refused. It would have no effect, because the graph contains the value that the
        attribute had during the trace.

        Raises:
            ConfigurationError: The attribute is refused.
        """
        if not name.startswith("_") and not isinstance(value, nn.Module | Tensor) and name not in self.__dict__:
            raise ConfigurationError(
                f"{name} = {value!r} would have no effect: the network is cut into stages, and a stage keeps the value "
                "that the attribute had at the start; make the attribute a buffer that is changed in place, or use "
                "strategy ddp"
            )
        super().__setattr__(name, value)


def _random_states() -> dict[str, Any]:
    """Return the states of the random number generators on the CPU. Keys are the names of their libraries."""
    numpy: Any = np.random.get_state()
    return {
        "random": random.getstate(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": (numpy[1].tobytes(), numpy[2:]),
    }


def _attributes(network: nn.Module) -> dict[str, Any]:
    """Return all attributes of the network's modules whose value is a number, a string or None.

    Keys are the attributes' dotted paths.
    """
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in network.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name != "training"
    }


@dataclass(frozen=True)
class Decided:
    """Numbers that a forward derives from the shapes of its images.

    Attributes:
        numbers: The numbers, in the order in which the forward needs them.
        shapes: For each input of the network, the shape of one sample. The numbers are valid only for these shapes.
    """

    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]


class UndecidedError(Exception):
    """The forward needs a number that follows from shapes, and the number has not been determined yet.

    Attributes:
        graph: The graph that was traced before the number was needed.
        node: Node of the graph that computes the number.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        super().__init__(f"its code branches on a shape ({node.name}), and no example images are available")
        self.graph = graph
        self.node = node


# Numbers that networks' forwards derive from shapes. Keys are the network, and then the mode (True for training). Each
# rank determines the numbers itself. All ranks get equal numbers, because all ranks use images of equal shapes.
known: "WeakKeyDictionary[nn.Module, dict[bool, Decided]]" = WeakKeyDictionary()


def is_of_shapes(node: fx.Node) -> bool:
    """Whether a node's value depends only on shapes, dtypes and devices of tensors, and not on their elements."""
    if node.op == "call_method" and node.target in SHAPE_METHODS:
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in SHAPE_ATTRIBUTES or is_of_shapes(node.all_input_nodes[0])
    return node.op == "call_function" and all(map(is_of_shapes, node.all_input_nodes))


def number(network: nn.Module, undecided: UndecidedError, images: Any) -> Any:
    """Determine a number that a network's forward needs in its current mode, by running the graph up to the number.

    Args:
        network: The network.
        undecided: Error that was raised when the trace needed the number.
        images: Example images as the network takes them, with at least `SAMPLES` samples.

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
    """Return the shape of one sample, for each tensor in the input of a network."""
    return tuple(tuple(tensor.shape[1:]) for tensor in tree_leaves(images))


def hold_to(graph: fx.Graph, decided: Decided, name: str) -> None:
    """Insert a check into a graph. The check refuses images of shapes for which the graph was not traced.

    Args:
        graph: The graph.
        decided: Numbers in the graph, with the shapes for which they are valid.
        name: Name of the network's class, for the error message.
    """
    placeholder = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(placeholder):
        checked = graph.call_function(of_shapes, (placeholder, decided.shapes, name))
    placeholder.replace_all_uses_with(checked, lambda user: user is not checked)


def of_shapes(images: Any, shapes: Sequence[Sequence[int]], name: str) -> Any:
    """Check the shapes of images, and return the images. :func:`hold_to` inserts a call of this function into a graph.

    Raises:
        ConfigurationError: An image does not have the expected shape.
    """
    for image_shape, shape in zip(sample_shapes(images), shapes, strict=True):
        if image_shape != tuple(shape):
            raise ConfigurationError(
                f"images of shape {image_shape}: {name}.forward branches on the shape of its images, and the network "
                f"was cut into stages for {tuple(shape)}; use images of one size, or use strategy ddp"
            )
    return images


@contextmanager
def preserved(network: nn.Module) -> Iterator[None]:
    """Restore a network's buffers and gradients, and the state of the random number generators, on exit.

    Parameters must not change inside the context, because they are not restored.
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
                setattr(module, name, buffer)  # The forward may have replaced the buffer by a different tensor.
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
