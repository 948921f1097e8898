"""What Lightning is told of where a process that joins a run is."""

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override

from cnnstrategies.paramserver.places import Place


class JoinerEnvironment(LightningEnvironment):
    """One process, whose number is its place in the run; whatever has started it."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def world_size(self) -> int:
        return self._place.workers

    @override
    def global_rank(self) -> int:
        return self._place.id

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass
