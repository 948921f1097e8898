"""Random networks, links and jobs, small enough that all layouts can be tried; and networks of known costs."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import GraphCosts, Link, NodeCost, Profile, Value
from cnnstrategies.planning.predict import Predictor

MOST_NODES = 6  # on machines with several devices, where there are more layouts


def chain(
    times: Sequence[float],
    sent: int = 1,
    parameters: Sequence[int] | None = None,
    saved: int = 0,
    samples: int = 1,
    input_bytes: int = 0,
) -> GraphCosts:
    """Nodes one after another, of which the backward takes twice as long as the forward."""
    nodes = [
        NodeCost(f"n{index}", time / 3, 2 * time / 3, parameters[index] if parameters else 0, saved)
        for index, time in enumerate(times)
    ]
    values = [Value(index, (index + 1,), sent, sent) for index in range(len(times) - 1)]
    return GraphCosts(tuple(nodes), tuple(values), tuple(range(1, len(times))), samples, input_bytes)


def random_costs(rng: random.Random) -> GraphCosts:
    """A chain of 5 to 9 nodes with up to two skips, times over two and sizes over three orders of magnitude."""
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
    """For costs of a microbatch, on equal devices or on a cluster."""
    cluster = network if isinstance(network, Cluster) else Cluster.flat(devices, network)
    samples = round(costs.microbatch_size * microbatches)
    return Predictor(Job(Profile(costs), cluster, samples, microbatches, **{"state_copies": 3, **fixed}))


def all_layouts(of: Predictor) -> Iterator[Layout]:
    job, devices, microbatches = of.job, of.job.cluster.devices, of.problem.microbatches
    for count in [job.stages] if job.stages else range(1, devices + 1):
        for replicas in [job.replicas] if job.replicas else compositions(devices, count):
            if max(replicas) <= microbatches:
                for cuts in itertools.combinations(of.costs.cut_positions, len(replicas) - 1):
                    yield Layout(cuts, replicas)


def random_link(rng: random.Random) -> Link:
    return Link(bandwidth=rng.choice([1e7, 1e8, 1e9, 1e10]), latency=rng.choice([0, 1e-4, 1e-3]))


def random_question(rng: random.Random) -> Predictor:
    """Up to four devices, the same link between any two."""
    costs, link = random_costs(rng), random_link(rng)
    devices, microbatches = rng.choice([2, 3, 4]), rng.choice([2, 4, 6, 8])
    fixed: dict[str, Any] = {"schedule": rng.choice(["gpipe", "1f1b"])}
    kind = rng.choice(["free", "stages", "replicas"])
    stages = rng.randrange(1, devices + 1)
    if kind == "stages" and stages * microbatches >= devices:
        fixed["stages"] = stages
    if kind == "replicas" and stages * microbatches >= devices:
        fixed["replicas"] = rng.choice([one for one in compositions(devices, stages) if max(one) <= microbatches])
    return predictor(costs, link, devices, microbatches, **fixed)


def with_unequal_devices(of: Predictor, rng: random.Random) -> Predictor:
    """The same question for devices of which some are slower."""
    hosts = tuple(replace(host, speed=rng.choice([0.25, 0.6, 1.0, 1.0])) for host in of.job.cluster.hosts)
    return Predictor(replace(of.job, cluster=Cluster(hosts)))


def random_question_on_machines(rng: random.Random) -> Predictor:
    """Two machines of four devices, of which the first may be half as fast."""
    costs = random_costs(rng)
    while len(costs.nodes) > MOST_NODES:
        costs = random_costs(rng)
    inside = Link(1e10, 1e-5)
    first = Host(4, random_link(rng), inside, speed=rng.choice([0.5, 1.0, 1.0]))
    cluster = Cluster((first, Host(4, random_link(rng), inside)))
    return predictor(costs, cluster, 8, rng.choice([8, 12]), schedule=rng.choice(["gpipe", "1f1b"]))


def excess(of: Predictor) -> float:
    """The predicted time of what the search finds over that of the best of all layouts."""
    found = of.search()
    assert found is not None
    layouts = list(all_layouts(of))
    assert found in layouts, "what is asked for, with no more replicas of a stage than microbatches"
    own = best = of.time(found)
    for layout in layouts:
        if of.problem.bound(layout) < best:  # Else it cannot be better: that bounds hold has a test of its own.
            best = min(best, of.time(layout))
    return own / best
