"""Random networks, links and jobs, small enough to try all layouts; and networks of known costs."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import GraphCosts, Link, NodeCost, Profile, Value
from cnnstrategies.planning.devices import Device
from cnnstrategies.planning.predict import Predictor

MOST_NODES = 6  # For clusters of several devices per machine, which allow more layouts.


def chain(
    times: Sequence[float],
    sent: int = 1,
    parameters: Sequence[int] | None = None,
    saved: int = 0,
    samples: int = 1,
    input_bytes: int = 0,
) -> GraphCosts:
    """Return a chain of nodes whose backward takes twice as long as their forward.

    Args:
        times: Seconds of each node, forward and backward together.
        sent: Bytes of the activations between two nodes.
        parameters: Bytes of each node's parameters; without this argument nodes have no parameters.
        saved: Bytes that each node saves for its backward.
        samples: Samples of a microbatch.
        input_bytes: Bytes of the microbatch's images.
    """
    nodes = [
        NodeCost(f"n{index}", time / 3, 2 * time / 3, parameters[index] if parameters else 0, saved)
        for index, time in enumerate(times)
    ]
    values = [Value(index, (index + 1,), sent, sent) for index in range(len(times) - 1)]
    return GraphCosts(tuple(nodes), tuple(values), tuple(range(1, len(times))), samples, input_bytes)


def random_costs(rng: random.Random) -> GraphCosts:
    """Return a chain of 5 to 9 nodes with up to two skip connections.

    Times range over two orders of magnitude, sizes over three.
    """
    size = rng.randrange(5, 10)
    nodes = []
    for index in range(size):
        forward = rng.choice([1e-4, 1e-3, 3e-3, 1e-2]) * rng.uniform(0.5, 1.5)
        parameters = int(rng.choice([0, 1e4, 1e6, 2e7]) * rng.random())
        nodes.append(NodeCost(f"n{index}", forward, forward * rng.uniform(1, 3), parameters, int(1e6 * rng.random())))
    values = []
    for index in range(size - 1):
        sent = int(rng.choice([1e3, 1e5, 1e6]) * rng.random())
        values.append(Value(index, (index + 1,), sent, sent))
    for _ in range(rng.randrange(3)):
        start = rng.randrange(size - 2)
        sent = int(1e5 * rng.random())
        values.append(Value(start, (rng.randrange(start + 2, size),), sent, sent))
    return GraphCosts(tuple(nodes), tuple(values), tuple(range(1, size)), microbatch_size=1, input_bytes=1000)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(1, total), parts - 1):
        yield tuple(right - left for left, right in itertools.pairwise((0, *bars, total)))


def predictor(costs: GraphCosts, network: Link | Cluster, devices: int, microbatches: int, **fixed: Any) -> Predictor:
    """Return a predictor for the costs of a microbatch, on equal devices or on a cluster."""
    cluster = network if isinstance(network, Cluster) else Cluster.flat(devices, network)
    samples = round(costs.microbatch_size * microbatches)
    return Predictor(Job(Profile(costs), cluster, samples, microbatches, **{"state_copies": 3, **fixed}))


def all_layouts(planner: Predictor) -> Iterator[Layout]:
    job, devices, microbatches = planner.job, planner.job.cluster.devices, planner.problem.microbatches
    for count in [job.stages] if job.stages else range(1, devices + 1):
        for replicas in [job.replicas] if job.replicas else compositions(devices, count):
            if max(replicas) <= microbatches:
                for cuts in itertools.combinations(planner.costs.cut_positions, len(replicas) - 1):
                    yield Layout(cuts, replicas)


def random_link(rng: random.Random) -> Link:
    return Link(bandwidth=rng.choice([1e7, 1e8, 1e9, 1e10]), latency=rng.choice([0, 1e-4, 1e-3]))


def random_question(rng: random.Random) -> Predictor:
    """Return a predictor for a random job on up to four devices, with equal links between all devices."""
    costs, link = random_costs(rng), random_link(rng)
    devices, microbatches = rng.choice([2, 3, 4]), rng.choice([2, 4, 6, 8])
    fixed: dict[str, Any] = {"schedule": rng.choice(["gpipe", "1f1b"])}
    kind = rng.choice(["free", "stages", "replicas"])
    stages = rng.randrange(1, devices + 1)
    if kind == "stages" and stages * microbatches >= devices:
        fixed["stages"] = stages
    if kind == "replicas" and stages * microbatches >= devices:
        fixed["replicas"] = rng.choice(
            [counts for counts in compositions(devices, stages) if max(counts) <= microbatches]
        )
    return predictor(costs, link, devices, microbatches, **fixed)


def with_unequal_devices(planner: Predictor, rng: random.Random) -> Predictor:
    """Return a predictor for the same job on devices with random speeds."""
    hosts = tuple(replace(host, speed=rng.choice([0.25, 0.6, 1.0, 1.0])) for host in planner.job.cluster.hosts)
    return Predictor(replace(planner.job, cluster=Cluster(hosts)))


def random_question_on_machines(rng: random.Random) -> Predictor:
    """Return a predictor for a random job on two machines of four devices; the first machine may be half as fast."""
    costs = random_costs(rng)
    while len(costs.nodes) > MOST_NODES:
        costs = random_costs(rng)
    inside = Link(1e10, 1e-5)
    first = Host(4, random_link(rng), inside, speed=rng.choice([0.5, 1.0, 1.0]))
    cluster = Cluster((first, Host(4, random_link(rng), inside)))
    return predictor(costs, cluster, 8, rng.choice([8, 12]), schedule=rng.choice(["gpipe", "1f1b"]))


def excess(planner: Predictor) -> float:
    """Return the predicted time of the search's layout, divided by the time of the best of all layouts."""
    layout_found = planner.search()
    assert layout_found is not None
    layouts = list(all_layouts(planner))
    assert layout_found in layouts, "the layout must satisfy the job's options, with at most one replica per microbatch"
    search_time = best = planner.time(layout_found)
    for layout in layouts:
        if planner.problem.bound(layout) < best:  # Otherwise the layout cannot be better; another test checks bounds.
            best = min(best, planner.time(layout))
    return search_time / best


def with_unequal_memories(planner: Predictor, rng: random.Random) -> Predictor:
    """Return a predictor for the same job on devices with random speeds and memories, of which some are too small.

    The memories are drawn from the memory that random layouts need, so that some layouts fit and others do not.
    """
    layouts = list(all_layouts(planner))
    needed = [
        memory
        for layout in rng.sample(layouts, min(6, len(layouts)))
        for memory in planner.device_memory(layout, planner.job.run_ahead or False)
    ]
    devices = tuple(
        Device(rng.choice([0.25, 0.6, 1.0, 1.0]), rng.choice([None, *(int(size * 1.02) for size in needed)]))
        for _ in range(planner.job.cluster.devices)
    )
    cluster = Cluster.connected(devices, planner.job.cluster.hosts[0].inside)
    return Predictor(replace(planner.job, cluster=cluster))


def best_of_all(planner: Predictor) -> float:
    """Return the least predicted time of all layouts with all numbers of microbatches of each device.

    The time is infinite if none of them fits into memory.
    """
    best = inf
    for layout in all_layouts(planner):
        deals = [compositions(planner.problem.microbatches, count) for count in layout.replicas]
        for counts in itertools.product(*deals):
            shares = tuple(itertools.chain(*counts))
            shared = Predictor(replace(planner.job, shares=shares))
            if shared.problem.bound(layout) < best:
                best = min(best, shared.time(layout))
    return best
