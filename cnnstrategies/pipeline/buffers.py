"""Buffers that a stage's forward changes and that are not BatchNorm's: its replicas keep the first one's."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies._torch_private import writes
from cnnstrategies.errors import ConfigurationError


class OtherBuffers:
    """Has all replicas of a stage continue with the first one's buffers after each step, as DDP does.

    Such as an InstanceNorm's running statistics or the vectors of a spectral norm. Which ones change shows in the
    first step; constants, however large, are not sent.

    Args:
        module: The stage.
        known: Buffers that somebody else looks after.
        group: The stage's replicas; None for one.
    """

    def __init__(self, module: nn.Module, known: Collection[Tensor], group: dist.ProcessGroup | None) -> None:
        elsewhere = {id(buffer) for buffer in known}
        self._names = [name for name, buffer in module.named_buffers() if id(buffer) not in elsewhere]
        self._module = module
        self.group = group
        self._changing: list[str] | None = None
        self._before: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Remember what the buffers are."""
        if self.group is not None:
            self._before = self._states()

    @torch.no_grad()
    def finish(self) -> None:
        """Give all replicas those of the first; a collective of the stage's replicas.

        Raises:
            ConfigurationError: Another one has changed than in the first step.
        """
        if self.group is None or not self._names:
            return
        buffers = [self._module.get_buffer(name) for name in self._names]
        changed = [now != before for now, before in zip(self._states(), self._before, strict=True)]
        if self._changing is None:
            flags = torch.tensor(changed, dtype=torch.int32, device=buffers[0].device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            self._changing = [name for name, flag in zip(self._names, flags.tolist(), strict=True) if flag]
        late = {name for name, one in zip(self._names, changed, strict=True) if one} - set(self._changing)
        if late:
            raise ConfigurationError(
                f"the buffer {min(late)} has changed, and did not in the first step: the replicas of a stage would "
                "part; change it in every step, or give the stage one replica"
            )
        for name in self._changing:
            whole = self._module.get_buffer(name).contiguous()
            dist.broadcast(whole, group=self.group, group_src=0)
            self._module.get_buffer(name).copy_(whole)

    def _states(self) -> list[tuple[int, int]]:
        """Which tensor each is, and how often it was written to; autograd counts that."""
        return [(id(one), writes(one)) for one in map(self._module.get_buffer, self._names)]
