"""The order in which the ranks of a machine use unequal devices."""

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.devices import Device
from cnnstrategies.planning.largest_batch import Largest, largest_of
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
    rankings = []
    for order, ordered in _in_each_order(job):
        with contextlib.suppress(NothingFitsError):
            rankings.append(replace(rank(ordered), order=order))
    if not rankings:
        return rank(job)  # Raises the error for the given order.
    # Plans with the same training result come first, as in a ranking. The given order is the first of equal ones.
    return min(rankings, key=lambda ranking: (not ranking.same, ranking.best.step))


def largest_in_best_order(
    job: Job, families: Collection[str], most: int, any_order: bool = True
) -> tuple[Largest, Job, tuple[int, ...]] | None:
    """Return the largest batch that fits in any order of the devices, the job with this order, and the order.

    The result is None if no batch fits. The first arguments are those of :func:`.largest_of`. The given order is kept
    as in :func:`rank_in_best_order`.

    Args:
        job: Network and devices.
        families: Names of strategies.
        most: Largest number of samples of a step.
        any_order: Whether the ranks may use the devices in another order than the given one, which is then empty.
    """
    best: tuple[Largest, Job, tuple[int, ...]] | None = None
    for order, ordered in _in_each_order(job) if any_order else [((), job)]:
        largest = largest_of(ordered, families, most, more_than=best[0].samples if best else 0)
        best = best if largest is None else (largest, ordered, order)
    return best


def _in_each_order(job: Job) -> Iterator[tuple[tuple[int, ...], Job]]:
    """Yield orders of the devices, and the job with these orders, the given order first; empty if it must be kept."""
    if len(job.cluster.hosts) > 1 or job.replicas is not None or job.shares is not None:
        yield (), job
        return
    (host,) = job.cluster.hosts
    for order in orders(host.each):
        devices = [host.each[device] for device in order]
        yield order, replace(job, cluster=Cluster.connected(devices, host.inside))


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
