"""What was measured of a training on one device and on more: seconds of a step by parts, and what the parts can do."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cnnstrategies.planning.costs import digits

COMPUTE = ("forward", "backward", "optimizer")
# The parts of what is called in a step beside the network; after the word comes whose it is.
CALLBACK, LOGGER = "callback ", "logger "
LARGER = 4  # times the batch with which it is tried whether batches are small


def ms(seconds: float, count: int = 3) -> str:
    """Milliseconds, with so many digits."""
    return digits(1e3 * seconds, count)


@dataclass(frozen=True)
class Rank:
    """What a rank does in a step.

    Attributes:
        samples: Of its batch.
        parts: Seconds of each part; together they are the step.
        waiting: Those parts in which it waits for others.
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
        """Seconds of the network and the update."""
        return sum(self.parts.get(name, 0.0) for name in COMPUTE)

    @property
    def waits(self) -> float:
        """Seconds in which it waits for others."""
        return sum(self.parts.get(name, 0.0) for name in self.waiting)

    def beside(self, kind: str) -> dict[str, float]:
        """Seconds of what is called beside the network, by whose it is."""
        return {name.removeprefix(kind): value for name, value in self.parts.items() if name.startswith(kind)}


@dataclass(frozen=True)
class MeasuredRun:
    """A training on some devices.

    Attributes:
        rates: Samples/s of all of them, by rounds.
    """

    ranks: Sequence[Rank]
    rates: Sequence[float]

    @property
    def devices(self) -> int:
        """How many."""
        return len(self.ranks)

    @property
    def samples(self) -> float:
        """Of a step, over all devices."""
        return sum(rank.samples for rank in self.ranks)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return statistics.mean(rank.step for rank in self.ranks)

    @property
    def rate(self) -> float:
        """Samples/s."""
        return statistics.median(self.rates)

    @property
    def slowest(self) -> Rank:
        """For which the others wait: it waits least."""
        return min(self.ranks, key=lambda rank: rank.waits)

    @property
    def waiting(self) -> float:
        """Seconds of a step in which a rank waits for the slowest one, on average."""
        return statistics.mean(rank.waits for rank in self.ranks) - self.slowest.waits


@dataclass(frozen=True)
class Sample:
    """How one sample is made.

    Attributes:
        seconds: In which one thread makes one.
        processor: Of them, those in which it computes, or waits for a core.
        two: Seconds in which each of two threads makes one at the same time.
    """

    seconds: float
    processor: float
    two: float


@dataclass(frozen=True)
class EpochCosts:
    """What an epoch has beside its steps.

    Attributes:
        steps: Of an epoch; None if it has no end.
        validation: Seconds of validation.
        checkpoints: Seconds of saving.
    """

    steps: int | None = None
    validation: float = 0.0
    checkpoints: float = 0.0


@dataclass(frozen=True)
class Facts:
    """What was found out of the largest run beside its steps; what could not be is None.

    Attributes:
        strategy: As the configuration names it.
        accelerator: Whether devices compute what the processor queues.
        cores: Of the processor, for all ranks together.
        threads: With which a rank computes.
        with_fewer: Samples/s where the ranks share the cores out.
        workers: Processes that load, of each rank.
        loader: Samples/s of all loaders when nothing is trained.
        load: How one sample is made.
        link: Seconds in which the gradients are summed over the ranks when nothing is computed; each batch's part
            where several have one sum.
        gradient_bytes: What is summed, likewise.
        larger: Seconds in which the network and the update take a batch ``LARGER`` times as large.
        reads: How often a step makes the host wait for a value, by the lines of code that do.
        read_seconds: In which the host waits for them in a step.
        log_every: Steps between what is logged.
        keys: What the configuration has, with dots, and its value: ``num_workers``, ``batch_size`` and such.
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
class Found:
    """All that was measured; the runs by growing numbers of devices."""

    runs: Sequence[MeasuredRun]
    facts: Facts

    @property
    def largest(self) -> MeasuredRun:
        """With the most devices."""
        return self.runs[-1]

    def limits(self) -> dict[str, float]:
        """Samples/s of the largest run's parts, each alone."""
        run, facts = self.largest, self.facts
        found = {"compute": run.samples / max(rank.compute for rank in run.ranks)}
        if facts.loader is not None:
            found["loader"] = facts.loader
        if facts.link:
            found["link"] = run.samples / facts.link
        return found

    def gain(self, saved: float, saved_of_epoch: float = 0.0) -> float:
        """How many times as fast an epoch is with so many seconds less of a step, and of what it has beside its steps.

        Where an epoch has no end, its steps alone count.
        """
        epoch = self.facts.epoch
        if epoch.steps is None:
            return self.largest.step / max(self.largest.step - saved, 1e-9)
        whole = epoch.steps * self.largest.step + epoch.validation + epoch.checkpoints
        return whole / max(whole - epoch.steps * saved - saved_of_epoch, 1e-9)
