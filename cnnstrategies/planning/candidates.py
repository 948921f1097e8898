"""The input of a plan (:class:`Job`), and the strategies that a plan compares (:class:`Candidate`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import Any, Literal

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, Profile
from cnnstrategies.shares import NORMALISED_TOGETHER, deal, proposal

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
        memory_limit: Limit in bytes that the user sets for a device's memory; None if the user sets no limit.
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
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigurationError(f"batch_size={self.samples}: a step needs at least 1 sample; give a larger number")

    @property
    def memory(self) -> int | None:
        """Largest number of bytes that a device may hold. None if neither the user nor the cluster sets a limit."""
        return min((limit for limit in (self.memory_limit, self.cluster.memory) if limit is not None), default=None)

    @property
    def checkpointings(self) -> tuple[Checkpointing, ...]:
        """Values of ``activation_checkpointing`` to try, until a layout fits into memory."""
        if self.activation_checkpointing is not None:
            return (self.activation_checkpointing,)
        return CHECKPOINTINGS[:1] if self.memory is None else CHECKPOINTINGS

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

    def dealt(self, step: Callable[[Sequence[int]], float], state: int) -> tuple[int, ...]:
        """Predict the number of samples of each device after training has balanced the shares.

        Training balances the shares with measured times of the devices. This method uses predicted times. It returns
        equal numbers if other shares would make a step only slightly shorter.

        Args:
            step: Function that returns the seconds of a step. Its argument is a sequence with each device's number of
                samples.
            state: Bytes that a device holds in addition to the activations of its samples.
        """
        counts, most, whole = self.equal(), inf, self.profile.costs
        if self.memory is not None:
            most = max(counts[0], int((self.memory - state) / max(1, whole.kept_bytes) * whole.microbatch_size))
        least = NORMALISED_TOGETHER if self.profile.batch_norm else 1
        while True:
            seconds = [time / count for time, count in zip(self._seconds(counts), counts, strict=True)]
            better = proposal(counts, seconds, step(counts), least, most)
            new_counts = deal(self.samples, better.shares, least, most) if better else counts
            if step(new_counts) >= step(counts):
                return counts
            counts = new_counts

    def slowest(self, counts: Sequence[int]) -> tuple[GraphCosts, float]:
        """Find the device that takes longest to compute its samples.

        Args:
            counts: Number of samples of each device.

        Returns:
            The network's costs for the samples of this device, and the speed of this device.
        """
        seconds = self._seconds(counts)
        device = seconds.index(max(seconds))
        return self.profile.at(counts[device]), self.cluster.speeds[device]

    def _seconds(self, counts: Sequence[int]) -> list[float]:
        """Return the seconds that each device takes for the forward and backward of its samples."""
        times = {count: self.profile.at(count).time for count in set(counts)}
        return [times[count] / speed for count, speed in zip(counts, self.cluster.speeds, strict=True)]


class Effect(IntEnum):
    """Effect of a setting on the training result, compared with DDP on the same global batch.

    The effect is none, different rounding, or different learning.
    """

    NONE = 0
    ROUNDING = 1
    LEARNING = 2


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
        memory: Largest number of bytes that a device holds.
        bottleneck: Resource that limits the speed most.
    """

    family: str
    options: Mapping[str, Any]
    effect: Effect
    step: float
    sent_bytes: int
    memory: int
    bottleneck: Bottleneck

    def __str__(self) -> str:
        shown = [name for name in ("replicas", "staleness") if name in self.options]
        text = " ".join([self.family, *(f"{self.options[name]}" for name in shown)])
        short = {"microbatches": "M", "accumulate_grad_batches": "accumulated"}
        more = [f"{short[name]}={self.options[name]}" for name in short if self.options.get(name, 1) != 1]
        if "activation_checkpointing" in self.options:
            more.append("activations recomputed")
        return ", ".join([text, *more])
