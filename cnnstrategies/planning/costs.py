"""What a network's nodes and the links between devices cost: the planner's only input."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class NodeCost:
    """The cost of one node of the traced network for one microbatch; times are in seconds.

    Attributes:
        backward: Backward time in seconds, with the addition to the parameters' gradients.
        saved_bytes: Bytes that the node makes and that are kept until the backward, by itself or by the nodes
            that use them.
    """

    name: str
    forward: float
    backward: float
    parameter_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True)
class Value:
    """A tensor (or a group of tensors) that one node makes and later nodes use.

    Attributes:
        gradient_bytes: Size of its gradient; 0 where none flows back.
    """

    producer: int
    consumers: tuple[int, ...]
    bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Link:
    """The connection between two devices; every device has one port in each direction.

    Attributes:
        bandwidth: Bytes per second.
        latency: Seconds from the start of a message to the arrival of its first byte.
        work: Seconds of the device itself that a message costs who sends and who receives it, whatever its size.
    """

    bandwidth: float
    latency: float
    work: float = 0.0

    def time(self, size: float) -> float:
        """Seconds in which ``size`` bytes arrive; 0 bytes cost nothing, since nothing is sent."""
        return self.latency + size / self.bandwidth if size else 0.0

    def all_reduce_time(self, size: float, members: int) -> float:
        """Seconds of a ring all-reduce of ``size`` bytes: 2 (n - 1) steps of size / n bytes, sent and received.

        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (2009).
        """
        if members < 2 or not size:
            return 0.0
        return 2 * (members - 1) * (2 * self.work + self.latency + size / members / self.bandwidth)


@dataclass(frozen=True)
class GraphCosts:
    """The costs of a network in topological order.

    Attributes:
        nodes: A cut at position c separates nodes ``[0, c)`` from ``[c, len(nodes))``.
        cut_positions: Where a cut is possible, ascending, each in ``[1, len(nodes) - 1]``.
        microbatch_size: Samples for which the costs hold; a mean where microbatches differ by one.
    """

    nodes: tuple[NodeCost, ...]
    values: tuple[Value, ...]
    cut_positions: tuple[int, ...]
    microbatch_size: float
    input_bytes: int

    @cached_property
    def sent_bytes(self) -> tuple[int, ...]:
        """For each position the bytes of all values that are made before it and used at or after it."""
        return self._crossing([value.bytes for value in self.values])

    @cached_property
    def sent_gradient_bytes(self) -> tuple[int, ...]:
        """For each position the bytes of the gradients that flow back over it."""
        return self._crossing([value.gradient_bytes for value in self.values])

    @cached_property
    def time(self) -> float:
        """Seconds of the whole network's forward and backward."""
        return sum(node.forward + node.backward for node in self.nodes)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes that are kept until the backward."""
        return self.input_bytes + sum(node.saved_bytes for node in self.nodes)

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(node.parameter_bytes for node in self.nodes)

    def _crossing(self, sizes: Sequence[int]) -> tuple[int, ...]:
        change = [0] * (len(self.nodes) + 1)
        for value, size in zip(self.values, sizes, strict=True):
            change[value.producer + 1] += size
            change[max(value.consumers) + 1] -= size
        crossing, total = [], 0
        for step in change:
            total += step
            crossing.append(total)
        return tuple(crossing)


@dataclass(frozen=True)
class Profile:
    """Costs of a network's nodes.

    Attributes:
        fixed: Seconds of each node's forward and backward that do not depend on the samples; empty where only one
            batch size was measured, and time is taken to be proportional to the samples.
        batch_norm: Whether the result depends on how the batch is divided.
        nodes_have_names: Whether ``fit`` knows the nodes by their names.
    """

    costs: GraphCosts
    fixed: tuple[tuple[float, float], ...] = ()
    batch_norm: bool = False
    nodes_have_names: bool = True

    def at(self, samples: float) -> GraphCosts:
        """The costs for so many samples."""
        return _scaled(self, samples)


@functools.lru_cache(maxsize=256)
def _scaled(profile: Profile, samples: float) -> GraphCosts:
    costs = profile.costs
    factor = samples / costs.microbatch_size
    fixed = profile.fixed or ((0.0, 0.0),) * len(costs.nodes)
    nodes = tuple(
        replace(
            node,
            forward=forward + (node.forward - forward) * factor,
            backward=backward + (node.backward - backward) * factor,
            saved_bytes=round(node.saved_bytes * factor),
        )
        for node, (forward, backward) in zip(costs.nodes, fixed, strict=True)
    )
    values = tuple(
        replace(value, bytes=round(value.bytes * factor), gradient_bytes=round(value.gradient_bytes * factor))
        for value in costs.values
    )
    return GraphCosts(nodes, values, costs.cut_positions, samples, round(costs.input_bytes * factor))


def from_two_sizes(large: GraphCosts, small: GraphCosts, batch_norm: bool) -> Profile:
    """A profile from two measurements of the same network: time = a + c samples for every node.

    Where noise has made the small batch slower than the line allows, a is between 0 and the large batch's time.
    """
    ratio = small.microbatch_size / large.microbatch_size
    if ratio == 1:
        return Profile(large, batch_norm=batch_norm)

    def fixed(large_time: float, small_time: float) -> float:
        return min(max(0.0, (small_time - ratio * large_time) / (1 - ratio)), large_time)

    pairs = zip(large.nodes, small.nodes, strict=True)
    times = tuple((fixed(one.forward, two.forward), fixed(one.backward, two.backward)) for one, two in pairs)
    return Profile(large, times, batch_norm)


def digits(value: float, count: int = 3) -> str:
    """With so many digits that count, and not as a power of ten, as which nobody reads milliseconds."""
    rounded = float(f"{value:.{count}g}")
    return f"{rounded:.0f}" if rounded >= 10 ** (count - 1) else f"{rounded:g}"


def format_bytes(size: float) -> str:
    """A size with a unit, in 8 characters at most up to a terabyte: 1.5 MiB, 224 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.1f} {unit}" if size < 10 and unit != "B" else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB" if size < 10 else f"{size:.0f} GiB"
