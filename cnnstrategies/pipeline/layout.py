"""A layout of a network on devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from cnnstrategies.errors import ConfigurationError


@dataclass(frozen=True)
class Layout:
    """Where the network is cut and how often each stage is replicated.

    Attributes:
        cuts: Index of the first node of each stage but the first, ascending.
        replicas: Replicas of each stage.
    """

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.replicas) == len(self.cuts) + 1
        assert all(left < right for left, right in zip(self.cuts, self.cuts[1:], strict=False))

    @property
    def devices(self) -> int:
        """Devices in use."""
        return sum(self.replicas)


def even_replicas(devices: int, stages: int) -> tuple[int, ...]:
    """The same number of replicas for every stage."""
    if devices % stages:
        raise ConfigurationError(
            f"{devices} devices do not divide evenly into {stages} stages: give replicas, one number per stage with "
            f"the sum {devices}, or use a multiple of {stages} devices"
        )
    return (devices // stages,) * stages


def check_layout(cuts: int, replicas: Sequence[int], microbatches: int, ranks: int) -> None:
    """Refuse a layout that cannot run."""
    if not replicas or min(replicas) < 1:
        raise ConfigurationError(f"replicas={list(replicas)}: every stage needs at least 1 replica")
    if len(replicas) != cuts + 1:
        raise ConfigurationError(
            f"replicas={list(replicas)} are for {len(replicas)} stages, but {cuts} cuts make {cuts + 1}: give one "
            "number per stage"
        )
    if sum(replicas) != ranks:
        raise ConfigurationError(
            f"replicas={list(replicas)} need {sum(replicas)} devices, but there are {ranks}: change replicas or the "
            "number of devices"
        )
    if microbatches < max(replicas):
        raise ConfigurationError(
            f"microbatches={microbatches} are fewer than the {max(replicas)} replicas of a stage, some of which would "
            f"have nothing to do: use at least {max(replicas)}, better {4 * max(replicas)}"
        )
