"""The global batch, and what the network makes of it, on all ranks."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cnnstrategies.codec import CodecError, from_bytes, to_bytes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.pipeline.transport import Transport, broadcast_value

HEADER_BYTES = 1024
WORD = 8  # bytes
ENDED = (1 << 63) - 1  # in place of a header's length, by a rank that has no further batch

Spec = tuple[tuple[int, ...], torch.dtype]  # shape and type of a row of a tensor

Images = Tensor | tuple[Tensor, ...]  # A tuple where the network takes several.


class BatchHeader(NamedTuple):
    """What a replica of the first stage tells the others of its part of a batch."""

    rows: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    specs: list[Spec]
    form: Any


@dataclass(frozen=True)
class Batch:
    """A global batch, as one rank knows it.

    Attributes:
        images: The rank's own images (n, C, H, W) in the first stage; None elsewhere.
        image_shapes: Shape of one image, for each tensor that the network takes.
        rest: What the batch holds besides images, over all replicas and in the order of one process: targets (N, ...)
            for training.
        forms: What each replica of the first stage has sent along; None from those without samples.
    """

    split: Split
    images: Images | None
    image_shapes: tuple[tuple[int, ...], ...]
    image_dtypes: tuple[torch.dtype, ...]
    rest: tuple[Tensor, ...]
    forms: tuple[Any, ...]

    def rest_of(self, microbatch: int) -> tuple[Tensor, ...]:
        """What belongs to a microbatch."""
        return tuple(tensor[self.split.global_rows(microbatch, device=tensor.device)] for tensor in self.rest)


def share_batch(
    images: Images | None,
    rest: Sequence[Tensor],
    form: Any,
    transport: Transport,
    usual: int | None = None,
) -> Batch:
    """Make the global batch known to all ranks; see `Pipeline.share`. It has 0 samples when no replica has any."""
    transport.check_peers()
    own = images if transport.place.stage == 0 else None
    header = None if own is None or not len(tree_leaves(own)[0]) else _header(own, rest, form)
    headers = _all_headers(header, transport)
    rows = tuple(0 if one is None else one.rows for one in headers)
    forms = tuple(None if one is None else one.form for one in headers)
    split = Split(rows, transport.placement.runs[0], usual)
    if not split.samples:
        return Batch(split, None, (), (), (), forms)
    like = next(one for one in headers if one is not None)
    for what, found in (
        ("sizes", {one.shapes for one in headers if one is not None}),
        ("types", {one.dtypes for one in headers if one is not None}),
    ):
        if len(found) > 1:
            listed = sorted(str(one[0] if len(one) == 1 else one) for one in found)
            raise ConfigurationError(
                f"the replicas of the first stage have images of different {what} in one step, "
                f"[{', '.join(listed)}]: give all the same, which may be another in the next step"
            )
    whole = _bring_everywhere(rest, like.specs, split, transport)
    return Batch(split, own, like.shapes, like.dtypes, whole, forms)


def _header(images: Images, rest: Sequence[Tensor], form: Any) -> BatchHeader:
    several = tree_leaves(images)
    rows = len(several[0])
    for tensor in (*several, *rest):
        if not isinstance(tensor, Tensor) or len(tensor) != rows:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigurationError(
                f"a batch of {rows} images comes with {shape}: everything in a batch must be a tensor with one row "
                "per image"
            )
    shapes, dtypes = tuple(map(_row_shape, several)), tuple(one.dtype for one in several)
    return BatchHeader(rows, shapes, dtypes, [(_row_shape(one), one.dtype) for one in rest], form)


def _row_shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[1:])


def _all_headers(header: BatchHeader | None, transport: Transport) -> list[BatchHeader | None]:
    """Those of the first stage's replicas."""
    try:
        data = b"" if header is None else to_bytes(header)
    except CodecError as error:
        raise ConfigurationError(f"a batch goes to all ranks, and {error}, or leave it out in collate_fn") from error
    table = _gather_bytes(len(data).to_bytes(WORD, "little") + data[: HEADER_BYTES - WORD], HEADER_BYTES, transport)
    lengths = [int.from_bytes(one[:WORD], "little") for one in table]
    _check_ends(lengths)
    found = [one[WORD : WORD + length] for one, length in zip(table, lengths, strict=True)]
    if max(lengths) > HEADER_BYTES - WORD:  # Names of files and the like.
        table = _gather_bytes(data, max(lengths), transport)
        found = [one[:length] for one, length in zip(table, lengths, strict=True)]
    return [_read(found[rank]) for rank in transport.placement.ranks(0)]


def end_together(transport: Transport) -> None:
    """See that no rank shares a further batch, in the place of :func:`share_batch`; else it is named on all ranks."""
    table = _gather_bytes(ENDED.to_bytes(WORD, "little"), HEADER_BYTES, transport)
    _check_ends([int.from_bytes(one[:WORD], "little") for one in table])


