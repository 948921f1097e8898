"""The global batch: its first-stage replicas tell all ranks its sizes, and send them everything but the images."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport

HEADER_BYTES = 1024

Images = Tensor | tuple[Tensor, ...]  # A tuple where the network takes several.


@dataclass(frozen=True)
class Batch:
    """A global batch, as one rank knows it.

    Attributes:
        split: Its microbatches.
        images: The rank's own images (n, C, H, W) in the first stage; None elsewhere.
        image_shape: Shape of one image; of several, where the network takes several.
        image_dtype: Type of the images; likewise.
        rest: What the batch holds besides images, over all replicas and in the order of one process: targets (N, ...)
            for training.
        forms: What each replica of the first stage has sent along; None from those without samples.
    """

    split: Split
    images: Images | None
    image_shape: tuple[Any, ...]
    image_dtype: torch.dtype | tuple[torch.dtype, ...]
    rest: tuple[Tensor, ...]
    forms: tuple[Any, ...]


def share_batch(
    images: Images | None,
    rest: Sequence[Tensor],
    form: Any,
    microbatches: int,
    placement: Placement,
    transport: Transport,
    device: torch.device,
) -> Batch:
    """Make the global batch known to all ranks; a collective.

    Args:
        images: This replica's images (n, C, H, W), or several such tensors, with n = 0 or None where it has none;
            ignored after the first stage.
        rest: This replica's other tensors, each with n rows.
        form: Plain data that is sent along.
        microbatches: Microbatches of a full step.
        placement: The numbering of the ranks.
        transport: Its control group carries the sizes.
        device: Where the tensors live.

    Returns:
        The batch; it has 0 samples when no replica has any.

    Raises:
        ConfigurationError: A tensor has another number of rows than the images, a batch is not made of tensors, or
            the replicas have images of different sizes.
    """
    first = placement.ranks(0)
    rank = transport.rank
    header: Any = None
    several = (images,) if isinstance(images, Tensor) else images or ()
    if rank in first and several and len(several[0]):
        for tensor in (*several, *rest):
            if not isinstance(tensor, Tensor) or len(tensor) != len(several[0]):
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ConfigurationError(
                    f"a batch of {len(several[0])} images comes with {shape}: everything in a batch must be a tensor "
                    "with one row per image"
                )
        shape, dtype = tree_map(_row_shape, images), tree_map(lambda tensor: tensor.dtype, images)
        header = (len(several[0]), shape, dtype, [(tuple(t.shape[1:]), t.dtype) for t in rest], form)
    headers = [_broadcast_header(header, source, transport) for source in first]
    rows = tuple(0 if one is None else one[0] for one in headers)
    forms = tuple(None if one is None else one[4] for one in headers)
    split = Split(rows, microbatches)
    if not split.samples:
        return Batch(split, None, (), torch.float32, (), forms)
    like = next(one for one in headers if one is not None)
    sizes = {one[1] for one in headers if one is not None}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the replicas of the first stage have images of different sizes in one step, {sorted(sizes)}: give all "
            "the same, which may be another in the next step"
        )
    parts = []
    for index, (shape, dtype) in enumerate(like[3]):
        pieces = []
        for source, count in zip(first, rows, strict=True):
            if rank == source and count:
                piece = rest[index].to(device).contiguous()
            else:
                piece = torch.empty((count, *shape), dtype=dtype, device=device)
            if count and placement.world_size > 1:
                dist.broadcast(piece, source)
            pieces.append(piece)
        parts.append(split.assemble(pieces))
    own = images if rank in first else None
    return Batch(split, own, like[1], like[2], tuple(parts), forms)


def _row_shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[1:])


def _broadcast_header(header: Any, source: int, transport: Transport) -> Any:
    buffer = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    data = b""
    if transport.rank == source:
        data = pickle.dumps((0, header))
        first = data if len(data) <= HEADER_BYTES else pickle.dumps((len(data), None))
        buffer[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    dist.broadcast(buffer, source, group=transport.control)
    length, value = pickle.loads(buffer.numpy().tobytes())
    if not length:
        return value
    # Names of files and the like are too long for it.
    rest = torch.frombuffer(bytearray(data or bytes(length)), dtype=torch.uint8)
    dist.broadcast(rest, source, group=transport.control)
    return pickle.loads(rest.numpy().tobytes())[1]
