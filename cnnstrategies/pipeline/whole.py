"""The whole network's state from that of its stages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport


def collect(value: Any, placement: Placement, transport: Transport) -> list[Any] | None:
    """Each stage's value, from its first replica, on rank 0; a collective.

    Args:
        value: Nested containers of tensors and plain data; tensors arrive on the CPU.
        placement: The numbering of the ranks.
        transport: Sends the values.

    Returns:
        On rank 0 the values in the order of the stages; None on the other ranks.
    """
    what = "the state of a stage"
    if transport.rank == 0:
        others = range(1, placement.stages)
        return [value, *(transport.receive_object(placement.ranks(stage)[0], what) for stage in others)]
    if placement.place(transport.rank).replica == 0:
        for one in transport.send_object(value, 0, what):
            one.wait()
    return None


@torch.no_grad()
def merge(
    module: nn.Module,
    network: nn.Module,
    state: Sequence[Sequence[str]],
    shapes: Mapping[str, torch.Size],
    placement: Placement,
    transport: Transport,
) -> dict[str, Tensor]:
    """All parameters and buffers of a network, on the CPU of every rank; a collective.

    Args:
        module: This rank's stage.
        network: The whole, which tells types; what is of other stages may be without memory.
        state: For each stage the names of its parameters and buffers.
        shapes: Their shapes.
        placement: The numbering of the ranks.
        transport: Its control group carries them.
    """
    # A tensor with two names has here perhaps another one first than in the network.
    own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    everything = dict((*network.named_parameters(), *network.named_buffers()))
    merged = {}
    for stage, names in enumerate(state):
        source = placement.ranks(stage)[0]
        for name in names:
            if stage == placement.place(transport.rank).stage:
                tensor = own[name].detach().cpu().contiguous()
            else:
                tensor = torch.empty(shapes[name], dtype=everything[name].dtype)
            if placement.world_size > 1:
                dist.broadcast(tensor, source, group=transport.control)
            merged[name] = tensor
    return merged
