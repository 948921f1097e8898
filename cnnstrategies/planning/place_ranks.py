"""Which rank is on which machine: stage by stage, or pipeline by pipeline."""

from dataclasses import replace
from math import gcd

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.pipeline.timetable import Order, Placement
from cnnstrategies.planning.cluster import Cluster, Host


def orders(cluster: Cluster, layout: Layout) -> list[Order]:
    """The ways to number the ranks that make a difference.

    Args:
        cluster: The machines.
        layout: Stages and replicas.
    """
    several = len(cluster.hosts) > 1 and any(host.devices > 1 for host in cluster.hosts)
    if several and len(layout.replicas) > 1 and gcd(*layout.replicas) > 1:
        return ["stages", "replicas"]
    return ["stages"]


def placed(cluster: Cluster, layout: Layout, order: Order) -> Cluster:
    """The devices that a layout takes, in the order of its stages.

    Args:
        cluster: The machines.
        layout: Stages and replicas.
        order: How ranks are numbered, which are handed out machine by machine.
    """
    taken = cluster.taken(layout.devices)
    if order == "stages":
        return taken
    placement = Placement(layout.replicas, order)
    ranks = [placement.ranks(stage) for stage in range(placement.stages)]
    crossing = [len({taken.host_of[rank] for rank in of_stage}) > 1 for of_stage in ranks]
    return taken.renumbered([rank for of_stage in ranks for rank in of_stage], max(1, sum(crossing)))


def one_machine(cluster: Cluster) -> Cluster | None:
    """All devices as if they were in one machine: what a pipeline sees that has all of its stages in one.

    Returns:
        It; None where that is no other question.
    """
    first = cluster.hosts[0]
    if len(cluster.hosts) == 1 or first.devices == 1 or any(host != first for host in cluster.hosts):
        return None
    if first.inside.bandwidth <= first.network.bandwidth:
        return None
    return replace(cluster, hosts=(replace(first, devices=cluster.devices),), _memo={})


def one_of_equal(cluster: Cluster, replicas: tuple[int, ...], beside: int) -> Cluster:
    """The devices of the first of some equal pipelines beside each other, with its share of what they share."""
    if beside == 1:
        return cluster
    first = 0
    members: list[int] = []
    for count in replicas:
        members += range(first, first + count, beside)
        first += count
    machines = [cluster.host_of[member] for member in members]
    hosts: list[Host] = []
    for number in dict.fromkeys(machines):
        host = cluster.hosts[number]
        count = machines.count(number)
        hosts.append(replace(host, devices=count, shared=host.devices / count))
    by_machine = sorted(range(len(members)), key=lambda index: list(dict.fromkeys(machines)).index(machines[index]))
    numbering = [by_machine.index(index) for index in range(len(members))] if cluster.numbering else ()
    return replace(cluster, hosts=tuple(hosts), numbering=tuple(numbering), _memo={})
