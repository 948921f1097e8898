"""What sums of gradients over devices cost, and how much of them the backward hides."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cnnstrategies.planning.cluster import Cluster, slower

BUCKET_BYTES = 25 * 2**20  # that the pipeline reduces at once, as DistributedDataParallel
FIRST_BUCKET_BYTES = 2**20  # of DistributedDataParallel

Time = Callable[[float], float]


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced at once.

    Attributes:
        ready: Seconds from the backward's start until the last of them is there.
        bytes: Their size.
    """

    ready: float
    bytes: float


def all_reduce(cluster: Cluster, first: int, count: int) -> Time:
    """Seconds of an all-reduce of so many bytes over devices that are numbered one after another."""
    if count < 2:
        return lambda size: 0.0
    hosts = cluster.host_of[first : first + count]
    rings = cluster.rings if len(set(hosts)) > 1 else 1
    if cluster.all_reduce == "flat" or len(set(hosts)) == 1:
        ring = cluster.ring(first, count)
        return lambda size: ring.all_reduce_time(size * rings, count)
    inside = slower([cluster.hosts[host].inside for host in set(hosts)])
    between = slower([cluster.hosts[host].network for host in set(hosts)])
    most = max(hosts.count(host) for host in set(hosts))
    return lambda size: inside.all_reduce_time(size, most) + between.all_reduce_time(size * rings, len(set(hosts)))


def buckets(gradients: Iterable[tuple[float, int]], size: int = BUCKET_BYTES, first: int | None = None) -> list[Bucket]:
    """Gather gradients, in the order in which the backward makes them.

    Args:
        gradients: When each is ready, in seconds from the backward's start, and its bytes.
        size: Bytes with which a bucket is full.
        first: The same of the first bucket.
    """
    found: list[Bucket] = []
    gathered, limit, last = 0, first or size, 0.0
    for ready, count in gradients:
        if not count:
            continue
        gathered, last = gathered + count, ready
        if gathered >= limit:
            found.append(Bucket(ready, gathered))
            gathered, limit = 0, size
    return [*found, Bucket(last, gathered)] if gathered else found


def uniform(backward: float, size: int, bucket_bytes: int) -> list[Bucket]:
    """Buckets of gradients of which nothing is known but their bytes: as if the backward made them evenly."""
    if not size:
        return []
    count = -(-size // bucket_bytes)
    return [Bucket(backward * (index + 1) / count, size / count) for index in range(count)]


def reduced_at(parts: Sequence[Bucket], backward: float, time: Time) -> float:
    """When the backward and the reductions have ended, in seconds from the backward's start.

    c_k = max(c_{k-1}, r_k) + A(s_k): a bucket is reduced when it is ready and the one before it is done.
    """
    end = 0.0
    for part in parts:
        end = max(end, part.ready) + time(part.bytes)
    return max(end, backward)
