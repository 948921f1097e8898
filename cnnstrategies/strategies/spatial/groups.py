"""Numbering of the ranks, and their process groups."""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cnnstrategies.placed.messages import LinkError
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.runtime.groups import broadcast_value, new_group
from cnnstrategies.spatial import GroupLink, SpatialParts
from cnnstrategies.spatial.link import link_errors


class ImageGroups:
    """Groups of ranks that have parts of the same images.

    Consecutive ranks are in one group, so that their messages stay within a node if possible. The groups are replicas:
    they train on different batches.

    Attributes:
        parts: The divided tensors of this rank's group.
        part: Number of this rank in its group. The rank with number 0 loads the batches.
        replica: Number of the group.
        replicas: Number of groups.
        group: Process group of the ranks of this rank's group.
        counterparts: Process group of the ranks that have the same part in the other groups, and of this rank.
        cpu_group: Process group of the same ranks as `group`, for tensors on the CPU.
        cpu_counterparts: Process group of the same ranks as `counterparts`, for tensors on the CPU.
        device: Device of this rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        count: Number of ranks in a group.
        device: Device of this rank.
        timeout: Longest wait for another rank.
    """

    def __init__(self, rank: int, world_size: int, count: int, device: torch.device, timeout: timedelta) -> None:
        self.replica, self.part = divmod(rank, count)
        self.replicas = world_size // count
        self.device = device
        images = [range(replica * count, (replica + 1) * count) for replica in range(self.replicas)]
        same_parts = [range(part, world_size, count) for part in range(count)]
        self.group, self.counterparts = self._create(images, timeout), self._create(same_parts, timeout)
        self.cpu_group, self.cpu_counterparts = self.group, self.counterparts
        if device.type != "cpu":  # Batches are on the CPU before they are moved to the device.
            self.cpu_group = self._create(images, timeout, "gloo")
            self.cpu_counterparts = self._create(same_parts, timeout, "gloo")
            # All ranks must take part in the first message of an NCCL group, and not all have rows to send.
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        self.parts = SpatialParts(GroupLink(self.group, self.cpu_group))
        self.parts.describe = lambda part: f"rank {self.first + part}"
        self.parts.note_loss = print_divergence
        self._loaders = 0

    def _create(self, all_ranks: list[range], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
        """Create groups of ranks, and return the group of this rank. All ranks must call this."""
        groups = [new_group(ranks, timeout, backend) for ranks in all_ranks]
        (own_group,) = [group for group in groups if group is not None]
        return own_group

    def next_number(self) -> int:
        """Return a number for a new loader. All ranks must create their loaders in the same order."""
        self._loaders += 1
        return self._loaders

    def from_loader(self, value: Any) -> Any:
        """Return a value of the rank that loads, on all ranks of the group. All ranks of the group must call this.

        Args:
            value: The value; ignored on other ranks.

        Raises:
            DivergedError: A rank has ended, or the time-out is over.
        """
        self.parts.operation = "the next batch"
        try:
            with link_errors(0 if self.part else None):
                return broadcast_value(value, self.first, group=self.cpu_group)
        except LinkError as error:
            raise self.parts.diverged(error) from error

    @property
    def first(self) -> int:
        """The rank of this group that loads the batches."""
        return self.replica * self.parts.count

    def same_random_numbers(self) -> None:
        """Continue on all ranks of the group with the random numbers of the rank that loads."""
        states: GeneratorStates = self.from_loader(GeneratorStates.current(self.device))
        states.restore(self.device)

    def close(self) -> None:
        """Close the groups, after a run without a failure."""
        for group in {self.group, self.counterparts, self.cpu_group, self.cpu_counterparts}:
            dist.destroy_process_group(group)


def print_divergence(text: str) -> None:
    """Print where this rank is, after a time-out or if another rank is in another operation.

    Only one rank shows its exception. A user needs the lines of all ranks to see which rank has left the program of the
    others.
    """
    if "timed out" in text.lower() or "in another operation" in text:
        print(text, file=sys.stderr, flush=True)
