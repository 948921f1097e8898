"""The input of a plan (:class:`Job`), and the strategies that a plan compares (:class:`Candidate`)."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import inf
from typing import Any, Literal

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, Profile
from cnnstrategies.planning.image_parts import PartCosts
from cnnstrategies.planning.memory import NO_UPDATE, OptimizerMemory, PeakMemory, Update, largest
from cnnstrategies.planning.step_values import NO_VALUES, StepValues
from cnnstrategies.shares.dealing import NORMALISED_TOGETHER, deal
from cnnstrategies.shares.proposals import proposal

Bottleneck = Literal["compute", "nic", "link", "server", "fill"]
# Repeats the type `pipeline.timetable.Checkpointing`, so that this module does not import the pipeline.
Checkpointing = Literal["never", "except_last", "always"]
# The values of `Checkpointing` in the order of their memory, the largest first. Each value takes more time than the
# values before it.
CHECKPOINTINGS: tuple[Checkpointing, ...] = ("never", "except_last", "always")


@dataclass(frozen=True)
class Job:
    """A network, a cluster and a global batch, for which the planner chooses a strategy.

    Each attribute from ``microbatches`` to ``cuts`` can be None. The planner then chooses its value.

    Attributes:
        profile: Costs of the network.
        cluster: The machines and their devices. Rank i uses device i.
        samples: Number of samples in a step, over all devices.
        microbatches: Number of microbatches of a step.
        stages: Number of stages.
        replicas: Number of replicas of each stage.
        shares: Share of each device. The replicas of a stage divide the microbatches in proportion to their shares.
        cuts: For each cut of the network, the index of the first node after the cut.
        schedule: Schedule of the pipeline: ``gpipe`` or ``1f1b``.
        activation_checkpointing: Whether activations are recomputed before the backward: for no microbatch (``never``),
            for all except the last (``except_last``), or for all (``always``). If None, activations are recomputed
            only if no layout fits into memory without.
        run_ahead: Whether stages hold one additional microbatch, so that messages travel while the stages compute. If
            None, stages run ahead if that saves time and fits into memory.
        state_copies: Training state (parameters, gradients and optimizer state) as a multiple of the parameters' size.
        memory_limit: Limit in bytes that the user sets for the memory of a device: one limit for all devices, or the
            limit of each device; None if the user sets no limit.
        precision: Value of ``trainer.precision`` with which the profile was measured, if this is not the value that the
            user configured, because nothing fits into memory with that value.
        update: Memory that an update of the optimizer needs besides its state.
        image_parts: Costs of the network with images that are divided, for each number of parts that is possible.
        whole_images: Reason why images cannot be divided, or why the costs are not known; empty without a reason.
        values: Values that the step's own code sends between the stages of a pipeline.
    """

    profile: Profile
    cluster: Cluster
    samples: int
    microbatches: int | None = None
    stages: int | None = None
    replicas: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None
    cuts: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    activation_checkpointing: Checkpointing | None = "never"
    run_ahead: bool | None = None
    state_copies: int = 4
    memory_limit: int | tuple[int, ...] | None = None
    precision: str | None = None
    update: Update = NO_UPDATE
    image_parts: tuple[PartCosts, ...] = ()
    whole_images: str = ""
    values: StepValues = NO_VALUES

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigurationError(f"batch_size={self.samples}: a step needs at least 1 sample; give a larger number")

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """Largest number of bytes that each device may hold. Infinite if neither the user nor the cluster limits it."""
        memories, limit = self.cluster.memories, self.memory_limit
        limits = limit if isinstance(limit, tuple) else (inf if limit is None else limit,) * len(memories)
        return tuple(min(pair) for pair in zip(limits, memories, strict=True))

    @cached_property
    def is_limited(self) -> bool:
        """Whether the memory of a device is limited."""
        return min(self.limits) < inf

    @property
    def state(self) -> OptimizerMemory:
        """Size of the optimizer's state and of its update."""
        return OptimizerMemory(max(0, self.state_copies - 2), self.update)

    def excess(self, memory: Sequence[float]) -> float:
        """Return the largest number of bytes by which a device exceeds its limit; 0 if no device does.

        Args:
            memory: Bytes that each device holds.
        """
        # A layout that the user has given may use fewer devices than the cluster has.
        return max(0.0, *(held - limit for held, limit in zip(memory, self.limits, strict=False)))

    def tightest(self, memory: Sequence[float]) -> int:
        """Return the device that exceeds its limit most, or that comes closest to its limit.

        Args:
            memory: Bytes that each device holds.
        """
        return max(range(len(memory)), key=lambda device: memory[device] - self.limits[device])

    @property
    def checkpointings(self) -> tuple[Checkpointing, ...]:
        """Values of ``activation_checkpointing`` to try, until a layout fits into memory."""
        if self.activation_checkpointing is not None:
            return (self.activation_checkpointing,)
        return CHECKPOINTINGS if self.is_limited else CHECKPOINTINGS[:1]

    @property
    def network(self) -> Bottleneck:
        """Name of the bottleneck of a step that is limited by communication.

        The name is ``nic`` if the cluster has several machines. Otherwise it is ``link``.
        """
        return "nic" if len(self.cluster.hosts) > 1 else "link"

    def equal(self, batches: int = 1) -> tuple[int, ...]:
        """Return each device's number of samples in a batch if all devices have equal shares.

        If gradient accumulation divides a step into several batches, return the numbers for the largest batch.

        Args:
            batches: Number of batches in a step.
        """
        return deal(-(-self.samples // batches), [1] * self.cluster.devices)

    def dealt(
        self, step: Callable[[Sequence[int]], float], peak: Callable[[int], PeakMemory], batches: int = 1
    ) -> tuple[int, ...]:
        """Predict the number of samples of each device after training has balanced the shares.

        Training balances the shares with measured times of the devices. This method uses predicted times. It returns
        equal numbers if other shares would make a step only slightly shorter, and if no shares fit into memory. If
        equal numbers do not fit into memory, it returns other numbers even if a step becomes longer.

        Args:
            step: Function that returns the seconds of a step. Its argument is a sequence with each device's number of
                samples.
            peak: Function that returns the peak memory of a device from its number of samples in a batch.
            batches: Number of batches in a step. The result is for the largest batch.
        """
        counts, most = self.equal(batches), self.most_samples(peak)
        samples = sum(counts)
        least = NORMALISED_TOGETHER if self.profile.batch_norm else 1
        if sum(most) < samples or min(most) < min(least, samples // len(most)):
            return counts
        if any(count > limit for count, limit in zip(counts, most, strict=True)):
            counts = deal(samples, [1] * len(most), least, most)
        while True:
            seconds = [time / count for time, count in zip(self.seconds(counts), counts, strict=True)]
            better = proposal(counts, seconds, step(counts), least, most)
            new_counts = deal(samples, better.shares, least, most) if better else counts
            if step(new_counts) >= step(counts):
                return counts
            counts = new_counts

    def most_samples(self, peak: Callable[[int], PeakMemory]) -> list[float]:
        """Return the largest number of samples that fits into each device's memory; infinite without a limit.

        Args:
            peak: Function that returns the peak memory of a device from its number of samples in a batch.
        """
        numbers = range(1, self.samples + 1)
        most = {
            limit: bisect_right(numbers, limit, key=lambda count: peak(count).total)
            for limit in set(self.limits) - {inf}
        }
        return [most.get(limit, inf) for limit in self.limits]

    def slowest(self, counts: Sequence[int]) -> tuple[GraphCosts, float]:
        """Find the device that takes longest to compute its samples.

        Args:
            counts: Number of samples of each device.

        Returns:
            The network's costs for the samples of this device, and the speed of this device.
        """
        seconds = self.seconds(counts)
        device = seconds.index(max(seconds))
        return self.profile.at(counts[device]), self.cluster.speeds[device]

    def loads(
        self, counts: Sequence[int], peak: Callable[[int], PeakMemory], batches: int = 1
    ) -> "tuple[DeviceLoad, ...]":
        """Return the work and memory of devices that each hold the whole network.

        Args:
            counts: Number of samples of each device in a batch.
            peak: Function that returns the peak memory of a device from its number of samples in a batch.
            batches: Number of batches in a step.
        """
        peaks = {count: peak(count) for count in {*counts, *(count + 1 for count in counts)}}
        return tuple(
            DeviceLoad(peaks[count], peaks[count + 1].total - peaks[count].total, batches * count, batches * seconds)
            for count, seconds in zip(counts, self.seconds(counts), strict=True)
        )

    def seconds(self, counts: Sequence[int]) -> list[float]:
        """Return the seconds that each device takes for the forward and backward of its samples."""
        times = {count: self.profile.at(count).time for count in set(counts)}
        return [times[count] / speed for count, speed in zip(counts, self.cluster.speeds, strict=True)]


class Effect(IntEnum):
    """Effect of a setting on the training result, compared with DDP or one device on the same global batch.

    The effect is none, different rounding, or different learning.
    """

    NONE = 0
    ROUNDING = 1
    LEARNING = 2


@dataclass(frozen=True)
class DeviceLoad:
    """The predicted work and memory of a device in a step.

    Attributes:
        peak: Memory that the device holds at the moment at which it holds most.
        unit_memory: Bytes that the device would hold in addition if it got one more sample, or one more microbatch in a
            pipeline.
        units: Number of samples, or of microbatches in a pipeline, that the device processes in a step.
        seconds: Seconds for which the device computes in a step.
    """

    peak: PeakMemory
    unit_memory: int
    units: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """A strategy with its options and its predicted costs.

    Attributes:
        family: Registered name of the strategy, or ``hybrid`` for a pipeline.
        options: Options of the strategy. Keys are the options' names.
        effect: Effect on the training result.
        step: Seconds in which all devices together process as many samples as a global batch has. For a synchronous
            strategy this is the step time.
        sent_bytes: Bytes that all devices together send in a step.
        loads: Work and memory of each device.
        bottleneck: Resource that limits the speed most.
    """

    family: str
    options: Mapping[str, Any]
    effect: Effect
    step: float
    sent_bytes: int
    loads: tuple[DeviceLoad, ...]
    bottleneck: Bottleneck

    @property
    def peaks(self) -> tuple[PeakMemory, ...]:
        """Peak memory of each device, in the order of the ranks."""
        return tuple(load.peak for load in self.loads)

    @property
    def memories(self) -> list[int]:
        """Largest number of bytes that each device holds."""
        return [peak.total for peak in self.peaks]

    @property
    def peak(self) -> PeakMemory:
        """Peak memory of the fullest device."""
        return largest(self.peaks)

    @property
    def memory(self) -> int:
        """Largest number of bytes that a device holds."""
        return self.peak.total

    def __str__(self) -> str:
        shown = [name for name in ("replicas", "staleness") if name in self.options]
        text = " ".join([self.family, *(f"{self.options[name]}" for name in shown)])
        short = {"microbatches": "M", "accumulate_grad_batches": "accumulated", "parts": "parts"}
        more = [f"{short[name]}={self.options[name]}" for name in short if self.options.get(name, 1) != 1]
        if "activation_checkpointing" in self.options:
            more.append("activations recomputed")
        return ", ".join([text, *more])
