"""Measure the costs of a traced network's nodes in the precision of training, and the size of an optimizer's state."""

import contextlib
import gc
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.pipeline.graph_checks import preserved
from cnnstrategies.pipeline.microbatches import CPU, Images
from cnnstrategies.pipeline.node_uses import changed_in_place, ordered_nodes, state_names
from cnnstrategies.pipeline.tracing import cut_positions, mode
from cnnstrategies.planning.costs import GraphCosts, NodeCost, Profile, Value, from_two_sizes

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# The second measured batch is smaller than the first by this factor, so that most microbatches have a size between the
# two measured sizes.
SMALLER = 4
USUAL_STATES = 2  # Size of Adam's state as a multiple of the parameters' size.


def profile(
    traced: fx.GraphModule,
    microbatch: Images,
    warm_up: int = 2,
    repeats: int = 5,
    budget: float = 20.0,
    apart_on: torch.device | None = None,
) -> GraphCosts:
    """Measure the forward time, backward time, activation bytes and parameter bytes of every node.

    A sweep runs the forward passes of all nodes in order, and then the backward passes in reverse order, so that memory
    and caches are used as in training. Every node has its own autograd graph, as if the network were cut at every node.
    The whole network also runs without cuts after each sweep. The medians of the nodes' times are scaled so that their
    sum is the median time of the whole network, because the measurement itself adds time to each node.

    The network is measured in training mode. The network's buffers, gradients and modes, and the state of the random
    number generators, are restored afterwards.

    If the network does not fit into the device's memory, it stays in CPU memory. Each node is then moved to the device,
    runs its forward and immediately its backward, and is moved back. In this case the times are not scaled, because the
    whole network cannot run on the device.

    Args:
        traced: The traced network.
        microbatch: Input (n, C, H, W) on the network's device; several inputs if the network takes several.
        warm_up: Number of first sweeps, whose measurements are not used.
        repeats: Number of sweeps whose measurements are used.
        budget: Seconds after which no more sweeps begin, if at least one sweep was measured.
        apart_on: Device to which each node is moved if the whole network does not fit into the device's memory; None
            if the network fits.

    Returns:
        The costs of all nodes for the microbatch.
    """
    order = ordered_nodes(traced)
    with preserved(traced), mode(traced, training=True), _preserved_generator(apart_on):
        for parameter in traced.parameters():
            # In all microbatches of a step except the first, gradients exist, and the backward adds to them. The
            # gradients are created here so that every measured backward also adds to existing gradients.
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        counted = _sweep(traced, order, microbatch, count=True)
        sweeps: list[_Sweep] = []
        wholes: list[tuple[float, float]] = []
        end = time.monotonic() + budget
        for index in range(warm_up + repeats):
            if sweeps and time.monotonic() > end:
                break
            late = time.monotonic() > end
            sweep = _sweep(traced, order, microbatch, apart_on=apart_on)
            apart = sum(sweep.forward.values()), sum(sweep.backward.values())
            whole = _run_whole(traced, microbatch) if apart_on is None else apart
            if index >= warm_up or late:
                sweeps.append(sweep)
                wholes.append(whole)
    forward = [statistics.median(sweep.forward[node] for sweep in sweeps) for node in order]
    backward = [statistics.median(sweep.backward[node] for sweep in sweeps) for node in order]
    forward_scale = statistics.median(whole[0] for whole in wholes) / sum(forward)
    backward_scale = statistics.median(whole[1] for whole in wholes) / max(sum(backward), 1e-12)
    position = {node: index for index, node in enumerate(order)}
    owned = _parameter_bytes(traced, order)
    nodes = tuple(
        NodeCost(
            name=node.name,
            forward=forward[index] * forward_scale,
            backward=backward[index] * backward_scale,
            parameter_bytes=owned[node],
            saved_bytes=counted.saved_bytes[node],
        )
        for index, node in enumerate(order)
    )
    values = []
    input_bytes = sum(tensor.nbytes for tensor in tree_leaves(microbatch))
    for image in (node for node in traced.graph.nodes if node.op == "placeholder"):
        # Node 0 is always in the first stage, which has the input images. The first stage sends the images to other
        # stages that use them, so the images count as a value that node 0 makes for later nodes.
        later = tuple(sorted(position[user] for user in image.users if position.get(user, 0) > 0))
        if later:
            values.append(Value(0, later, input_bytes, 0))
    for node in order:
        consumers = tuple(sorted({position[user] for user in node.users if user in position}))
        if consumers:
            size, gradient = counted.sizes[node]
            values.append(Value(position[node], consumers, size, gradient))
    (end_node,) = (node for node in traced.graph.nodes if node.op == "output")
    output_bytes = sum(counted.sizes[node][0] for node in end_node.all_input_nodes if node in counted.sizes)
    size, cuts = len(tree_leaves(microbatch)[0]), tuple(cut_positions(traced))
    return GraphCosts(nodes, tuple(values), cuts, size, input_bytes, output_bytes)


def timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Run a function, and wait until the device has finished. Return the elapsed seconds and the function's result."""
    _synchronize(device)
    start = time.perf_counter()
    result = function()
    _synchronize(device)
    return time.perf_counter() - start, result


@dataclass
class _Sweep:
    """Measurements of one sweep: the forward and backward passes of all nodes.

    Attributes:
        forward: Seconds of each node's forward.
        backward: Seconds of each node's backward.
        saved_bytes: Bytes of the tensors that each node makes and that autograd saves.
        sizes: For each node, the bytes of all its outputs, and the bytes of the outputs that require a gradient.
    """

    forward: dict[fx.Node, float] = field(default_factory=dict)
    backward: dict[fx.Node, float] = field(default_factory=dict)
    saved_bytes: dict[fx.Node, int] = field(default_factory=dict)
    sizes: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)


def _sweep(
    traced: fx.GraphModule,
    order: Sequence[fx.Node],
    microbatch: Images,
    count: bool = False,
    apart_on: torch.device | None = None,
) -> _Sweep:
    """Measure the forward passes of all nodes in order, and then the backward passes in reverse order.

    If ``apart_on`` is given, each node is moved to this device, and runs its backward directly after its forward.

    Args:
        traced: The traced network.
        order: Nodes in the order of the forward.
        microbatch: Input of the network.
        count: Whether to record the saved bytes, which makes the sweep slower.
        apart_on: Device to which each node is moved; None to run all nodes on the network's device.
    """
    sweep = _Sweep()
    device = apart_on or tree_leaves(microbatch)[0].device
    interpreter = fx.Interpreter(traced)
    environment: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            environment[node] = microbatch
        elif node.op == "get_attr":
            environment[node] = interpreter.fetch_attr(str(node.target))
    # Keys are addresses of storages. Values are the nodes that made the storages; None for parameters, buffers and
    # inputs. All storages are kept until the sweep ends, so that no address is used twice.
    owner: dict[int, fx.Node | None] = {
        _address(tensor): None for tensor in (*traced.parameters(), *traced.buffers(), *tree_leaves(microbatch))
    }
    saved: dict[int, int] = {}
    outputs: dict[fx.Node, list[Tensor]] = {}

    def run_backward(node: fx.Node) -> None:
        roots = outputs.pop(node)
        backward = partial(torch.autograd.backward, roots, [torch.ones_like(root) for root in roots])
        sweep.backward[node] = timed(backward, device)[0] if roots else 0.0

    for node in order:
        # In a sweep, the inputs of each node are autograd leaves, and autograd does not allow in-place changes of
        # leaves. A node that changes an input in place therefore gets a copy of the input.
        cut = partial(_as_received, device=apart_on, copied=changed_in_place(traced, node) is not None)
        with _module_on(traced, node, apart_on), _recording(saved) if count else nullcontext():
            inputs = {
                source: environment[source]
                if source.op == "get_attr" and apart_on is None
                else tree_map(cut, environment[source])
                for source in node.all_input_nodes
            }
            arguments = (fx.node.map_arg(values, inputs.__getitem__) for values in (node.args, node.kwargs))
            sweep.forward[node], result = timed(partial(getattr(interpreter, node.op), node.target, *arguments), device)
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            outputs[node] = [tensor for tensor in tensors if tensor.requires_grad]
            sweep.sizes[node] = (sum(t.nbytes for t in tensors), sum(t.nbytes for t in outputs[node]))
            if apart_on is not None:
                run_backward(node)
        environment[node] = tree_map(partial(_as_received, device=None if apart_on is None else CPU), result)
        for address in (*map(_address, tensors), *saved):
            owner.setdefault(address, node)
    sweep.saved_bytes = dict.fromkeys(order, 0)
    for address, size in saved.items():
        if (producer := owner[address]) is not None:
            sweep.saved_bytes[producer] += size
    for node in reversed(order) if apart_on is None else ():
        run_backward(node)
    return sweep


@contextmanager
def _module_on(traced: fx.GraphModule, node: fx.Node, device: torch.device | None) -> Iterator[None]:
    """Move the module that a node calls to a device, and move it back on exit.

    Nothing is moved if the node does not call a module, or if ``device`` is None.
    """
    if device is None or node.op != "call_module":
        yield
        return
    module = traced.get_submodule(str(node.target))
    previous_device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), device)
    module.to(device)
    yield
    module.to(previous_device)


