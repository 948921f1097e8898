"""Measure a traced network node by node, in the precision that it will train in, and what its optimizer holds."""

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

from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.pipeline.fixed import preserved
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.tracing import changed_in_place, cut_positions, mode, ordered_nodes, state_names
from cnnstrategies.planning.costs import GraphCosts, NodeCost, Profile, Value, from_two_sizes

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# A second batch is so much smaller, since microbatches are between the two; batch normalisation refuses one sample.
SMALLER = 4
USUAL_STATES = 2  # Copies of the parameters that Adam holds.


def profile(
    traced: fx.GraphModule,
    microbatch: Images,
    warm_up: int = 2,
    repeats: int = 5,
    budget: float = 20.0,
    apart_on: torch.device | None = None,
) -> GraphCosts:
    """Measure forward and backward time, activation and parameter bytes of every node.

    Each sweep runs the nodes forward in order and then backward in reverse order, every node with an
    autograd graph of its own, as if there were a cut at every node: memory and caches are those of training.
    Between the sweeps the network is run as a whole, and the nodes' medians are scaled to the whole's median,
    since a node measured alone pays for the measurement. The network is measured in training mode and left as
    it was: buffers, gradients, modes and random numbers.

    A network that does not fit on its device stays on the host, where its bytes are counted, and one node at a time
    is brought there, run forward and at once backward. There is no whole to scale to then.

    Args:
        microbatch: Input (n, C, H, W) on the network's device; several where it takes several.
        budget: Seconds after which a slow network is measured no more, once there is one measured sweep.
        apart_on: The device that the network does not fit on.
    """
    order = ordered_nodes(traced)
    with preserved(traced), mode(traced, training=True), _same_random_numbers(apart_on):
        for parameter in traced.parameters():
            # Zeros, so that a backward adds, as it does from the second microbatch of a step on.
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
        # The first node's stage has the images and sends them to the stages that use them once more.
        later = tuple(sorted(position[user] for user in image.users if position.get(user, 0) > 0))
        if later:
            values.append(Value(0, later, input_bytes, 0))
    for node in order:
        consumers = tuple(sorted({position[user] for user in node.users if user in position}))
        if consumers:
            size, gradient = counted.sizes[node]
            values.append(Value(position[node], consumers, size, gradient))
    return GraphCosts(nodes, tuple(values), tuple(cut_positions(traced)), len(tree_leaves(microbatch)[0]), input_bytes)


def timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Run a function to its end on the device; the seconds that it takes, and its result."""
    _synchronize(device)
    start = time.perf_counter()
    result = function()
    _synchronize(device)
    return time.perf_counter() - start, result


@dataclass
class _Sweep:
    """What one pass over the nodes found."""

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
    """Run the nodes forward, then backward.

    Args:
        count: Note the saved bytes, which costs time.
        apart_on: Bring each node to this device alone, and run its backward at once.
    """
    found = _Sweep()
    device = apart_on or tree_leaves(microbatch)[0].device
    interpreter = fx.Interpreter(traced)
    environment: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            environment[node] = microbatch
        elif node.op == "get_attr":
            environment[node] = interpreter.fetch_attr(str(node.target))
    # Storages, by address; those of the sweep all live to its end. What stays anyway belongs to no node.
    owner: dict[int, fx.Node | None] = {
        _address(tensor): None for tensor in (*traced.parameters(), *traced.buffers(), *tree_leaves(microbatch))
    }
    saved: dict[int, int] = {}
    outputs: dict[fx.Node, list[Tensor]] = {}

    def run_backward(node: fx.Node) -> None:
        roots = outputs.pop(node)
        backward = partial(torch.autograd.backward, roots, [torch.ones_like(root) for root in roots])
        found.backward[node] = timed(backward, device)[0] if roots else 0.0

    for node in order:
        # A leaf cannot be changed in place; in training it is the producer's output, which can.
        cut = partial(_cut, device=apart_on, copied=changed_in_place(traced, node) is not None)
        with _brought(traced, node, apart_on), _recording(saved) if count else nullcontext():
            inputs = {
                source: environment[source]
                if source.op == "get_attr" and apart_on is None
                else tree_map(cut, environment[source])
                for source in node.all_input_nodes
            }
            arguments = (fx.node.map_arg(given, inputs.__getitem__) for given in (node.args, node.kwargs))
            found.forward[node], result = timed(partial(getattr(interpreter, node.op), node.target, *arguments), device)
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            outputs[node] = [tensor for tensor in tensors if tensor.requires_grad]
            found.sizes[node] = (sum(t.nbytes for t in tensors), sum(t.nbytes for t in outputs[node]))
            if apart_on is not None:
                run_backward(node)
        environment[node] = tree_map(partial(_cut, device=None if apart_on is None else CPU), result)
        for address in (*map(_address, tensors), *saved):
            owner.setdefault(address, node)
    found.saved_bytes = dict.fromkeys(order, 0)
    for address, size in saved.items():
        if (by := owner[address]) is not None:
            found.saved_bytes[by] += size
    for node in reversed(order) if apart_on is None else ():
        run_backward(node)
    return found


@contextmanager
def _brought(traced: fx.GraphModule, node: fx.Node, device: torch.device | None) -> Iterator[None]:
    """A node's own module, if it has one, on a device meanwhile."""
    if device is None or node.op != "call_module":
        yield
        return
    module = traced.get_submodule(str(node.target))
    home = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), device)
    module.to(device)
    yield
    module.to(home)


def _run_whole(traced: fx.GraphModule, microbatch: Images) -> tuple[float, float]:
    """Seconds of the whole network's forward and of its backward."""
    device = tree_leaves(microbatch)[0].device
    forward, result = timed(partial(traced, microbatch), device)
    roots = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    backward, _ = timed(partial(torch.autograd.backward, roots, gradients), device)
    return forward, backward


@contextmanager
def _recording(saved: dict[int, int]) -> Iterator[None]:
    """Note address and size of the storages that autograd saves."""

    def pack(tensor: Tensor) -> Tensor:
        saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _cut(value: Any, device: torch.device | None = None, copied: bool = False) -> Any:
    """The value as a stage of its own would receive it: a leaf that asks for a gradient, or a copy of one."""
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().to(device).requires_grad_(value.requires_grad)
    return leaf.clone() if copied else leaf


def _same_random_numbers(device: torch.device | None) -> AbstractContextManager[None]:
    """What is drawn on a device besides the network's own leaves no trace there."""
    if device is None or device.type == "cpu":
        return nullcontext()
    return torch.random.fork_rng([device], device_type=device.type)


def _parameter_bytes(traced: fx.GraphModule, order: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Bytes of the parameters of each node; a parameter used by several belongs to the first."""
    parameters = dict(traced.named_parameters(remove_duplicate=False))
    seen: set[nn.Parameter] = set()
    owned: dict[fx.Node, int] = {}
    for node in order:
        new = {parameters[name] for name in state_names(traced, node) if name in parameters} - seen
        seen |= new
        owned[node] = sum(parameter.nbytes for parameter in new)
    return owned


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_profile(
    traced: fx.GraphModule, images: Images, size: int, device: torch.device, precision: str, channels_last: bool
) -> Profile:
    """Costs by the samples, from a device's share of a step's batch and a fourth of it.

    Args:
        traced: The traced network; it comes back to where it is. What does not fit on the device is measured there
            one node at a time.
        size: Samples of the device's share.
    """
    dtype = AUTOCAST.get(precision)
    home = next(traced.parameters()).device

    def batch_of(count: int, place: torch.device) -> Images:
        rows = torch.arange(count) % len(tree_leaves(images)[0])

        def taken(one: Tensor) -> Tensor:
            last = channels_last and one.ndim == 4
            chosen = one[rows.to(one.device)].to(place)
            return chosen.contiguous(memory_format=torch.channels_last) if last else chosen

        result: Images = tree_map(taken, images)
        return result

    def measured(place: torch.device, apart_on: torch.device | None = None) -> Profile:
        traced.to(place)
        sizes = size, max(min(2, size), size // SMALLER)
        large, small = (profile(traced, batch_of(count, place), apart_on=apart_on) for count in sizes)
        return from_two_sizes(large, small, has_batch_norm(traced))

    with contextlib.ExitStack() as stack:
        stack.callback(traced.to, home)
        for kind in {device.type, CPU.type} if dtype else ():
            stack.enter_context(torch.autocast(kind, dtype))
        with contextlib.suppress(torch.OutOfMemoryError):
            return measured(device)
        gc.collect()  # What an exception has held, so that it goes from the device, too.
        return measured(CPU, apart_on=device)


def states_of(optimizer: Optimizer) -> int:
    """Copies of the parameters that an optimizer of this kind and these options holds; tried on a small one."""
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.ones_like(parameter)
    try:
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        tried = type(optimizer)([parameter], **options)
        tried.step()
        held = [value for value in tried.state[parameter].values() if isinstance(value, Tensor) and value.numel() > 1]
    except Exception:
        return USUAL_STATES
    return math.ceil(sum(value.numel() for value in held) / parameter.numel())
