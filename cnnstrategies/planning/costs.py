"""Costs of a network's nodes and of the connections between devices, which the planner uses for all predictions."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")
# Prices of a sum and of an exchange in seconds, as in `Link`, of connections that nobody has measured. Those of gloo
# were measured on two processes of a machine with two cores. For NCCL they are assumed.
UNMEASURED = {"gloo": (1e-3, 5e-4), "nccl": (3e-5, 2e-5)}


@dataclass(frozen=True)
class NodeCost:
    """The cost of one node of the traced network for one microbatch.

    Attributes:
        name: Name of the node.
        forward: Seconds of the forward.
        backward: Seconds of the backward, including the accumulation of the parameters' gradients.
        parameter_bytes: Bytes of the node's parameters.
        saved_bytes: Bytes of the tensors that the node makes and that autograd saves for the backward of this node or
            of a later node.
        frozen_bytes: Bytes of those of the node's parameters that are not trained.
        buffer_bytes: Bytes of the node's buffers.
        forward_bytes: Largest number of bytes that the forward holds at once in new tensors, with its results and what
            autograd saves, and in inputs that autograd does not keep; 0 if not measured.
        backward_bytes: Largest number of bytes that the backward holds at once in new tensors, such as the gradients of
            the node's inputs and parameters; 0 if not measured.
        statistics_bytes: Bytes of the means and variances of batch normalisation that a replica of a pipeline's stage
            sends to each other replica of the stage in a step, whatever the number of microbatches.
        workspace_bytes: Those of ``forward_bytes`` and ``backward_bytes`` that do not depend on the batch, except the
            gradients of parameters. An example is a copy of a convolution's weights in another order.
        copied_bytes: Those of ``saved_bytes`` that do not depend on the batch: copies of parameters in the precision of
            autocast.
    """

    name: str
    forward: float
    backward: float
    parameter_bytes: int = 0
    saved_bytes: int = 0
    frozen_bytes: int = 0
    buffer_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    statistics_bytes: int = 0
    workspace_bytes: int = 0
    copied_bytes: int = 0

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that are trained, and so of their gradients."""
        return self.parameter_bytes - self.frozen_bytes

    def scaled(self, factor: float) -> "NodeCost":
        """Return the node with the bytes of a batch that is larger by a factor.

        Workspaces and copies of parameters, and in the backward the gradients of parameters, do not depend on the
        batch. A copy of a parameter has a gradient, too.
        """
        copied = min(self.copied_bytes, self.saved_bytes)
        fixed = min(self.workspace_bytes + copied, self.forward_bytes)
        fixed_in_backward = min(self.trained_bytes + self.workspace_bytes + copied, self.backward_bytes)
        return replace(
            self,
            saved_bytes=copied + round((self.saved_bytes - copied) * factor),
            forward_bytes=fixed + round((self.forward_bytes - fixed) * factor),
            backward_bytes=fixed_in_backward + round((self.backward_bytes - fixed_in_backward) * factor),
        )


@dataclass(frozen=True)
class Value:
    """A tensor, or a group of tensors, that one node makes and later nodes use.

    Attributes:
        producer: Index of the node that makes the value.
        consumers: Indices of the nodes that use the value.
        bytes: Size of the value in bytes.
        gradient_bytes: Size of the value's gradient in bytes; 0 if no gradient flows back.
    """

    producer: int
    consumers: tuple[int, ...]
    bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Link:
    """The connection between two devices, in both directions.

    Attributes:
        bandwidth: Bytes per second.
        latency: Seconds from the start of a message to the arrival of its first byte.
        work: Seconds that the sender and the receiver each spend on a message, whatever the message's size. During this
            time they cannot compute.
        sum: Seconds that a step takes longer for a sum of a few numbers over the two devices, between computations. It
            includes the time in which the devices wait for each other. If it is shorter than two messages, as with
            the default, a sum takes the time of its messages.
        exchange: Seconds that a step takes longer if the two devices exchange small messages between computations. If
            it is shorter than a message, an exchange takes the time of a message.
    """

    bandwidth: float
    latency: float
    work: float = 0.0
    sum: float = 0.0
    exchange: float = 0.0

    def time(self, size: float) -> float:
        """Return the seconds until a message of ``size`` bytes has arrived.

        If ``size`` is 0, the time is 0, because no message is sent.
        """
        return self.latency + size / self.bandwidth if size else 0.0

    def all_reduce_time(self, size: float, members: int) -> float:
        """Return the seconds of a ring all-reduce of ``size`` bytes among ``members`` devices.

        With n members the ring takes 2 (n - 1) steps. In each step every member sends and receives size / n bytes. The
        time of ``sum`` beyond the two steps of two members is added once.

        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009).
        """
        if members < 2 or not size:
            return 0.0
        step = 2 * self.work + self.latency
        return max(0.0, self.sum - 2 * step) + 2 * (members - 1) * (step + size / members / self.bandwidth)

    def all_gather_time(self, size: float, members: int) -> float:
        """Return the seconds until each of ``members`` devices has the ``size`` bytes of each other device.

        The ring takes n - 1 steps. In each step every member sends and receives ``size`` bytes. The time of ``sum``
        beyond a sum's messages is added once, because backends start both operations in the same way.
        """
        if members < 2 or not size:
            return 0.0
        step = 2 * self.work + self.latency
        return max(0.0, self.sum - 2 * step) + (members - 1) * (step + size / self.bandwidth)

    def exchange_time(self) -> float:
        """Return the seconds of an exchange of small messages, without the time of their bytes."""
        return max(self.exchange, 2 * self.work + self.latency)


