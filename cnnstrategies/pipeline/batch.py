"""The global batch: all ranks learn its sizes, and the last stage or every rank gets everything but the images."""

import functools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import TARGETS, Pending, Transport

HEADER_BYTES = 1024
WORD = 8  # bytes

Spec = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


@dataclass(frozen=True)
class Batch:
    """A global batch, as one rank knows it.

    Attributes:
        split: Its microbatches.
        images: The rank's own images (n, C, H, W) in the first stage; None elsewhere.
        image_shape: Shape of one image.
        image_dtype: Type of the images.
        rest: What the batch holds besides images, over all replicas and in the order of one process: targets (N, ...)
            for training. Empty where only the last stage has them.
        form: What kind of container it came in.
        parcels: In the last stage what each replica of the first sends of it, where that is not in ``rest``.
    """

    split: Split
    images: Tensor | None
    image_shape: tuple[int, ...]
    image_dtype: torch.dtype
    rest: tuple[Tensor, ...]
    form: str
    parcels: Mapping[int, "Parcel"] = field(default_factory=dict)

    def rest_of(self, microbatch: int) -> tuple[Tensor, ...]:
        """What belongs to a microbatch of this rank, in the last stage."""
        if not self.parcels:
            rows = self.split.global_rows(microbatch)
            return tuple(tensor[rows.to(tensor.device)] for tensor in self.rest)
        return self.parcels[microbatch % len(self.split.rows)].rest_of(microbatch)


class Parcel:
    """What one replica of the first stage has for the microbatches that one of the last runs.

    Args:
        microbatches: These, in order, and how many samples each has.
        tensors: The rows of all of them, or their transfers.
    """

    def __init__(self, microbatches: Mapping[int, int], tensors: Sequence[Tensor | Pending]) -> None:
        self._places: dict[int, slice] = {}
        start = 0
        for microbatch, size in microbatches.items():
            self._places[microbatch] = slice(start, start + size)
            start += size
        self._tensors = tensors

    def rest_of(self, microbatch: int) -> tuple[Tensor, ...]:
        """A microbatch's rows."""
        place = self._places[microbatch]
        return tuple((one.wait() if isinstance(one, Pending) else one)[place] for one in self._tensors)


