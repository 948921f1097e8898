"""The order in which the ranks of a machine use unequal devices."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.devices import Device
from cnnstrategies.planning.rank import NothingFitsError, Ranking, rank

MOST_ORDERS = 6  # Largest number of orders that are compared.


def rank_in_best_order(job: Job) -> Ranking:
    """Rank the strategies with the order of the devices in which the best plan is fastest.

    In a pipeline the first device runs the first stage, so a device with little memory may be too small in one place
    and sufficient in another. Only orders of groups of equal devices are compared. The given order is kept if the
    devices are on several machines, if the job sets replicas or shares, and if no other order is faster.

    Raises:
        NothingFitsError: No candidate fits in any order.
    """
    if len(job.cluster.hosts) > 1 or job.replicas is not None or job.shares is not None:
        return rank(job)
    (host,) = job.cluster.hosts
    rankings = []
    for order in orders(host.each):
        devices = [host.each[device] for device in order]
        ordered = replace(job, cluster=Cluster.connected(devices, host.inside))
        with contextlib.suppress(NothingFitsError):
            rankings.append(replace(rank(ordered), order=order))
    if not rankings:
        return rank(job)  # Raises the error for the given order.
    # Plans with the same training result come first, as in a ranking. The given order is the first of equal ones.
    return min(rankings, key=lambda ranking: (not ranking.same, ranking.best.step))


def orders(devices: Sequence[Device]) -> Iterator[tuple[int, ...]]:
    """Yield orders of devices in which equal neighbours stay together, at most `MOST_ORDERS`, the given order first."""
    groups = [
        [number for number, _ in group] for _, group in itertools.groupby(enumerate(devices), lambda pair: pair[1])
    ]
    known = set()
    for groups_in_order in itertools.permutations(groups):
        order = tuple(itertools.chain(*groups_in_order))
        key = tuple(devices[device] for device in order)
        if key not in known:
            known.add(key)
            yield order
        if len(known) == MOST_ORDERS:
            return
