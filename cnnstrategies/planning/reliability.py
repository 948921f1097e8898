"""What stragglers, failures and prices make of a predicted step."""

import math
from statistics import NormalDist

from cnnstrategies.planning.cluster import Cluster, Failures


def slowed_by_stragglers(cluster: Cluster, devices: int) -> float:
    """How many times as long a step takes when all wait for the slowest of some devices.

    A step's time varies from device to device with the cluster's jitter as its standard deviation; the expected maximum
    of n normal numbers is near their quantile (n - 3/8) / (n + 1/4) (Blom, 1958).
    """
    if devices < 2:
        return 1.0
    return 1 + cluster.jitter * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def checkpoint_interval(checkpoint: float, mtbf: float) -> float:
    """Seconds of work between two checkpoints with the least time lost.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), equation 37.

    Args:
        checkpoint: Seconds to write one.
        mtbf: Mean seconds between two failures of the whole run.
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    part = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint


def goodput(failures: Failures | None, devices: int, survives: bool = False) -> float:
    """Share of the time that is training which is not lost again.

    Args:
        failures: How often devices fail; None for never.
        devices: Of the run.
        survives: Whether the others train on when a device fails, so that only its own share is lost until it is back.
    """
    if failures is None:
        return 1.0
    if survives:
        return 1 / (1 + failures.restart / failures.device_mtbf)
    mtbf = failures.device_mtbf / devices
    work = checkpoint_interval(failures.checkpoint, mtbf)
    exponent = (work + failures.checkpoint) / mtbf
    if exponent > 500 or failures.restart / mtbf > 500:
        return 0.0
    return work / (mtbf * math.exp(failures.restart / mtbf) * math.expm1(exponent))


def price_per_hour(cluster: Cluster, devices: int) -> float:
    """Of the machines that so many devices, the last ones, are in."""
    return sum(host.price for host in cluster.taken(devices).hosts)