def share_batch(
    images: Tensor | None,
    rest: Sequence[Tensor],
    form: str,
    microbatches: int,
    placement: Placement,
    transport: Transport,
    device: torch.device,
    everywhere: bool,
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
        everywhere: Bring ``rest`` to every rank; else straight to those of the last stage, each its own rows.

    Returns:
        The batch; it has 0 samples when no replica has any.

    Raises:
        ConfigurationError: A tensor has another number of rows than the images, a batch is not made of tensors, or
            the replicas have images of different sizes.
    """
    transport.settle()
    place = placement.place(transport.rank)
    own = images if place.stage == 0 else None
    header = None if own is None or not len(own) else _header(own, rest, form)
    headers = _all_headers(header, placement, transport)
    rows = tuple(0 if one is None else one[0][0][0] for one in headers)
    split = Split(rows, microbatches)
    if not split.samples:
        return Batch(split, None, (), torch.float32, (), form)
    (shape, dtype), specs, form = next(one for one in headers if one is not None)
    sizes = {(one[0][0][1:], one[0][1]) for one in headers if one is not None}
    if len(sizes) > 1:
        raise ConfigurationError(
            f"the replicas of the first stage have images of different sizes in one step, {sorted(map(str, sizes))}: "
            "give all the same, which may be another in the next step"
        )
    whole: tuple[Tensor, ...] = ()
    parcels: dict[int, Parcel] = {}
    if everywhere:
        whole = _bring_everywhere(rest, specs, split, placement, transport, device)
    elif placement.stages == 1:
        parcels = {place.replica: Parcel(_common(split, place.replica, 1, 0), [one.to(device) for one in rest])}
    elif place.stage == 0:
        _post(rest, split, placement, transport, device)
    elif place.stage == placement.stages - 1:
        parcels = _expect(specs, split, placement, transport, device)
    return Batch(split, own, shape[1:], dtype, whole, form, parcels)


def _header(images: Tensor, rest: Sequence[Tensor], form: str) -> Any:
    for tensor in rest:
        if not isinstance(tensor, Tensor) or len(tensor) != len(images):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigurationError(
                f"a batch of {len(images)} images comes with {shape}: everything in a batch must be a tensor "
                "with one row per image"
            )
    return (tuple(images.shape), images.dtype), [(tuple(one.shape), one.dtype) for one in rest], form


def _all_headers(header: Any, placement: Placement, transport: Transport) -> list[Any]:
    """Those of the first stage's replicas."""
    own = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    if header is not None:
        data = pickle.dumps(header)
        assert len(data) <= HEADER_BYTES, f"a header of {len(data)} bytes: too many tensors in a batch"
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyones = own.new_empty(placement.world_size * HEADER_BYTES)
    if placement.world_size > 1:
        dist.all_gather_into_tensor(everyones, own, group=transport.control)
    else:
        everyones = own
    table = everyones.numpy().tobytes()
    return [_read(table[rank * HEADER_BYTES : (rank + 1) * HEADER_BYTES]) for rank in placement.ranks(0)]


@functools.lru_cache(maxsize=64)  # Most are like others, and those of the next step like these.
def _read(data: bytes) -> Any:
    return pickle.loads(data) if any(data[:1]) else None


def _common(split: Split, replica: int, replicas: int, other: int) -> dict[int, int]:
    """Size of each microbatch that runs on this replica of the first stage and on another one of the last."""
    own = range(replica, split.microbatches, len(split.rows))
    return {m: split.sizes[m] for m in own if m % replicas == other and split.sizes[m]}


def _post(
    rest: Sequence[Tensor], split: Split, placement: Placement, transport: Transport, device: torch.device
) -> None:
    """Send each replica of the last stage the rows that it needs."""
    last = placement.stages - 1
    replica = placement.place(transport.rank).replica
    for other, rank in enumerate(placement.ranks(last)):
        microbatches = _common(split, replica, placement.replicas[last], other)
        if microbatches:
            for tensor in rest:
                piece = torch.cat([tensor[slice(*split.bounds[m])] for m in microbatches]).to(device)
                transport.owe(transport.send(piece, rank, TARGETS, "targets"))


def _expect(
    specs: Sequence[Spec], split: Split, placement: Placement, transport: Transport, device: torch.device
) -> dict[int, Parcel]:
    """Receive what :func:`_post` sends to this rank."""
    last = placement.stages - 1
    own = placement.place(transport.rank).replica
    parcels = {}
    for replica, rank in enumerate(placement.ranks(0)):
        microbatches = _common(split, replica, placement.replicas[last], own)
        if microbatches:
            rows = sum(microbatches.values())
            buffers = [torch.empty((rows, *shape[1:]), dtype=dtype, device=device) for shape, dtype in specs]
            coming = [transport.receive(buffer, rank, TARGETS, "targets") for buffer in buffers]
            for one in coming:
                transport.owe(one)
            parcels[replica] = Parcel(microbatches, coming)
    return parcels


def _bring_everywhere(
    rest: Sequence[Tensor],
    specs: Sequence[Spec],
    split: Split,
    placement: Placement,
    transport: Transport,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """All rows of each tensor on every rank, in the order of one process; one collective."""
    # Where each replica's rows of each tensor stand in a buffer.
    places: list[list[tuple[int, tuple[int, ...], torch.dtype]]] = [[] for _ in specs]
    words = 0
    for rows in split.rows:
        for index, (shape, dtype) in enumerate(specs):
            places[index].append((words, (rows, *shape[1:]), dtype))
            words += -(-rows * torch.Size(shape[1:]).numel() * dtype.itemsize // WORD) if rows else 0
    buffer = torch.zeros(words, dtype=torch.int64, device=device)
    place = placement.place(transport.rank)
    if place.stage == 0 and split.rows[place.replica]:
        for tensor, of_replicas in zip(rest, places, strict=True):
            _part(buffer, *of_replicas[place.replica]).copy_(tensor)
    if placement.world_size > 1 and words:
        if len(split.rows) == 1:
            dist.broadcast(buffer, placement.ranks(0)[0])
        else:
            dist.all_reduce(buffer)  # The others have nothing but zeros there.
    return tuple(split.assemble([_part(buffer, *one) for one in of_replicas]) for of_replicas in places)


def _part(buffer: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that lies in a buffer of words."""
    count = torch.Size(shape).numel()
    used = buffer[start : start + -(-count * dtype.itemsize // WORD)]
    return used.view(torch.uint8)[: count * dtype.itemsize].view(dtype).view(shape)
