"""Dataclasses with the measurements of ``scaling``, such as the seconds of each part of a step."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cnnstrategies.planning.costs import digits
from cnnstrategies.planning.scaling.timeline import BATCH, ROWS, WAITING, Change, Round, Segment, saved_fractions
from cnnstrategies.planning.tune.race import interval

COMPUTE = ("forward", "backward", "optimizer")
LEAST_GAIN = 1.05  # Smaller predicted gains are not reported.
ERROR = 0.1  # Probability that a true speed-up or gain lies outside of its confidence interval.
LARGER = 4  # Factor by which batches are enlarged to measure whether the batches are too small for a device.


def ms(seconds: float, count: int = 3) -> str:
    """Convert seconds to milliseconds, and return them as text with ``count`` significant digits."""
    return digits(1e3 * seconds, count)


@dataclass(frozen=True)
class Rank:
    """The time of a step on one rank, divided into parts such as ``forward`` and ``data``.

    Attributes:
        samples: Number of samples in the rank's batch.
        parts: Seconds of each part of the step. Keys are the names of the parts. The seconds add up to the step time.
            The parts whose names begin with `WAITING` are the collectives, in which the rank waits for other ranks. The
            other parts do not contain any time of waiting for other ranks.
    """

    samples: float
    parts: Mapping[str, float]

    @property
    def step(self) -> float:
        """Step time of the rank in seconds."""
        return sum(self.parts.values())

    @property
    def compute(self) -> float:
        """Seconds of a step in which the rank runs the forward, the backward and the optimizer's update."""
        return sum(self.parts.get(name, 0.0) for name in COMPUTE)

    @property
    def waits(self) -> float:
        """Seconds of a step in which the rank waits for other ranks."""
        return sum(seconds for name, seconds in self.parts.items() if name.startswith(WAITING))

    @property
    def waits_in_step(self) -> float:
        """Seconds of a step in which the rank waits for other ranks, apart from waits for the rank that loads."""
        return self.waits - self.parts.get(WAITING + BATCH, 0.0)

    @property
    def own(self) -> float:
        """Seconds of a step in which the rank works, and does not wait for other ranks."""
        return self.step - self.waits

    def beside(self, kind: str) -> dict[str, float]:
        """Return the seconds that each callback, or each logger, takes in a step.

        Args:
            kind: `CALLBACK` or `LOGGER`.

        Returns:
            Keys are the names of the callbacks or loggers.
        """
        return {name.removeprefix(kind): value for name, value in self.parts.items() if name.startswith(kind)}


@dataclass(frozen=True)
class MeasuredRun:
    """The measurement of a training with a certain number of devices.

    Attributes:
        ranks: The time of a step on each rank.
        rates: Samples/s of all devices together, in each round of the measurement.
        rounds: The timelines of the rounds' steps.
    """

    ranks: Sequence[Rank]
    rates: Sequence[float]
    rounds: Sequence[Round]

    @property
    def devices(self) -> int:
        """Number of devices that train."""
        return len(self.ranks)

    @property
    def divides_images(self) -> bool:
        """Whether several ranks have parts of the same images."""
        return any(WAITING + ROWS in rank.parts for rank in self.ranks)

    @property
    def samples(self) -> float:
        """Number of samples in a step, over all devices."""
        return sum(rank.samples for rank in self.ranks)

    @property
    def step(self) -> float:
        """Mean step time of the ranks, in seconds."""
        return statistics.mean(rank.step for rank in self.ranks)

    @property
    def rate(self) -> float:
        """Samples/s of all devices together: the median over the rounds."""
        return statistics.median(self.rates)

    @property
    def slowest(self) -> Rank:
        """The slowest rank. It is the rank that waits least, because the other ranks wait for it."""
        return min(self.ranks, key=lambda rank: rank.waits_in_step)

    @property
    def waiting(self) -> float:
        """Seconds of a step for which a rank waits for the slowest rank, as a mean over the ranks."""
        return statistics.mean(rank.waits_in_step for rank in self.ranks) - self.slowest.waits_in_step

    def after(self, change: Change) -> float:
        """Return the predicted step time after a change, in seconds: the median over the rounds."""
        return self.step * (1 - statistics.median(saved_fractions(self.rounds, change)))

    def count(self, kinds: Collection[str]) -> float:
        """Return the number of collectives of some kinds in a step."""
        return self._of_a_step(kinds, lambda segments: 1.0)

    def wait(self, kinds: Collection[str]) -> float:
        """Return the seconds of a step that a rank spends in collectives of some kinds, as a mean over the ranks."""
        return self._of_a_step(kinds, lambda segments: statistics.mean(segment.waited for segment in segments))

    def cost(self, kinds: Collection[str]) -> float:
        """Return the seconds of a step that collectives of some kinds take after the last rank has arrived."""
        return self._of_a_step(kinds, lambda segments: min(segment.waited for segment in segments))

    def places(self, kinds: Collection[str]) -> list[str]:
        """Return the lines of the user's code that run collectives of some kinds, as sorted texts ``file:line``."""
        segments = (segment for each in self.rounds for timeline in each.ranks for segment in timeline)
        return sorted({segment.place for segment in segments if segment.collective in kinds and segment.place})

    def _of_a_step(self, kinds: Collection[str], figure: Callable[[Sequence[Segment]], float]) -> float:
        total = sum(
            figure(segments)
            for each in self.rounds
            for segments in zip(*each.ranks, strict=True)
            if segments[0].collective in kinds
        )
        return total / sum(each.steps for each in self.rounds)


