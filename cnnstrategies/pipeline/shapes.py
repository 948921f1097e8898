"""What a network's own forward decides by the shapes of its images: found out with some of them, and held to these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.preserved import preserved

SHAPE_METHODS = ("size", "dim", "numel", "is_contiguous")
SHAPE_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cuda")
SAMPLES = 3  # with which decisions are made, and with one less


@dataclass(frozen=True)
class Decided:
    """What was found out.

    Attributes:
        numbers: What the forward asks for, in the order in which it does.
        shapes: Those of a sample of each of the network's inputs, for which they are.
    """

    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]


class UndecidedError(Exception):
    """The forward needs a number that follows from shapes, and it is not known.

    Attributes:
        graph: What was traced before.
        node: The number's.
    """

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
    """A number that the forward of a network asks for.

    Args:
        network: In the mode for which it is.
        asked: Where.
        images: Some, as the network takes them.

    Raises:
        ConfigurationError: It is another one for another number of samples.
    """
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
    """The images, if a sample of each has its shape.

    Raises:
        ConfigurationError: Another one has.
    """
    for given, shape in zip(sample_shapes(images), shapes, strict=True):
        if given != tuple(shape):
            raise ConfigurationError(
                f"images of shape {given}: {name}.forward branches on their shape, and was cut into stages for "
                f"{tuple(shape)}; give images of one size, or use strategy ddp"
            )
    return images
