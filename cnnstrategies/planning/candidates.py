"""What is planned for; what can be chosen, what that changes, and what is predicted of it."""

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
Checkpointing = Literal["never", "except_last", "always"]  # As the pipeline has it, whose module imports torch.


@dataclass(frozen=True)
class Job:
    """What is planned for; of a hybrid pipeline, what is None is chosen.

    Attributes:
        cluster: Its devices are the ranks, in order.
        samples: Of a step, over all devices.
        shares: For each device how many microbatches it runs in proportion to the other replicas of its stage.
        cuts: First node of each stage but the first.
        activation_checkpointing: Whether a stage keeps only its inputs and runs its forward again before the
            backward: for no microbatch, for all but the last, or for all.
        run_ahead: Whether stages hold one microbatch more, so that messages travel while they compute; chosen where it
            gains time and fits into memory.
        state_copies: Copies of the parameters that training holds: parameters, gradients, optimizer state.
        memory_limit: Bytes that a device may hold, beside what the cluster says.
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
    activation_checkpointing: Checkpointing = "never"
    run_ahead: bool | None = None
    state_copies: int = 4
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigurationError(f"batch_size={self.samples}: a step needs at least 1 sample")

    @property
    def memory(self) -> int | None:
        """Bytes that a device may hold."""
        return min((one for one in (self.memory_limit, self.cluster.memory) if one is not None), default=None)

    @property
    def network(self) -> Bottleneck:
        """What connects its devices, as a bottleneck."""
        return "nic" if len(self.cluster.hosts) > 1 else "link"

    def equal(self, batches: int = 1) -> tuple[int, ...]:
        """Samples of each device in the largest of so many batches that make a step."""
        return deal(-(-self.samples // batches), [1] * self.cluster.devices)

    def dealt(self, step: Callable[[Sequence[int]], float], state: int) -> tuple[int, ...]:
        """Samples of each device as training would deal them by the devices' times; equal ones where that gains little.

        Args:
            step: Seconds of a step with such samples.
            state: Bytes that a device holds beside what it keeps of its samples.
        """
        counts, most, whole = self.equal(), inf, self.profile.costs
        if self.memory is not None:
            most = max(counts[0], int((self.memory - state) / max(1, whole.kept_bytes) * whole.microbatch_size))
        least = NORMALISED_TOGETHER if self.profile.batch_norm else 1
        while True:
            seconds = [time / count for time, count in zip(self._seconds(counts), counts, strict=True)]
            found = proposal(counts, seconds, step(counts), least, most)
            then = deal(self.samples, found.shares, least, most) if found else counts
            if step(then) >= step(counts):
                return counts
            counts = then

    def slowest(self, counts: Sequence[int]) -> tuple[GraphCosts, float]:
        """The costs and the speed of the device that takes longest for its samples."""
        seconds = self._seconds(counts)
        device = seconds.index(max(seconds))
        return self.profile.at(counts[device]), self.cluster.speeds[device]

    def _seconds(self, counts: Sequence[int]) -> list[float]:
        times = {count: self.profile.at(count).time for count in set(counts)}
        return [times[count] / speed for count, speed in zip(counts, self.cluster.speeds, strict=True)]


class Effect(IntEnum):
    """What a choice changes of what is learned, beside DDP with the same global batch."""

    NONE = 0
    ROUNDING = 1
    LEARNING = 2


@dataclass(frozen=True)
class Candidate:
    """A strategy with its options, and what is predicted of it.

    Attributes:
        effect: What it changes of what is learned.
        step: Seconds in which as many samples as a step has are trained on.
        sent_bytes: Bytes that all devices together send for a step.
        memory: Bytes that the fullest device holds.
        bottleneck: What a step mostly waits for.
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
        return ", ".join([text, *more])
