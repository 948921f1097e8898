"""What can be chosen, what it changes, and what is predicted of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import Profile

Bottleneck = Literal["compute", "nic", "link", "server", "fill"]
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
        shown = [name for name in ("replicas", "staleness") if name in self.options]
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
    """

    step: float
    samples: int
    sent_bytes: int
    memory: int
    bottleneck: Bottleneck

    @property
    def rate(self) -> float:
        """Samples per second."""
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


def price_per_hour(cluster: Cluster, devices: int) -> float:
    """Of the machines that so many devices, the last ones, are in."""
    return sum(host.price for host in cluster.taken(devices).hosts)