def _run_whole(traced: fx.GraphModule, microbatch: Images) -> tuple[float, float]:
    """Run the whole network; return the seconds of its forward and the seconds of its backward."""
    device = tree_leaves(microbatch)[0].device
    forward, result = timed(partial(traced, microbatch), device)
    roots = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    backward, _ = timed(partial(torch.autograd.backward, roots, gradients), device)
    return forward, backward


@contextmanager
def _recording(saved: dict[int, int]) -> Iterator[None]:
    """Record the storages that autograd saves while the context is active.

    Args:
        saved: Dictionary to which the sizes of the storages in bytes are added. Keys are the storages' addresses.
    """

    def pack(tensor: Tensor) -> Tensor:
        saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _as_received(value: Any, device: torch.device | None = None, copied: bool = False) -> Any:
    """Detach a tensor from the autograd graph, as if another stage had received the tensor.

    The result is a leaf. It requires a gradient if the original tensor requires a gradient.

    Args:
        value: A tensor. Any other value is returned unchanged.
        device: Device to which the tensor is moved; None if the tensor is not moved.
        copied: Whether to return a clone of the leaf. A clone may be changed in place.
    """
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().to(device).requires_grad_(value.requires_grad)
    return leaf.clone() if copied else leaf


def _preserved_generator(device: torch.device | None) -> AbstractContextManager[None]:
    """Return a context that restores the state of an accelerator's random number generator on exit.

    This context is needed if the network stays in CPU memory but its nodes run on the accelerator, because
    :func:`preserved` then restores only the CPU's generator. Without an accelerator the context does nothing.
    """
    if device is None or device.type == "cpu":
        return nullcontext()
    return torch.random.fork_rng([device], device_type=device.type)


def _parameter_bytes(traced: fx.GraphModule, order: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return the number of bytes of each node's parameters.

    If several nodes share a parameter, the parameter counts only for the first of these nodes.
    """
    parameters = dict(traced.named_parameters(remove_duplicate=False))
    seen: set[nn.Parameter] = set()
    owned: dict[fx.Node, int] = {}
    for node in order:
        new = {parameters[name] for name in state_names(traced, node) if name in parameters} - seen
        seen |= new
        owned[node] = sum(parameter.nbytes for parameter in new)
    return owned


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_profile(
    traced: fx.GraphModule, images: Images, size: int, device: torch.device, precision: str, channels_last: bool
) -> Profile:
    """Measure a network with two batch sizes: ``size`` samples, and about a fourth of this number.

    If the network does not fit into the device's memory, one node at a time is moved to the device and measured.

    Args:
        traced: The traced network. It is moved back to its current device afterwards.
        images: Inputs from which the batches are made. If there are too few inputs, they are used repeatedly.
        size: Number of samples that one device has in a step.
        device: Device on which to measure.
        precision: Precision of the trainer, such as ``bf16-mixed``.
        channels_last: Whether images are stored in the memory format channels_last.
    """
    dtype = AUTOCAST.get(precision)
    previous_device = next(traced.parameters()).device

    def batch_of(count: int, place: torch.device) -> Images:
        rows = torch.arange(count) % len(tree_leaves(images)[0])

        def taken(tensor: Tensor) -> Tensor:
            is_channels_last = channels_last and tensor.ndim == 4
            chosen = tensor[rows.to(tensor.device)].to(place)
            return chosen.contiguous(memory_format=torch.channels_last) if is_channels_last else chosen

        result: Images = tree_map(taken, images)
        return result

    def measured(place: torch.device, apart_on: torch.device | None = None) -> Profile:
        traced.to(place)
        # The small batch has at least two samples if possible, because BatchNorm does not accept a batch of one sample.
        sizes = size, max(min(2, size), size // SMALLER)
        large, small = (profile(traced, batch_of(count, place), apart_on=apart_on) for count in sizes)
        return from_two_sizes(large, small, has_batch_norm(traced))

    with contextlib.ExitStack() as stack:
        stack.callback(traced.to, previous_device)
        for kind in {device.type, CPU.type} if dtype else ():
            stack.enter_context(torch.autocast(kind, dtype))
        with contextlib.suppress(torch.OutOfMemoryError):
            return measured(device)
        # The traceback of the OutOfMemoryError still refers to tensors on the device. Garbage collection frees their
        # memory for the second attempt.
        gc.collect()
        return measured(CPU, apart_on=device)


def states_of(optimizer: Optimizer) -> int:
    """Return the size of an optimizer's state as a multiple of the parameters' size, rounded up.

    To measure the size, a new optimizer with the same class and options makes one step on a small parameter.
    If this fails, return 2, the value for Adam.
    """
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.ones_like(parameter)
    try:
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        small_optimizer = type(optimizer)([parameter], **options)
        small_optimizer.step()
        held = [
            value
            for value in small_optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.numel() > 1
        ]
    except Exception:
        return USUAL_STATES
    return math.ceil(sum(value.numel() for value in held) / parameter.numel())
