"""Send a batch's targets from the first stage, and the network's outputs from the last stage, to all ranks."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cnnstrategies.codec import from_bytes, to_bytes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.microbatches import Images, Split
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.runtime.groups import broadcast_value

HEADER_BYTES = 1024
WORD = 8  # Bytes of an integer. A header begins with its length as an integer; tensors travel in buffers of integers.

Spec = tuple[tuple[int, ...], torch.dtype]  # The shape and the dtype of one row of a tensor.


class BatchHeader(NamedTuple):
    """Description of a batch's samples on one replica of the first stage. The replica sends it to all ranks.

    Attributes:
        rows: Number of samples.
        shapes: Shape of one image, for each tensor that the network takes.
        dtypes: Dtype of each tensor that the network takes.
        specs: For each other tensor of the batch, such as the targets: the shape and dtype of one row.
    """

    rows: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    specs: list[Spec]


@dataclass(frozen=True)
class Batch:
    """A global batch, as one rank holds it.

    Attributes:
        split: Division of the batch into microbatches.
        images: In the first stage, the rank's own images (n, C, H, W); None in other stages.
        image_shapes: Shape of one image, for each tensor that the network takes.
        image_dtypes: Dtype of each tensor that the network takes.
        rest: All other tensors (N, ...) of the global batch, such as targets. Their rows are in the order in which a
            single process would load them.
    """

    split: Split
    images: Images | None
    image_shapes: tuple[tuple[int, ...], ...]
    image_dtypes: tuple[torch.dtype, ...]
    rest: tuple[Tensor, ...]

    def rest_of(self, microbatch: int) -> tuple[Tensor, ...]:
        """Return the rows of the tensors in `rest` that belong to a microbatch."""
        return tuple(tensor[self.split.global_rows(microbatch, device=tensor.device)] for tensor in self.rest)


def share_batch(images: Images | None, rest: Sequence[Tensor], transport: Transport) -> Batch:
    """Send the targets and other tensors of a global batch from the first stage to all ranks. All ranks must call this.

    The images stay on the ranks of the first stage. The arguments have the same meaning as those of `Pipeline.share`.

    Returns:
        The batch. If no replica has samples, the batch has 0 samples.

    Raises:
        ConfigurationError: The replicas' images differ in size or dtype, or a tensor does not have one row per image.
    """
    transport.check_peers()
    local_images = images if transport.place.stage == 0 else None
    header = None if local_images is None or not len(tree_leaves(local_images)[0]) else _header(local_images, rest)
    headers = _all_headers(header, transport)
    rows = tuple(0 if header is None else header.rows for header in headers)
    split = Split(rows, transport.placement.runs[0])
    if not split.samples:
        return Batch(split, None, (), (), ())
    first = next(header for header in headers if header is not None)
    for quantity, values in (
        ("sizes", {header.shapes for header in headers if header is not None}),
        ("dtypes", {header.dtypes for header in headers if header is not None}),
    ):
        if len(values) > 1:
            texts = sorted(str(value[0] if len(value) == 1 else value) for value in values)
            raise ConfigurationError(
                f"the replicas of the first stage have images of different {quantity} in one step, "
                f"[{', '.join(texts)}]: give all replicas images of equal {quantity} in a step; the {quantity} may "
                "change from step to step"
            )
    all_rows = _send_to_all_ranks(rest, first.specs, split, transport)
    return Batch(split, local_images, first.shapes, first.dtypes, all_rows)


def _header(images: Images, rest: Sequence[Tensor]) -> BatchHeader:
    """Return the header of this replica's samples.

    Raises:
        ConfigurationError: A tensor does not have one row per image.
    """
    image_tensors = tree_leaves(images)
    rows = len(image_tensors[0])
    for tensor in (*image_tensors, *rest):
        if not isinstance(tensor, Tensor) or len(tensor) != rows:
            has_shape = isinstance(tensor, Tensor)
            item = f"a tensor of shape {tuple(tensor.shape)}" if has_shape else f"a {type(tensor).__name__}"
            raise ConfigurationError(
                f"a batch of {rows} images contains {item}: everything in a batch must be a tensor with one row per "
                "image"
            )
    shapes, dtypes = tuple(map(_row_shape, image_tensors)), tuple(tensor.dtype for tensor in image_tensors)
    return BatchHeader(rows, shapes, dtypes, [(_row_shape(tensor), tensor.dtype) for tensor in rest])


def _row_shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[1:])


def _all_headers(header: BatchHeader | None, transport: Transport) -> list[BatchHeader | None]:
    """Gather and return the headers of the first stage's replicas. All ranks must call this.

    The header of a replica without samples is None.
    """
    data = b"" if header is None else to_bytes(header)
    table = _gather_bytes(len(data).to_bytes(WORD, "little") + data[: HEADER_BYTES - WORD], HEADER_BYTES, transport)
    lengths = [int.from_bytes(entry[:WORD], "little") for entry in table]
    encoded = [entry[WORD : WORD + length] for entry, length in zip(table, lengths, strict=True)]
    # A header of many tensors can be longer than `HEADER_BYTES`. All headers are then gathered
    # again with the size of the longest header.
    if max(lengths) > HEADER_BYTES - WORD:
        table = _gather_bytes(data, max(lengths), transport)
        encoded = [entry[:length] for entry, length in zip(table, lengths, strict=True)]
    return [_read(encoded[rank]) for rank in transport.placement.ranks(0)]


def _gather_bytes(data: bytes, size: int, transport: Transport) -> list[bytes]:
    """Gather bytes from all ranks, and return each rank's bytes in rank order. All ranks must call this.

    Args:
        data: This rank's bytes.
        size: Number of bytes to which each rank's data is padded with zeros.
        transport: Transport of this rank.
    """
    local = torch.zeros(size, dtype=torch.uint8)
    if data:
        local[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    world = dist.get_world_size()
    if world == 1:
        return [local.numpy().tobytes()]
    gathered = local.new_empty(world * size)
    dist.all_gather_into_tensor(gathered, local, group=transport.control)
    table = gathered.numpy().tobytes()
    return [table[rank * size : (rank + 1) * size] for rank in range(world)]


@functools.lru_cache(maxsize=64)  # Most headers are equal to those of other ranks or earlier steps, so few are decoded.
def _read(data: bytes) -> BatchHeader | None:
    header: BatchHeader | None = from_bytes(data) if data else None
    return header


def _send_to_all_ranks(
    rest: Sequence[Tensor], specs: Sequence[Spec], split: Split, transport: Transport
) -> tuple[Tensor, ...]:
    """Send the first stage's tensors to all ranks, and return each tensor with the rows of all replicas.

    The rows are in the order in which a single process would load them. All ranks must call this. All tensors travel
    in one buffer, in a single broadcast or all-reduce.

    Args:
        rest: In the first stage, this replica's tensors; ignored in other stages.
        specs: For each tensor, the shape and dtype of one row.
        split: Division of the batch.
        transport: Transport of this rank.
    """
    # For each tensor and each replica: the index in the buffer at which the replica's rows begin, and the shape and
    # dtype of these rows.
    areas: list[list[tuple[int, tuple[int, ...], torch.dtype]]] = [[] for _ in specs]
    words = 0
    for rows in split.rows:
        for index, (shape, dtype) in enumerate(specs):
            areas[index].append((words, (rows, *shape), dtype))
            words += -(-rows * torch.Size(shape).numel() * dtype.itemsize // WORD) if rows else 0
    buffer = torch.zeros(words, dtype=torch.int64, device=transport.device)
    place = transport.place
    if place.stage == 0 and split.rows[place.replica]:
        for tensor, replica_areas in zip(rest, areas, strict=True):
            _section(buffer, *replica_areas[place.replica]).copy_(tensor)
    if transport.placement.world_size > 1 and words:
        if len(split.rows) == 1:
            dist.broadcast(buffer, transport.placement.ranks(0)[0])
        else:
            # At each index of the buffer, at most one rank has a value that is not zero, so the sum is this value.
            dist.all_reduce(buffer)
    return tuple(split.assemble([_section(buffer, *area) for area in replica_areas]) for replica_areas in areas)


def _section(buffer: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a section of a buffer of 64-bit integers as a view with the given shape and dtype.

    Args:
        buffer: The buffer.
        start: Index of the section's first integer.
        shape: Shape of the view.
        dtype: Dtype of the view.
    """
    count = torch.Size(shape).numel()
    used = buffer[start : start + -(-count * dtype.itemsize // WORD)]
    return used.view(torch.uint8)[: count * dtype.itemsize].view(dtype).view(shape)


class OutputGatherer:
    """Gatherer of the last stage's outputs. Every rank gets the outputs, in the order of the global batch."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.device = transport.device
        self._structures: dict[Hashable, Any] = {}

    def gather(self, split: Split, outputs: Mapping[int, Any], kind: Hashable) -> Any:
        """Return the network's outputs for the whole batch. All ranks must call this.

        Args:
            split: Division of the batch.
            outputs: In the last stage, the network's outputs for each microbatch of this rank. Empty in other stages.
            kind: Key of the outputs' structure. Batches with equal keys must have outputs of equal structures and
                dtypes, because the structure is sent only once for each key.
        """
        placement = self.transport.placement
        last = placement.stages - 1
        if kind not in self._structures:
            first = next(microbatch for microbatch, size in enumerate(split.sizes) if size)
            # Only shapes and dtypes are sent here: each tensor is replaced by a tensor of one row without storage.
            structure = tree_map_only(Tensor, _row, outputs.get(first))
            source = placement.rank_of(last, first)
            structure = broadcast_value(structure, source, group=self.transport.control)
            self._structures[kind] = tree_flatten(structure)
        leaves, tree = self._structures[kind]
        parts = {microbatch: tree_flatten(result)[0] for microbatch, result in outputs.items()}
        gathered = list(leaves)
        broadcasts: list[tuple[Tensor, Tensor, Tensor, dist.Work | None]] = []
        for index, row in enumerate(leaves):
            if not isinstance(row, Tensor):
                continue
            gathered[index] = torch.empty((split.samples, *row.shape), dtype=row.dtype, device=self.device)
            for rank in placement.ranks(last):
                microbatches = [m for m in placement.microbatches_of(rank) if split.sizes[m]]
                if not microbatches:
                    continue
                rows = split.global_rows(*microbatches, device=self.device)
                if rank == self.transport.rank:
                    # The other ranks receive into contiguous tensors, but `cat` keeps the memory format channels_last.
                    # The result is therefore made contiguous.
                    piece = torch.cat([parts[m][index] for m in microbatches]).contiguous()
                else:
                    piece = torch.empty((len(rows), *row.shape), dtype=row.dtype, device=self.device)
                work = dist.broadcast(piece, rank, async_op=True) if placement.world_size > 1 else None
                broadcasts.append((gathered[index], rows, piece, work))
        for output, rows, piece, work in broadcasts:
            if work is not None:
                work.wait()
            output[rows] = piece
        return tree_unflatten(gathered, tree)


def _row(tensor: Tensor) -> Tensor:
    """Return a tensor without storage that has the shape and dtype of one row of ``tensor``."""
    return torch.empty(tensor.shape[1:], dtype=tensor.dtype, device="meta")