@dataclass(frozen=True)
class Sample:
    """The time that the data loader takes for one sample.

    Attributes:
        seconds: Seconds that one thread takes to load a sample.
        processor: The part of `seconds` in which the thread computes or waits for a CPU core. In the other part of
            `seconds`, the thread waits for storage.
        two: Seconds that a thread takes to load a sample while a second thread also loads a sample.
    """

    seconds: float
    processor: float
    two: float


@dataclass(frozen=True)
class EpochCosts:
    """The number of steps of an epoch, and the time that an epoch takes in addition to its steps.

    Attributes:
        steps: Number of steps in an epoch; None if the epoch has no end.
        validation: Seconds of validation in an epoch.
        checkpoints: Seconds in an epoch in which checkpoints are saved.
    """

    steps: int | None = None
    validation: float = 0.0
    checkpoints: float = 0.0


@dataclass(frozen=True)
class Facts:
    """Facts about the run with the most devices, in addition to the step times.

    If a fact was not measured, its attribute has the default value, such as None.

    Attributes:
        strategy: Name of the strategy in the configuration.
        accelerator: Whether the devices are accelerators, which compute asynchronously.
        cores: Number of CPU cores for all ranks together.
        threads: Number of threads with which a rank computes.
        with_fewer: Samples/s of all devices together if each rank has fewer threads, so that every thread has its own
            core.
        workers: Number of worker processes of each rank's data loader.
        loader: Samples/s of all data loaders together while nothing is trained.
        load: Time that the data loader takes for one sample.
        link: Seconds of the gradients' all-reduce while nothing is computed. If gradients are accumulated, these
            seconds are divided by the number of accumulated batches.
        gradient_bytes: Bytes of the gradients in this all-reduce. If gradients are accumulated, the bytes are divided
            by the number of accumulated batches.
        larger: Seconds of forward, backward and update with a batch that is ``LARGER`` times as large as the
            configured batch.
        reads: Number of times in a step that the process waits for a value from the device. Keys are the lines of code
            that read values.
        read_seconds: Seconds of a step in which the process waits for values from the device.
        log_every: Number of steps from one logged step to the next.
        epoch: Number of steps of an epoch, and the time of validation and of saving checkpoints.
        keys: Arguments of the data module that a remedy may change, such as ``num_workers`` and ``batch_size``, with
            their values in the configuration.
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
    """All measurements of a ``scaling`` command.

    Attributes:
        runs: Measured runs in order of their number of devices.
        facts: Facts about the run with the most devices.
    """

    runs: Sequence[MeasuredRun]
    facts: Facts

    @property
    def largest(self) -> MeasuredRun:
        """The run with the most devices."""
        return self.runs[-1]

    def limits(self) -> dict[str, float]:
        """Return the samples/s that the run with the most devices would reach if a step had only one activity.

        The keys are the activities: ``compute`` (computation), ``loader`` (data loading) and ``link`` (all-reduce of
        gradients). A rate that was not measured is left out.
        """
        run, facts = self.largest, self.facts
        rates = {"compute": run.samples / max(rank.compute for rank in run.ranks)}
        if facts.loader is not None:
            rates["loader"] = facts.loader
        if facts.link:
            rates["link"] = run.samples / facts.link
        return rates

    def gain_of(self, change: Change, least_step: float = 0.0) -> float:
        """Return the factor by which a change of the steps would make an epoch faster.

        The steps of each round are predicted separately. If the predicted gains could be noise, the factor is 1.

        Args:
            change: The change.
            least_step: Smallest possible duration of a step after the change, in seconds.
        """
        run = self.largest
        saved = [run.step * fraction for fraction in saved_fractions(run.rounds, change)]
        gains = [self.gain(min(seconds, run.step - least_step)) for seconds in saved]
        low, middle, _ = interval(gains, ERROR)
        return middle if max(low, min(gains)) >= LEAST_GAIN else 1.0

    def gain(self, saved: float, saved_of_epoch: float = 0.0) -> float:
        """Return the factor by which an improvement would make an epoch faster.

        Args:
            saved: Seconds by which the improvement shortens each step.
            saved_of_epoch: Seconds by which the improvement shortens the validation and the saving of checkpoints in an
                epoch. Ignored if an epoch has no end.
        """
        epoch = self.facts.epoch
        if epoch.steps is None:
            return self.largest.step / max(self.largest.step - saved, 1e-9)
        whole = epoch.steps * self.largest.step + epoch.validation + epoch.checkpoints
        return whole / max(whole - epoch.steps * saved - saved_of_epoch, 1e-9)