@dataclass(frozen=True)
class GraphCosts:
    """The costs of a network for one microbatch.

    Attributes:
        nodes: Costs of the nodes, in topological order. A cut before node c separates nodes ``[0, c)`` from
            ``[c, len(nodes))``.
        values: Values that pass between nodes.
        cut_positions: Indices of the nodes before which a cut is possible, ascending, each in ``[1, len(nodes) - 1]``.
        microbatch_size: Number of samples in the microbatch. If the microbatches of a step differ by one sample, this
            is the mean, for example 2.5.
        input_bytes: Bytes of the network's inputs.
        output_bytes: Bytes of the network's result; 0 if not known.
        loss_bytes: Bytes of the network's result in float32, in which autocast computes losses; 0 if this is not more
            than `output_bytes`, and without autocast.
        framework_bytes: Bytes that libraries have taken from the device's allocator for themselves.
    """

    nodes: tuple[NodeCost, ...]
    values: tuple[Value, ...]
    cut_positions: tuple[int, ...]
    microbatch_size: float
    input_bytes: int
    output_bytes: int = 0
    framework_bytes: int = 0
    loss_bytes: int = 0

    @cached_property
    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that would be sent to later stages over a cut directly before each node.

        Element i belongs to node i. The tuple has one more element at its end, with the value 0.
        """
        return self._crossing([value.bytes for value in self.values])

    @cached_property
    def sent_gradient_bytes(self) -> tuple[int, ...]:
        """Bytes of gradients that would be sent back over a cut directly before each node.

        Element i belongs to node i. The tuple has one more element at its end, with the value 0.
        """
        return self._crossing([value.gradient_bytes for value in self.values])

    @property
    def result_bytes(self) -> int:
        """Bytes of the network's result in the precision of the loss."""
        return max(self.output_bytes, self.loss_bytes)

    @cached_property
    def time(self) -> float:
        """Seconds of the whole network's forward and backward."""
        return sum(node.forward + node.backward for node in self.nodes)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of the network's inputs and of all tensors that autograd saves for the backward."""
        return self.input_bytes + sum(node.saved_bytes for node in self.nodes)

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters of the network."""
        return sum(node.parameter_bytes for node in self.nodes)

    @cached_property
    def of_parts(self) -> dict[tuple[str, int, int], Any]:
        """Results of the functions that :func:`kept_for_parts` decorates, by function and part."""
        return {}

    @cached_property
    def flowing_gradient_bytes(self) -> tuple[int, ...]:
        """For each node, bytes of the values' gradients that exist when the node's backward begins.

        These are the gradients of the node's own results, and of earlier results that a later node uses as well.
        """
        change = [0] * (len(self.nodes) + 1)
        for value in self.values:
            change[value.producer] += value.gradient_bytes
            change[max(value.consumers)] -= value.gradient_bytes
        return tuple(itertools.accumulate(change[:-1]))

    def _crossing(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return, for each node, the sum of ``sizes`` over the values that cross a cut directly before the node.

        A value crosses the cut if a node before the cut makes the value, and a node after the cut uses it.

        Args:
            sizes: A size for each value in ``values``.
        """
        change = [0] * (len(self.nodes) + 1)
        for value, size in zip(self.values, sizes, strict=True):
            change[value.producer + 1] += size
            change[max(value.consumers) + 1] -= size
        crossing, total = [], 0
        for step in change:
            total += step
            crossing.append(total)
        return tuple(crossing)


