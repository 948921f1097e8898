"""Checks that a traced graph stays valid in every step.

A network is refused if its forward may run different operations in different steps. If a forward branches on the shapes
of its images, the graph checks these shapes in every step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.stored_watch import StoredWatch

SHAPE_METHODS = ("size", "dim", "numel", "is_contiguous")
SHAPE_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cuda")
# A number that a forward derives from shapes is determined with this number of samples, with one sample less, and with
# more samples than a batch has. If the results differ, the number depends on the number of samples, and the network is
# refused.
SAMPLES = 3
MANY_SAMPLES = 1 << 14


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


@dataclass(frozen=True)
class Decided:
    """Numbers that a forward derives from the shapes of its images.

    Attributes:
        numbers: The numbers, in the order in which the forward needs them.
        shapes: For each input of the network, the shape of one sample. The numbers are valid only for these shapes.
            None if the numbers are keys of dictionaries.
    """

    numbers: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...] | None


class UndecidedError(Exception):
    """The forward needs a number that follows from shapes, and the number has not been determined yet.

    Attributes:
        graph: The graph that was traced before the number was needed.
        node: Node of the graph that computes the number.
        constants: Tensors that the graph reads, and that are not attributes of the network, by their names.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node, constants: Mapping[str, Tensor]) -> None:
        super().__init__(f"its code branches on a shape ({node.name}), and no example images are available")
        self.graph = graph
        self.node = node
        self.constants = constants


# Numbers that networks' forwards derive from shapes. Keys are the network, and then the mode (True for training). Each
# rank determines the numbers itself. All ranks get equal numbers, because all ranks use images of equal shapes.
known: "WeakKeyDictionary[nn.Module, dict[bool, Decided]]" = WeakKeyDictionary()


def keys_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a dictionary that a network takes. A node of a graph calls this function."""
    return tuple(batch)


def with_keys(batch: Mapping[str, Any], keys: Sequence[str], name: str) -> Any:
    """Check the keys of a dictionary that a network takes, and return the dictionary. A node of a graph calls this.

    Raises:
        ConfigurationError: The dictionary does not have the keys for which the network was traced.
    """
    if tuple(batch) != tuple(keys):
        raise ConfigurationError(
            f"a batch with the keys {list(batch)}: {name}.forward copies the whole batch, and the network was cut into "
            f"stages for the keys {list(keys)}; use batches with the same keys, or name the keys in the forward"
        )
    return batch


def is_of_shapes(node: fx.Node) -> bool:
    """Whether a node's value depends only on shapes, dtypes and devices of tensors, and not on their elements."""
    if node.target is keys_of:
        return True
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
    run = graph_module(network, graph, undecided.constants)
    results = []
    with nothing_stored(network):
        for samples in (SAMPLES, SAMPLES - 1, MANY_SAMPLES):
            part = tree_map(lambda tensor, samples=samples: _with_samples(tensor, samples), images)
            try:
                if _reads_device(undecided.node):
                    raise ValueError("the meta device is a different device")
                results.append(_run_on_meta(run, part))
            except Exception:  # A layer may read values, which tensors on the meta device do not have.
                if samples == MANY_SAMPLES:
                    continue
                with preserved(network), torch.no_grad():
                    results.append(run(part))
    if any(result != results[0] for result in results):
        raise ConfigurationError(
            f"{type(network).__name__}.forward branches on the number of images ({undecided.node.name}), which differs "
            "between a microbatch and the batch: rewrite this code, or use strategy ddp"
        )
    return results[0]


def _with_samples(tensor: Tensor, samples: int) -> Tensor:
    """Return the first samples of a tensor, or a tensor of many samples without values."""
    if samples != MANY_SAMPLES:
        return tensor[:samples]
    return torch.empty_strided((samples, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device="meta")


def _reads_device(node: fx.Node) -> bool:
    """Whether a number, which depends only on shapes, dtypes and devices of tensors, depends on a device."""
    if node.op == "call_function" and node.target is getattr and node.args[1] in ("device", "is_cuda"):
        return True
    return is_of_shapes(node) and any(map(_reads_device, node.all_input_nodes))


@torch.no_grad()
def _run_on_meta(run: fx.GraphModule, images: Any) -> Any:
    """Run a graph with tensors that have shapes and no values, which takes a small part of the time."""
    tensors = (*run.named_parameters(), *run.named_buffers())
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    return functional_call(run, state, (tree_map(lambda tensor: tensor.to("meta"), images),))


def graph_module(
    network: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor], name: str = "GraphModule"
) -> fx.GraphModule:
    """Return a module that runs a graph with the parameters, buffers and submodules of a network.

    Args:
        network: The network.
        graph: The graph.
        constants: Tensors that the graph reads, and that are not attributes of the network, by their names.
        name: Name of the new module's class.
    """
    vars(network).update(constants)  # torch.fx copies attributes from the network alone.
    try:
        return fx.GraphModule(network, graph, name)
    finally:
        for constant in constants:
            del vars(network)[constant]


def sample_shapes(images: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shape of one sample, for each tensor in the input of a network."""
    return tuple(tuple(tensor.shape[1:]) for tensor in tree_leaves(images))


def hold_to(graph: fx.Graph, decided: Decided, name: str) -> None:
    """Insert a check into a graph. The check refuses images of shapes for which the graph was not traced.

    Without numbers that follow from shapes there is nothing to check.

    Args:
        graph: The graph.
        decided: Numbers in the graph, with the shapes for which they are valid.
        name: Name of the network's class, for the error message.
    """
    if decided.shapes is None:
        return
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
def nothing_stored(owner: nn.Module, network: nn.Module | None = None) -> Iterator[None]:
    """Return a context in which a network runs for a trial. What its forwards and hooks have stored is undone.

    Args:
        owner: The module that contains the network, or the network.
        network: The network; by default the owner.
    """
    watch = StoredWatch(owner, network)
    watch.begin()
    try:
        yield
    finally:
        watch.take()


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
