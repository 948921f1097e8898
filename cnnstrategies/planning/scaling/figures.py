"""Measurements of a training on one device and on several: seconds of a step's parts, and rates of the parts alone."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cnnstrategies.planning.costs import digits

COMPUTE = ("forward", "backward", "optimizer")
# Beginnings of the names of a step's parts outside of the network; the name of the callback or logger follows.
CALLBACK, LOGGER = "callback ", "logger "
LARGER = 4  # A batch this many times as large is tried, to see whether the batches are too small for a device.


def ms(seconds: float, count: int = 3) -> str:
    """Return seconds as a text in milliseconds, with ``count`` significant digits."""
    return digits(1e3 * seconds, count)


@dataclass(frozen=True)
class Rank:
    """The parts of a rank's step.

    Attributes:
        samples: Samples of the rank's batch.
        parts: Seconds of each part by its name. The parts add up to the step.
        waiting: Names of the parts in which the rank waits for other ranks.
    """

    samples: float
    parts: Mapping[str, float]
    waiting: Sequence[str] = ()

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def compute(self) -> float:
        """Seconds of the network and the optimizer's update."""
        return sum(self.parts.get(name, 0.0) for name in COMPUTE)

    @property
    def waits(self) -> float:
        """Seconds in which the rank waits for other ranks."""
        return sum(self.parts.get(name, 0.0) for name in self.waiting)

    def beside(self, kind: str) -> dict[str, float]:
        """Return the seconds of each callback or logger by its name.

        Args:
            kind: `CALLBACK` or `LOGGER`.
        """
        return {name.removeprefix(kind): value for name, value in self.parts.items() if name.startswith(kind)}


@dataclass(frozen=True)
class MeasuredRun:
    """The measurement of a training on a number of devices.

    Attributes:
        ranks: Parts of a step of each rank.
        rates: Samples/s of all devices together in each round.
    """

    ranks: Sequence[Rank]
    rates: Sequence[float]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.ranks)

    @property
    def samples(self) -> float:
        """Samples of a step, over all devices."""
        return sum(rank.samples for rank in self.ranks)

    @property
    def step(self) -> float:
        """Seconds of a step, as the mean of the ranks."""
        return statistics.mean(rank.step for rank in self.ranks)

    @property
    def rate(self) -> float:
        """Samples/s of all devices together, as the median of the rounds."""
        return statistics.median(self.rates)

    @property
    def slowest(self) -> Rank:
        """The rank for which the other ranks wait: it waits least."""
        return min(self.ranks, key=lambda rank: rank.waits)

    @property
    def waiting(self) -> float:
        """Mean seconds of a step in which a rank waits for the slowest rank."""
        return statistics.mean(rank.waits for rank in self.ranks) - self.slowest.waits


@dataclass(frozen=True)
class Sample:
    """The time in which one sample is loaded.

    Attributes:
        seconds: Seconds in which one thread loads a sample.
        processor: Part of these seconds in which the thread computes or waits for a core.
        two: Seconds in which each of two threads loads a sample at the same time.
    """

    seconds: float
    processor: float
    two: float


@dataclass(frozen=True)
class EpochCosts:
    """The costs of an epoch in addition to its steps.

    Attributes:
        steps: Steps of an epoch; None if the epoch has no end.
        validation: Seconds of validation in an epoch.
        checkpoints: Seconds in which an epoch saves checkpoints.
    """

    steps: int | None = None
    validation: float = 0.0
    checkpoints: float = 0.0


@dataclass(frozen=True)
class Facts:
    """Facts about the largest run in addition to its steps; a fact that was not measured is None.

    Attributes:
        strategy: Name of the strategy in the configuration.
        accelerator: Whether the devices are accelerators, which compute asynchronously.
        cores: Processor cores for all ranks together.
        threads: Threads with which a rank computes.
        with_fewer: Samples/s with so few threads that the ranks do not compete for the cores.
        workers: Loading processes of each rank.
        loader: Samples/s of all loaders while nothing is trained.
        load: Time in which one sample is loaded.
        link: Seconds in which the gradients are summed over the ranks while nothing is computed. With accumulated
            gradients, these are the seconds of each batch's part of the sum.
        gradient_bytes: Bytes of the gradients that are summed, with the same division among accumulated batches.
        larger: Seconds of the network and the update with a batch ``LARGER`` times as large.
        reads: Number of times that a step makes the host wait for a value of the device, by line of code.
        read_seconds: Seconds of a step in which the host waits for these values.
        log_every: Steps between two logged steps.
        epoch: Costs of an epoch in addition to its steps.
        keys: Arguments of the data module in the configuration that a remedy may change, such as ``num_workers`` and
            ``batch_size``.
    """

    strategy: str = "ddp"
    accelerator: bool = False
    cores: int = 1
    threads: int = 1
    with_fewer: float | None = None
    workers: int = 0
    loader: float | None = None
    load: Sample | None = None
    link: float | None = None
    gradient_bytes: float = 0
    larger: float | None = None
    reads: Mapping[str, float] = field(default_factory=dict)
    read_seconds: float = 0.0
    log_every: int = 50
    epoch: EpochCosts = EpochCosts()
    keys: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurements:
    """All measurements.

    Attributes:
        runs: Measured runs by increasing number of devices.
        facts: Facts about the largest run.
    """

    runs: Sequence[MeasuredRun]
    facts: Facts

    @property
    def largest(self) -> MeasuredRun:
        """The run with the most devices."""
        return self.runs[-1]

    def limits(self) -> dict[str, float]:
        """Return the samples/s that each part of the largest run reaches alone, by the part's name."""
        run, facts = self.largest, self.facts
        rates = {"compute": run.samples / max(rank.compute for rank in run.ranks)}
        if facts.loader is not None:
            rates["loader"] = facts.loader
        if facts.link:
            rates["link"] = run.samples / facts.link
        return rates

    def gain(self, saved: float, saved_of_epoch: float = 0.0) -> float:
        """Return the factor by which an epoch becomes faster if parts of it are saved.

        Args:
            saved: Seconds that are saved in each step.
            saved_of_epoch: Seconds that are saved outside of the steps. They do not count if an epoch has no end.
        """
        epoch = self.facts.epoch
        if epoch.steps is None:
            return self.largest.step / max(self.largest.step - saved, 1e-9)
        whole = epoch.steps * self.largest.step + epoch.validation + epoch.checkpoints
        return whole / max(whole - epoch.steps * saved - saved_of_epoch, 1e-9)
