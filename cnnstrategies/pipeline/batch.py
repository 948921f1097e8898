"""The global batch: its first-stage replicas tell all ranks its sizes, and send them everything but the images."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport

HEADER_BYTES = 1024


@dataclass(frozen=True)
class Batch:
    """A global batch, as one rank knows it.

    Attributes:
        split: Its microbatches.
        images: The rank's own images (n, C, H, W) in the first stage; None elsewhere.
        image_shape: Shape of one image.
        image_dtype: Type of the images.
        rest: What the batch holds besides images, over all replicas and in the order of one process: targets (N, ...)
            for training.
        form: What kind of container it came in.
    """

    split: Split
    images: Tensor | None
    image_shape: tuple[int, ...]
    image_dtype: torch.dtype
    rest: tuple[Tensor, ...]
    form: str


def share_batch(
    images: Tensor | None,
    rest: Sequence[Tensor],
    form: str,
    microbatches: int,
    placement: Placement,
    transport: Transport,
    device: torch.device,
) -> Batch:
    """Make the global batch known to all ranks; a collective.

    Args:
        images: This replica's images (n, C, H, W), with n = 0 or None where it has none; ignored after the first
            stage.
        rest: This replica's other tensors, each with n rows.
        form: What kind of container they came in.
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
    if rank in first and images is not None and len(images):
        for tensor in rest:
            if not isinstance(tensor, Tensor) or len(tensor) != len(images):
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ConfigurationError(
                    f"a batch of {len(images)} images comes with {shape}: everything in a batch must be a tensor "
                    "with one row per image"
                )
        header = (tuple(images.shape), images.dtype, [(tuple(t.shape), t.dtype) for t in rest], form)
    headers = [_broadcast_header(header, source, transport) for source in first]
    rows = tuple(0 if one is None else one[0][0] for one in headers)
    split = Split(rows, microbatches)
    if not split.samples:
        return Batch(split, None, (), torch.float32, (), form)
    like = next(one for one in headers if one is not None)
    sizes = {one[0][1:] for one in headers if one is not None}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the replicas of the first stage have images of different sizes in one step, {sorted(sizes)}: give all "
            "the same, which may be another in the next step"
        )
    parts = []
    for index, (shape, dtype) in enumerate(like[2]):
        pieces = []
        for source, count in zip(first, rows, strict=True):
            if rank == source and count:
                piece = rest[index].to(device).contiguous()
            else:
                piece = torch.empty((count, *shape[1:]), dtype=dtype, device=device)
            if count and placement.world_size > 1:
                dist.broadcast(piece, source)
            pieces.append(piece)
        parts.append(split.assemble(pieces))
    own = images if rank in first else None
    return Batch(split, own, like[0][1:], like[1], tuple(parts), like[3])


def _broadcast_header(header: Any, source: int, transport: Transport) -> Any:
    buffer = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    if transport.rank == source:
        data = pickle.dumps(header)
        assert len(data) <= HEADER_BYTES, f"a header of {len(data)} bytes: too many tensors in a batch"
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(buffer, source, group=transport.control)
    return pickle.loads(buffer.numpy().tobytes())
