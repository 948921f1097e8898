"""The whole network's state from that of its stages."""

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.transport import Transport

_SMALL = 1 << 20  # bytes that are not worth a file


def collect(value: Any, transport: Transport, on_disk: bool = False) -> list[Any] | None:
    """Each stage's value, from its first replica, on rank 0; a collective.

    Args:
        value: Nested containers of tensors and plain data; tensors arrive on the CPU.
        transport: Sends the values.
        on_disk: Hold the tensors of other stages in temporary files, where memory may not hold all.

    Returns:
        On rank 0 the values in the order of the stages; None on the other ranks.

    Raises:
        ConfigurationError: The disk has no room for them.
    """
    what, placement = "the state of a stage", transport.placement
    if transport.rank == 0:
        others = range(1, placement.stages)
        allocate = _on_disk if on_disk else None
        return [value, *(transport.receive_object(placement.ranks(stage)[0], what, allocate) for stage in others)]
    if transport.place.replica == 0:
        for one in transport.send_object(value, 0, what):
            one.wait()
    return None


def _on_disk(size: int) -> Tensor:
    """So many bytes of a file, which the system writes to the disk and drops when memory is short."""
    if size < _SMALL:
        return torch.empty(size, dtype=torch.uint8)
    with tempfile.TemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # What has no room later would end the process.
        except OSError as error:
            raise ConfigurationError(
                f"{tempfile.gettempdir()} has no room for {size} bytes of another stage, which a checkpoint needs: "
                f"{error.strerror}; set TMPDIR to a directory on a larger disk"
            ) from error
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


@torch.no_grad()
def merge(
    module: nn.Module,
    network: nn.Module,
    state: Sequence[Sequence[str]],
    shapes: Mapping[str, torch.Size],
    transport: Transport,
) -> dict[str, Tensor]:
    """All parameters and buffers of a network, on the CPU of every rank; a collective.

    Args:
        module: This rank's stage.
        network: The whole, which tells types; what is of other stages may be without memory.
        state: For each stage the names of its parameters and buffers.
        shapes: Their shapes.
        transport: Its control group carries them.
    """
    # A tensor with two names has here perhaps another one first than in the network.
    own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    everything = dict((*network.named_parameters(), *network.named_buffers()))
    merged = {}
    for stage, names in enumerate(state):
        source = transport.placement.ranks(stage)[0]
        for name in names:
            if stage == transport.place.stage:
                tensor = own[name].detach().cpu().contiguous()
            else:
                tensor = torch.empty(shapes[name], dtype=everything[name].dtype)
            if transport.placement.world_size > 1:
                dist.broadcast(tensor, source, group=transport.control)
            merged[name] = tensor
    return merged
