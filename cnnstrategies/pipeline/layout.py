"""A layout of a network on devices."""

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
    """The same number of replicas for every stage.

    Raises:
        ConfigurationError: The devices do not divide evenly.
    """
    if devices % stages:
        raise ConfigurationError(
            f"{devices} devices do not divide evenly into {stages} stages: give replicas, one number per stage with "
            f"the sum {devices}, or use a multiple of {stages} devices"
        )
    return (devices // stages,) * stages
