"""What a network costs for any number of samples, from one or two measured batch sizes."""

import functools
from dataclasses import dataclass, replace

from cnnstrategies.planning.costs import GraphCosts


@dataclass(frozen=True)
class Profile:
    """Costs of a network's nodes.

    Attributes:
        costs: For the batch that was measured.
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