def kept_for_parts(function: Callable[[GraphCosts, int, int], T]) -> Callable[[GraphCosts, int, int], T]:
    """Decorate a function of the nodes ``[start, end)``, so that it computes once for equal arguments.

    Several searches among the layouts of a network ask for the same parts. The results are kept as long as the costs.
    """
    name = f"{function.__module__}.{function.__qualname__}"  # Unlike the undecorated function, it can be pickled.

    @functools.wraps(function)
    def kept(costs: GraphCosts, start: int, end: int) -> T:
        key = name, start, end
        if key not in costs.of_parts:
            costs.of_parts[key] = function(costs, start, end)
        result: T = costs.of_parts[key]
        return result

    return kept


@dataclass(frozen=True)
class Profile:
    """Costs of a network as a function of the number of samples.

    Attributes:
        costs: Costs for the largest number of samples that was measured.
        fixed: For each node, the part of the forward time and the part of the backward time, in seconds, that do not
            depend on the number of samples. The tuple is empty if only one batch size was measured. Times are then
            assumed to be proportional to the number of samples.
        batch_norm: Whether the network has BatchNorm, so that its training result depends on how a batch is divided.
        nodes_have_names: Whether the nodes have the names that ``fit`` gives them. False for a profile from a CSV file.
    """

    costs: GraphCosts
    fixed: tuple[tuple[float, float], ...] = ()
    batch_norm: bool = False
    nodes_have_names: bool = True

    def at(self, samples: float) -> GraphCosts:
        """Return the costs of the network for a number of samples, which need not be a whole number."""
        return _scaled(self, samples)


@functools.lru_cache(maxsize=256)
def _scaled(profile: Profile, samples: float) -> GraphCosts:
    costs = profile.costs
    factor = samples / costs.microbatch_size
    fixed = profile.fixed or ((0.0, 0.0),) * len(costs.nodes)
    nodes = tuple(
        replace(
            node.scaled(factor),
            forward=forward + (node.forward - forward) * factor,
            backward=backward + (node.backward - backward) * factor,
        )
        for node, (forward, backward) in zip(costs.nodes, fixed, strict=True)
    )
    values = tuple(
        replace(value, bytes=round(value.bytes * factor), gradient_bytes=round(value.gradient_bytes * factor))
        for value in costs.values
    )
    sizes = round(costs.input_bytes * factor), round(costs.output_bytes * factor)
    loss = round(costs.loss_bytes * factor)
    return GraphCosts(nodes, values, costs.cut_positions, samples, *sizes, costs.framework_bytes, loss)


def from_two_sizes(large: GraphCosts, small: GraphCosts, batch_norm: bool) -> Profile:
    """Return a profile from measurements of the same network with two batch sizes.

    The time of every node is modelled as ``fixed + rate * samples``. The measured times are noisy, so ``fixed`` is
    limited to the range from 0 to the time of the large batch.

    Args:
        large: Costs for the large batch.
        small: Costs for the small batch.
        batch_norm: Whether the network has BatchNorm.
    """
    # Libraries take their memory once, in the first measurement.
    large = replace(large, framework_bytes=max(large.framework_bytes, small.framework_bytes))
    ratio = small.microbatch_size / large.microbatch_size
    if ratio == 1:
        return Profile(large, batch_norm=batch_norm)

    def fixed(large_time: float, small_time: float) -> float:
        return min(max(0.0, (small_time - ratio * large_time) / (1 - ratio)), large_time)

    pairs = zip(large.nodes, small.nodes, strict=True)
    times = tuple(
        (fixed(large_node.forward, small_node.forward), fixed(large_node.backward, small_node.backward))
        for large_node, small_node in pairs
    )
    return Profile(large, times, batch_norm)


def digits(value: float, count: int = 3) -> str:
    """Return a number as text with ``count`` significant digits, without an exponent."""
    rounded = float(f"{value:.{count}g}")
    return f"{rounded:.0f}" if rounded >= 10 ** (count - 1) else f"{rounded:g}"


def format_bytes(size: float) -> str:
    """Return a size with a unit, such as 1.5 MiB. The text has at most 8 characters for sizes up to a terabyte."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.1f} {unit}" if size < 10 and unit != "B" else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB" if size < 10 else f"{size:.0f} GiB"
