"""The connections of a rank to the other ranks during a run, and what the ranks exchange outside of the steps."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.placed import DeviceLink, GlooLink, Places
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.runtime.groups import broadcast_value, new_group
from cnnstrategies.strategies.default_group import default_group
from cnnstrategies.strategies.hybrid_pipeline.loader_messages import end_together


class RunConnections:
    """Process groups and rules of a rank from the start of the processes to the end of a run.

    All ranks create this object, and all ranks call its methods.

    Attributes:
        places: The rules of this rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        device: Device of this rank.
        timeout: Longest wait for another rank.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
        self._device, self._timeout = device, timeout
        group = new_group(range(world_size), timeout, backend="gloo")
        assert group is not None
        groups = [new_group([member], timeout) for member in range(world_size)]
        self._alone = groups[rank]
        self._groups = [group, self._alone]
        self._everyone = dist.group.WORLD
        assert self._everyone is not None
        devices = None if dist.get_backend() == "gloo" else DeviceLink(self._everyone, device)
        self.places = Places(rank, world_size, GlooLink(group, rank, world_size), devices)
        self._transport: Transport | None = None

    def connect(self, placement: Placement) -> Transport:
        """Connect the stages."""
        self._transport = transport = Transport(placement, self._timeout, self._device)
        self.places.messages.describe = placement.describe
        return transport

    @property
    def is_connected(self) -> bool:
        """Whether the stages are connected."""
        return self._transport is not None

    @property
    def transport(self) -> Transport:
        """Connections of the stages, after the set-up."""
        assert self._transport is not None, "the strategy has been set up"
        return self._transport

    def one_process(self) -> AbstractContextManager[None]:
        """Return a context in which the default process group has one process.

        Losses that gather over all processes, such as contrastive losses, thus see the whole batch once.
        """
        return default_group(self._alone)

    def all_processes(self) -> AbstractContextManager[None]:
        """Return a context in which the default process group has all processes, also in a step."""
        return default_group(self._everyone)

    def same_random_numbers(self) -> None:
        """Continue on all ranks with the random numbers of rank 0."""
        states: GeneratorStates = broadcast_value(GeneratorStates.current(self._device), 0, self._device)
        states.restore(self._device)

    def end_together(self, sources: Sequence[int], asks_of_signal: bool) -> None:
        """Check at the end of an epoch that all ranks have reached it.

        Args:
            sources: Ranks of the first stage.
            asks_of_signal: Whether Lightning broadcasts before each batch whether rank 0 has got a signal.
        """
        if asks_of_signal and self.places.world_size > 1:
            # A rank that continues with another batch waits in Lightning's broadcast.
            with self.places.local():
                dist.broadcast(torch.zeros(1, dtype=torch.int64, device=self._device), 0)
        end_together(self.places, sources)

    def close(self) -> None:
        """Close all connections, after a run without a failure."""
        self.places.messages.close()
        self.transport.close()
        for group in self._groups:
            dist.destroy_process_group(group)

    def drop(self) -> None:
        """Drop the groups, also after a failure. The threads of a group end when nothing refers to the group."""
        self._alone = self._everyone = self._transport = None
        self._groups.clear()


def everywhere(places: Places, value: Any, why: str) -> Any:
    """Return nested containers with copies of placed tensors, without a gradient. All ranks must call this.

    Args:
        places: The rules of this rank.
        value: The containers.
        why: First word of the message's subject.
    """
    copies = places.all_everywhere([leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)], why)
    return tree_map_only(Tensor, lambda tensor: copies.get(id(tensor), tensor), value)
