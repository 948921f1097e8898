"""Measure the costs of a traced network's nodes one after the other, with the memory of few nodes at a time."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.pipeline.batch_statistics import ENTRY_BYTES
from cnnstrategies.pipeline.buffers import is_batch_norm
from cnnstrategies.pipeline.graph_checks import preserved
from cnnstrategies.pipeline.microbatches import CPU, Images
from cnnstrategies.pipeline.node_uses import changed_in_place, ordered_nodes, origins, state_names
from cnnstrategies.pipeline.own_code import contexts_left, enter_context, exit_context
from cnnstrategies.pipeline.tracing import cut_positions, mode
from cnnstrategies.planning.costs import GraphCosts, NodeCost, Value
from cnnstrategies.planning.held_bytes import allocated, counted

# Seconds of a node's forward and backward from which one run suffices. What the first run does besides, such as
# compiling a kernel, is small beside a longer time.
LONG = 0.05
# Seconds after which a node, or nodes that run together, are not measured again. All that are not long run twice.
ENOUGH, ENOUGH_TOGETHER = 0.002, 0.02
# Seconds of a node's forward and backward beside which the measurement's own time, below 0.1 ms, can be neglected.
UNDISTURBED = 0.002
# Largest number of bytes that short nodes which run together have as results, saved tensors and parameters. On
# accelerators, nodes run together because the device works while the host goes on.
TOGETHER = {"cpu": 64 * 2**20}
TOGETHER_ON_ACCELERATORS = 512 * 2**20

CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d

Times = tuple[float, float]  # Seconds of a forward and of a backward.


def profile(
    traced: fx.GraphModule, microbatch: Images, repeats: int = 2, apart_on: torch.device | None = None
) -> GraphCosts:
    """Measure the forward time, backward time, activation bytes and parameter bytes of every node.

    Each node runs its forward and directly afterwards its backward, as if the network were cut at every node. Its
    result is kept until the last node that uses the result has run. So the measurement needs much less memory than a
    step, which keeps the activations of all nodes. A node runs several times, and the shortest times count. The
    measurement itself adds time to each node, for example for starting autograd. Therefore consecutive short nodes run
    together once more, and their times are scaled so that their sum is the time in which they run together.

    The network is measured in training mode. The network's buffers, gradients and modes, and the state of the random
    number generators, are restored afterwards.

    If the network does not fit into the device's memory, it stays in CPU memory. Each node is then moved to the device
    and back. In this case no times are scaled.

    Args:
        traced: The traced network.
        microbatch: Input (n, C, H, W) on the network's device; several inputs if the network takes several.
        repeats: Largest number of measurements of a short node after the first; 0 if the tensors have no values, and
            times do not matter.
        apart_on: Device to which each node is moved if the whole network does not fit into the device's memory; None
            if the network fits.

    Returns:
        The costs of all nodes for the microbatch.
    """
    order = ordered_nodes(traced)
    place = apart_on or tree_leaves(microbatch)[0].device
    before = allocated(place)
    with preserved(traced), mode(traced, training=True), _preserved_generator(apart_on), contexts_left():
        walk = _Walk(traced, order, microbatch, repeats, apart_on)
        walk.run()
    # What is left belongs to libraries, such as the workspace of cuBLAS.
    framework_bytes = max(0, allocated(place) - before)
    position = {node: index for index, node in enumerate(order)}
    parameters, frozen, buffers = _state_bytes(traced, order)
    nodes = tuple(
        NodeCost(
            node.name,
            *walk.times[node],
            parameters[node],
            walk.saved_bytes[node],
            frozen[node],
            buffers[node],
            *walk.work_bytes[node],
            _statistics_bytes(traced, node),
            walk.workspace_bytes[node],
            walk.copied_bytes[node],
        )
        for node in order
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
            size, gradient = walk.sizes[node]
            values.append(Value(position[node], consumers, size, gradient))
    (end_node,) = (node for node in traced.graph.nodes if node.op == "output")
    results = [node for node in end_node.all_input_nodes if node in walk.sizes]
    output_bytes = sum(walk.sizes[node][0] for node in results)
    loss_bytes = sum(walk.float_bytes[node] for node in results)
    size, cuts = len(tree_leaves(microbatch)[0]), tuple(cut_positions(traced))
    if loss_bytes == output_bytes or place.type == "meta" or not torch.is_autocast_enabled(place.type):
        loss_bytes = 0
    return GraphCosts(nodes, tuple(values), cuts, size, input_bytes, output_bytes, framework_bytes, loss_bytes)


class _Walk:
    """One pass through a network's nodes, in which each node is measured.

    Attributes:
        times: Seconds of each node.
        saved_bytes: Bytes of the tensors that each node makes and that autograd saves for this node or a later node.
        sizes: For each node, the bytes of all its outputs, and the bytes of the outputs that require a gradient.
        float_bytes: For each node, the bytes of all its outputs, of which those in 16 bits are converted to float32.
        work_bytes: For each node, `forward_bytes` and `backward_bytes`, see :class:`.NodeCost`.
        workspace_bytes: For each node, see :class:`.NodeCost`.
        copied_bytes: For each node, see :class:`.NodeCost`.
    """

    def __init__(
        self,
        traced: fx.GraphModule,
        order: Sequence[fx.Node],
        microbatch: Images,
        repeats: int,
        apart_on: torch.device | None,
    ) -> None:
        self._traced, self._order, self._repeats, self._apart_on = traced, order, repeats, apart_on
        self._device = apart_on or tree_leaves(microbatch)[0].device
        self._together = TOGETHER.get(self._device.type, TOGETHER_ON_ACCELERATORS)
        self._interpreter = fx.Interpreter(traced)
        self._results: dict[fx.Node, Any] = {}
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                self._results[node] = microbatch
            elif node.op == "get_attr":
                self._results[node] = self._interpreter.fetch_attr(str(node.target))
        self._constants = frozenset(self._results)
        self._users = {node: len([user for user in node.users if user.op != "output"]) for node in order}
        tensors = (*traced.parameters(), *traced.buffers(), *_tensors(list(self._results.values())))
        self._storages = _Storages(frozenset(map(_address, tensors)))
        self.times: dict[fx.Node, Times] = {}
        self.saved_bytes: dict[fx.Node, int] = dict.fromkeys(order, 0)
        self.sizes: dict[fx.Node, tuple[int, int]] = {}
        self.float_bytes: dict[fx.Node, int] = dict.fromkeys(order, 0)
        self.work_bytes: dict[fx.Node, tuple[int, int]] = dict.fromkeys(order, (0, 0))
        self.workspace_bytes: dict[fx.Node, int] = dict.fromkeys(order, 0)
        self.copied_bytes: dict[fx.Node, int] = dict.fromkeys(order, 0)

    def run(self) -> None:
        """Measure all nodes in order."""
        short: list[fx.Node] = []  # Consecutive short nodes, whose inputs are kept.
        size = 0
        for node in self._order:
            if node.target in (enter_context, exit_context):
                # The nodes between these two run in the context, so the groups of nodes that run again end here.
                self._finish(short)
                self._run_once(node)
                short, size = [], 0
                continue
            held = self._measure(node)
            if self._apart_on is not None or sum(self.times[node]) >= UNDISTURBED:
                self._finish(short)
                self._release([node])
                short, size = [], 0
                continue
            if size + held > self._together:
                self._finish(short)
                short, size = [], 0
            short.append(node)
            size += held
        self._finish(short)

    def _run_once(self, node: fx.Node) -> None:
        """Run a node that enters or leaves a context, which must not be repeated."""
        self._results[node] = self._call(node, {source: self._results[source] for source in node.all_input_nodes})
        self.times[node], self.sizes[node] = (0.0, 0.0), (0, 0)
        self._release([node])

    def _measure(self, node: fx.Node) -> int:
        """Measure a node. Return the bytes of its results, its saved tensors and its parameters' gradients."""
        saved: dict[int, int] = {}
        is_changed = changed_in_place(self._traced, node) is not None
        with self._module_on(node), self._gradients_of([node]):
            inputs = {source: self._received(source, is_changed) for source in node.all_input_nodes}
            results: list[Any] = []  # The result of the first run, whose memory is recorded.
            # Only tensors with values take memory from the device's allocator.
            place = self._device if self._repeats else CPU
            in_forward, in_backward = counted(place), counted(place)
            copies: set[int] = set()  # Addresses of saved tensors that are copies of parameters.

            def once() -> Times:
                fresh = {source: self._again(inputs[source], source, is_changed) for source in inputs}
                if results:
                    forward, result = timed(partial(self._call, node, fresh), self._device)
                    return forward, self._backward(_differentiable(result))
                with _recording(saved, copies, list(self._parameters_of(node))), in_forward:
                    forward, result = timed(partial(self._call, node, fresh), self._device)
                results.append(result)
                with in_backward:
                    return forward, self._backward(_differentiable(result))

            self.times[node] = _shortest(once, self._repeats)
            state = {_address(tensor) for tensor in self._state_of(node, inputs)}
            aliases = {
                _address(here): _address(kept)
                for source in inputs
                for here, kept in zip(_tensors(inputs[source]), _tensors(self._results[source]), strict=True)
            }
        (result,) = results
        tensors, roots = _tensors(result), _differentiable(result)
        self.sizes[node] = (sum(tensor.nbytes for tensor in tensors), sum(root.nbytes for root in roots))
        for producer, size in self._storages.saved(node, saved, state, aliases):
            self.saved_bytes[producer] += size
        self.copied_bytes[node] = sum(saved[address] for address in copies)
        workspace = self.workspace_bytes[node] = self._workspace(node)
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        self.float_bytes[node] = sum(tensor.numel() * max(4, tensor.element_size()) for tensor in floats)
        # The gradients of the results are those from which the backward starts.
        self.work_bytes[node] = (
            in_forward.most
            + self._storages.not_saved(kept for source in inputs for kept in self._of(source))
            + workspace,
            max(0, in_backward.most - self.sizes[node][1]) + workspace,
        )
        if self._users[node]:
            place = None if self._apart_on is None else CPU
            self._results[node] = tree_map(partial(_leaf, device=place), result)
            self._storages.keep(node, tensors, _tensors(self._results[node]), aliases)
        self._storages.forget_others()
        gradients = sum(p.nbytes for p in self._state_of(node, inputs) if isinstance(p, nn.Parameter))
        return self.sizes[node][0] + sum(saved.values()) + gradients

    def _workspace(self, node: fx.Node) -> int:
        """Return the bytes that a node's operations allocate and free inside themselves, if no allocator counts them.

        On a CPU a convolution copies its weights into the order in which oneDNN needs them.
        """
        if node.op != "call_module" or (self._repeats and self._device.type != "cpu"):
            return 0
        layers = self._traced.get_submodule(str(node.target)).modules()
        return max((layer.weight.nbytes for layer in layers if isinstance(layer, CONVOLUTIONS)), default=0)

    def _of(self, source: fx.Node) -> list[Tensor]:
        """Return the tensors of a kept result."""
        return _tensors(self._results[source])

    def _finish(self, nodes: Sequence[fx.Node]) -> None:
        """Scale the times of short nodes to the time in which they run together, and release what they used."""
        if len(nodes) > 1 and self._repeats:
            inside = set(nodes)
            changed = {
                origin for node in nodes for origin in origins(self._traced, changed_in_place(self._traced, node))
            }
            sources = {source: source in changed for node in nodes for source in node.all_input_nodes}
            received = {
                source: self._received(source, is_changed)
                for source, is_changed in sources.items()
                if source not in inside
            }

            def once() -> Times:
                values = {source: self._again(value, source, sources[source]) for source, value in received.items()}

                def forward() -> list[Tensor]:
                    for node in nodes:
                        values[node] = self._call(node, values)
                    used_later = (node for node in nodes if not inside.issuperset(node.users))
                    return [root for node in used_later for root in _differentiable(values[node])]

                seconds, roots = timed(forward, self._device)
                values.clear()
                return seconds, self._backward(roots)

            with self._gradients_of(nodes):
                together = _shortest(once, self._repeats, ENOUGH_TOGETHER)
            alone = [sum(times) for times in zip(*(self.times[node] for node in nodes), strict=True)]
            forward, backward = (time / sum_ if sum_ else 1.0 for time, sum_ in zip(together, alone, strict=True))
            for node in nodes:
                self.times[node] = self.times[node][0] * forward, self.times[node][1] * backward
        self._release(nodes)

    def _call(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        arguments = (fx.node.map_arg(part, values.__getitem__) for part in (node.args, node.kwargs))
        return getattr(self._interpreter, node.op)(node.target, *arguments)

    def _backward(self, roots: Sequence[Tensor]) -> float:
        """Return the seconds of the backward from results of nodes."""
        if not roots:
            return 0.0
        gradients = [torch.ones_like(root) for root in roots]
        return timed(partial(torch.autograd.backward, roots, gradients), self._device)[0]

    def _received(self, source: fx.Node, is_changed: bool) -> Any:
        """Return a value as a node gets it, on the device."""
        if source.op == "get_attr" and self._apart_on is None and not is_changed:
            return self._results[source]
        return tree_map(partial(_leaf, device=self._apart_on), self._results[source])

    def _again(self, value: Any, source: fx.Node, is_changed: bool) -> Any:
        """Return a received value for one run, without gradients of earlier runs.

        In a run, inputs are autograd leaves, and autograd does not allow in-place changes of leaves. Nodes that change
        an input in place therefore get a copy of the input.
        """
        if source.op == "get_attr" and not is_changed:
            return value
        return tree_map(partial(_leaf, copied=is_changed), value)

    def _release(self, nodes: Iterable[fx.Node]) -> None:
        """Forget the results that no later node uses."""
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in self._constants:
                    self._users[source] -= 1
                    if not self._users[source]:
                        self._storages.drop(_tensors(self._results.pop(source)))
        self._storages.forget_others()
        # Copies of parameters in the precision of autocast would otherwise be kept until autocast ends.
        torch.clear_autocast_cache()

    def _state_of(self, node: fx.Node, inputs: dict[fx.Node, Any]) -> list[Tensor]:
        """Return the parameters and buffers that a node uses, and the images."""
        module = self._traced.get_submodule(str(node.target)) if node.op == "call_module" else nn.Module()
        constants = [tensor for source in inputs if source in self._constants for tensor in _tensors(inputs[source])]
        return [*module.parameters(), *module.buffers(), *constants]

    @contextmanager
    def _gradients_of(self, nodes: Iterable[fx.Node]) -> Iterator[None]:
        """Give the parameters of nodes gradients, and remove the gradients on exit.

        In all microbatches of a step except the first, gradients exist, and the backward adds to them.
        """
        used = [parameter for node in nodes for parameter in self._parameters_of(node) if parameter.requires_grad]
        for parameter in used:
            parameter.grad = torch.zeros_like(parameter)
        try:
            yield
        finally:
            for parameter in used:
                parameter.grad = None

    def _parameters_of(self, node: fx.Node) -> Iterator[nn.Parameter]:
        if node.op == "call_module":
            yield from self._traced.get_submodule(str(node.target)).parameters()
        for source in node.all_input_nodes:
            if source.op == "get_attr" and isinstance(self._results[source], nn.Parameter):
                yield self._results[source]

    @contextmanager
    def _module_on(self, node: fx.Node) -> Iterator[None]:
        """Move the module that a node calls to the device of ``apart_on``, and move it back on exit."""
        if self._apart_on is None or node.op != "call_module":
            yield
            return
        module = self._traced.get_submodule(str(node.target))
        tensors = (*module.parameters(), *module.buffers())
        previous_device = next((tensor.device for tensor in tensors), self._apart_on)
        module.to(self._apart_on)
        yield
        module.to(previous_device)


class _Storages:
    """The nodes that have made the storages which are kept, and whether a storage has been counted as saved.

    Args:
        permanent: Addresses of the storages of parameters, buffers and images, which are not counted.
    """

    def __init__(self, permanent: frozenset[int]) -> None:
        self._permanent = permanent
        self._makers: dict[int, fx.Node] = {}  # Keys are addresses of storages.
        self._counted: set[int] = set()
        self._kept: Counter[int] = Counter()  # Number of kept results with a storage.

    def saved(
        self, node: fx.Node, saved: dict[int, int], state: set[int], aliases: dict[int, int]
    ) -> Iterator[tuple[fx.Node, int]]:
        """Yield the maker and the bytes of each storage that a node has saved and that was not counted before.

        Args:
            node: The node.
            saved: Bytes of the storages that autograd has saved, by address.
            state: Addresses of the node's parameters and buffers on the device.
            aliases: For the addresses of the node's inputs, the addresses of the kept results.
        """
        for address, size in saved.items():
            kept = aliases.get(address, address)
            if address not in state and not self._is_counted(kept):
                self._counted.add(kept)
                yield self._makers.get(kept, node), size

    def keep(self, node: fx.Node, tensors: Sequence[Tensor], kept: Sequence[Tensor], aliases: dict[int, int]) -> None:
        """Note that a node's result is kept.

        Args:
            node: The node.
            tensors: The tensors of its result.
            kept: The same tensors as they are kept, perhaps on another device.
            aliases: See :meth:`saved`.
        """
        for tensor, copy in zip(tensors, kept, strict=True):
            address = aliases.get(_address(tensor), _address(tensor))
            self._makers.setdefault(_address(copy), self._makers.get(address, node))
            if self._is_counted(address):
                self._counted.add(_address(copy))
        self._kept.update(_address(copy) for copy in kept)

    def not_saved(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the storages that autograd has not saved so far."""
        sizes = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(size for address, size in sizes.items() if not self._is_counted(address))

    def _is_counted(self, address: int) -> bool:
        return address in self._permanent or address in self._counted

    def drop(self, kept: Sequence[Tensor]) -> None:
        """Note that a result is not kept any more."""
        self._kept.subtract(_address(copy) for copy in kept)

    def forget_others(self) -> None:
        """Forget the storages that are not kept, whose addresses may belong to new storages."""
        self._kept = +self._kept
        self._counted &= self._kept.keys()
        for address in self._makers.keys() - self._kept.keys():
            del self._makers[address]


def _shortest(run: Callable[[], Times], repeats: int, enough: float = ENOUGH) -> Times:
    """Return the shortest times of several runs; of one run if it is long."""
    times = [run()]
    while sum(times[0]) < LONG and len(times) <= repeats:
        if len(times) > 1 and (len(times) - 1) * min(map(sum, times)) >= enough:
            break
        times.append(run())
    return min(forward for forward, _ in times), min(backward for _, backward in times)


def timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Run a function, and wait until the device has finished. Return the elapsed seconds and the function's result."""
    _synchronize(device)
    start = time.perf_counter()
    result = function()
    _synchronize(device)
    return time.perf_counter() - start, result


@contextmanager
def _recording(saved: dict[int, int], copies: set[int], parameters: Sequence[Tensor]) -> Iterator[None]:
    """Record the storages that autograd saves while the context is active.

    Args:
        saved: Dictionary to which the sizes of the storages in bytes are added. Keys are the storages' addresses.
        copies: Set to which the addresses of copies of parameters in another dtype, as autocast makes them, are added.
        parameters: The parameters that the operations use.
    """

    def sorted_shape(tensor: Tensor) -> tuple[int, ...]:
        return tuple(sorted(tensor.shape))

    # Batch norm saves values of the shape of its weights, which are not copies.
    forms = {(sorted_shape(parameter), parameter.dtype) for parameter in parameters if parameter.dim() > 1}
    shapes = {shape for shape, _ in forms}

    def pack(tensor: Tensor) -> Tensor:
        saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        shape = sorted_shape(tensor)  # A linear layer saves its weights transposed.
        if shape in shapes and (shape, tensor.dtype) not in forms:
            copies.add(_address(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _leaf(value: Any, device: torch.device | None = None, copied: bool = False) -> Any:
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


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _differentiable(value: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors(value) if tensor.requires_grad]


def _preserved_generator(device: torch.device | None) -> AbstractContextManager[None]:
    """Return a context that restores the state of an accelerator's random number generator on exit.

    This context is needed if the network stays in CPU memory but its nodes run on the accelerator, because
    :func:`preserved` then restores only the CPU's generator. Without an accelerator the context does nothing.
    """
    if device is None or device.type == "cpu":
        return nullcontext()
    return torch.random.fork_rng([device], device_type=device.type)


def _state_bytes(
    traced: fx.GraphModule, order: Sequence[fx.Node]
) -> tuple[dict[fx.Node, int], dict[fx.Node, int], dict[fx.Node, int]]:
    """Return the bytes of each node's parameters, of the parameters that are not trained, and of its buffers.

    If several nodes share a tensor, the tensor counts only for the first of these nodes.
    """
    tensors: dict[str, Tensor] = dict(traced.named_parameters(remove_duplicate=False))
    tensors |= dict(traced.named_buffers(remove_duplicate=False))
    seen: set[int] = set()
    sums: tuple[dict[fx.Node, int], ...] = ({}, {}, {})
    for node in order:
        new = {id(tensors[name]): tensors[name] for name in state_names(traced, node) if name in tensors}
        parameters = [t for key, t in new.items() if key not in seen and isinstance(t, nn.Parameter)]
        sums[0][node] = sum(tensor.nbytes for tensor in parameters)
        sums[1][node] = sum(tensor.nbytes for tensor in parameters if not tensor.requires_grad)
        sums[2][node] = sum(t.nbytes for key, t in new.items() if key not in seen and not isinstance(t, nn.Parameter))
        seen |= new.keys()
    return sums[0], sums[1], sums[2]


def _statistics_bytes(traced: fx.GraphModule, node: fx.Node) -> int:
    """Return the bytes of the means and variances that a node's BatchNorm layers record in training."""
    if node.op != "call_module":
        return 0
    layers: list[Any] = [*filter(is_batch_norm, traced.get_submodule(str(node.target)).modules())]
    return sum(2 * ENTRY_BYTES * int(layer.num_features) for layer in layers if layer.track_running_stats)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or of the object if the storage has no address."""
    storage = tensor.untyped_storage()
    return id(storage) if storage.device.type == "meta" else storage.data_ptr() or id(storage)


def _synchronize(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
