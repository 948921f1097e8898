"""What can be chosen, what it changes, and what is predicted of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import NormalDist
from typing import Any, Literal

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.cluster import Cluster, Failures
from cnnstrategies.planning.costs import Profile

Bottleneck = Literal["compute", "nic", "link", "server", "fill", "straggler"]
Checkpointing = Literal["never", "except_last", "always"]  # As the pipeline has it, whose module imports torch.


class Effect(IntEnum):
    """What a choice changes of what is learned, beside DDP with the same global batch."""

    NONE = 0
    ROUNDING = 1
    LEARNING = 2


@dataclass(frozen=True)
class Candidate:
    """A strategy with its options.

    Attributes:
        family: ``ddp``, ``hybrid``, ``parameter_server``, ...
        options: What the strategy is given.
        effect: What it changes of what is learned.
        devices: How many it uses.
        samples: Of a step, over all devices.
    """

    family: str
    options: Mapping[str, Any]
    effect: Effect
    devices: int
    samples: int

    def __str__(self) -> str:
        shown = [name for name in ("replicas", "sync_every", "staleness") if name in self.options]
        text = " ".join([self.family, *(f"{self.options[name]}" for name in shown)])
        short = {"microbatches": "M", "accumulate_grad_batches": "accumulated"}
        more = [f"{short[name]}={self.options[name]}" for name in short if self.options.get(name, 1) != 1]
        return ", ".join([text, *more])


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a candidate.

    Attributes:
        step: Seconds in which as many samples as a step has are trained on.
        samples: Of a step.
        sent_bytes: Bytes that all devices together send for a step.
        memory: Bytes that the fullest device holds.
        bottleneck: What a step mostly waits for.
        staleness: Steps by which a gradient is older than the weights that it is applied to, in the mean.
        goodput: Share of the time that failures leave.
    """

    step: float
    samples: int
    sent_bytes: int
    memory: int
    bottleneck: Bottleneck
    staleness: float = 0.0
    goodput: float = 1.0

    @property
    def rate(self) -> float:
        """Samples per second, without failures."""
        return self.samples / self.step


@dataclass(frozen=True)
class Job:
    """What is planned for.

    Attributes:
        profile: The network.
        cluster: The machines.
        samples: Of a step, over all devices.
        microbatches: Of a hybrid pipeline; chosen when None.
        replicas: Of a hybrid pipeline's stages; chosen when None.
        cuts: Of a hybrid pipeline; chosen when None.
        schedule: Of a hybrid pipeline.
        activation_checkpointing: Of a hybrid pipeline.
        run_ahead: Of a hybrid pipeline; chosen when None.
        state_copies: Copies of the parameters that training holds.
        memory_limit: Bytes that a device may hold, beside what the cluster says.
        families: The families to look at; all when empty.
    """

    profile: Profile
    cluster: Cluster
    samples: int
    microbatches: int | None = None
    replicas: tuple[int, ...] | None = None
    cuts: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    activation_checkpointing: Checkpointing = "never"
    run_ahead: bool | None = None
    state_copies: int = 4
    memory_limit: int | None = None
    families: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigurationError(f"batch_size={self.samples}: a step needs at least 1 sample")

    @property
    def memory(self) -> int | None:
        """Bytes that a device may hold."""
        return min((one for one in (self.memory_limit, self.cluster.memory) if one is not None), default=None)

    def share(self, devices: int) -> int:
        """Samples of a step when each device has an equal number of them: as many as asked, or a few less."""
        return self.samples // devices * devices


def finished(
    job: Job, candidate: Candidate, made: Prediction, waits: bool = True, survives: bool = False
) -> Prediction:
    """A prediction with stragglers and failures."""
    slowed = slowed_by_stragglers(job.cluster, candidate.devices) if waits else 1.0
    return Prediction(
        step=made.step * slowed,
        samples=made.samples,
        sent_bytes=made.sent_bytes,
        memory=made.memory,
        bottleneck="straggler" if slowed > 1.25 and made.bottleneck == "compute" else made.bottleneck,
        staleness=made.staleness,
        goodput=goodput(job.cluster.failures, candidate.devices, survives),
    )


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