def _check_ends(lengths: Sequence[int]) -> None:
    ended = [rank for rank, length in enumerate(lengths) if length == ENDED]
    if 0 < len(ended) < len(lengths):
        others = [rank for rank, length in enumerate(lengths) if length != ENDED]
        raise ConfigurationError(
            f"{_ranks(ended)} ended an epoch, or training, where {_ranks(others)} went on with a further batch: stop "
            "all ranks at the same step, as with trainer.should_stop on each of them"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _gather_bytes(data: bytes, size: int, transport: Transport) -> list[bytes]:
    """Those of every rank, filled up with zeros."""
    own = torch.zeros(size, dtype=torch.uint8)
    if data:
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    world = dist.get_world_size()
    if world == 1:
        return [own.numpy().tobytes()]
    everyones = own.new_empty(world * size)
    dist.all_gather_into_tensor(everyones, own, group=transport.control)
    table = everyones.numpy().tobytes()
    return [table[rank * size : (rank + 1) * size] for rank in range(world)]


@functools.lru_cache(maxsize=64)  # Most are like others, and those of the next step like these.
def _read(data: bytes) -> BatchHeader | None:
    header: BatchHeader | None = from_bytes(data) if data else None
    return header


def _bring_everywhere(
    rest: Sequence[Tensor], specs: Sequence[Spec], split: Split, transport: Transport
) -> tuple[Tensor, ...]:
    """All rows of each tensor on every rank, in the order of one process; one collective."""
    # Where each replica's rows of each tensor stand in a buffer.
    places: list[list[tuple[int, tuple[int, ...], torch.dtype]]] = [[] for _ in specs]
    words = 0
    for rows in split.rows:
        for index, (shape, dtype) in enumerate(specs):
            places[index].append((words, (rows, *shape), dtype))
            words += -(-rows * torch.Size(shape).numel() * dtype.itemsize // WORD) if rows else 0
    buffer = torch.zeros(words, dtype=torch.int64, device=transport.device)
    place = transport.place
    if place.stage == 0 and split.rows[place.replica]:
        for tensor, of_replicas in zip(rest, places, strict=True):
            _part(buffer, *of_replicas[place.replica]).copy_(tensor)
    if transport.placement.world_size > 1 and words:
        if len(split.rows) == 1:
            dist.broadcast(buffer, transport.placement.ranks(0)[0])
        else:
            dist.all_reduce(buffer)  # The others have nothing but zeros there.
    return tuple(split.assemble([_part(buffer, *one) for one in of_replicas]) for of_replicas in places)


def _part(buffer: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that lies in a buffer of words."""
    count = torch.Size(shape).numel()
    used = buffer[start : start + -(-count * dtype.itemsize // WORD)]
    return used.view(torch.uint8)[: count * dtype.itemsize].view(dtype).view(shape)


class OutputGatherer:
    """Sends the last stage's outputs to every rank, in the order of the global batch."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.device = transport.device
        self._structures: dict[Hashable, Any] = {}

    def gather(self, split: Split, outputs: Mapping[int, Any], kind: Hashable) -> Any:
        """What the network would have returned for the whole batch; a collective.

        Args:
            split: Of the batch.
            outputs: Those of this rank's microbatches, in the last stage.
            kind: What their structure and types depend on.
        """
        placement = self.transport.placement
        last = placement.stages - 1
        if kind not in self._structures:
            first = next(microbatch for microbatch, size in enumerate(split.sizes) if size)
            # Each tensor's row, by shape and type, and the plain leaves.
            rows = tree_map_only(Tensor, _row, outputs.get(first))
            source = placement.rank_of(last, first)
            known = broadcast_value(rows, source, group=self.transport.control)
            self._structures[kind] = tree_flatten(known)
        leaves, tree = self._structures[kind]
        parts = {microbatch: tree_flatten(result)[0] for microbatch, result in outputs.items()}
        gathered = list(leaves)
        under_way: list[tuple[Tensor, Tensor, Tensor, dist.Work | None]] = []
        for index, row in enumerate(leaves):
            if not isinstance(row, Tensor):
                continue
            gathered[index] = torch.empty((split.samples, *row.shape), dtype=row.dtype, device=self.device)
            for rank in placement.ranks(last):
                own = [m for m in placement.own(rank) if split.sizes[m]]
                if not own:
                    continue
                rows = split.global_rows(*own, device=self.device)
                if rank == self.transport.rank:
                    # In channels_last, which cat keeps, others would take the numbers for those of another layout.
                    piece = torch.cat([parts[m][index] for m in own]).contiguous()
                else:
                    piece = torch.empty((len(rows), *row.shape), dtype=row.dtype, device=self.device)
                work = dist.broadcast(piece, rank, async_op=True) if placement.world_size > 1 else None
                under_way.append((gathered[index], rows, piece, work))
        for whole, rows, piece, work in under_way:
            if work is not None:
                work.wait()
            whole[rows] = piece
        return tree_unflatten(gathered, tree)


def _row(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape[1:], dtype=tensor.dtype, device="meta")
