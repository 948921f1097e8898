"""Determine the costs of dividing images: the operations run by the rules for divided tensors, without values."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.planning.image_parts import PartCosts
from cnnstrategies.planning.measure import AUTOCAST
from cnnstrategies.planning.measure_bytes import META, on_meta
from cnnstrategies.spatial import RowsTensor, SpatialParts
from cnnstrategies.spatial.layout import Bounds
from cnnstrategies.spatial.requested_rows import RequestedRows

# Number of samples of the batch for which messages are counted. Batch norm needs two values for each channel.
SAMPLES = 2
MOST_PARTS = 8  # Largest number of parts that is tried.
# Number of times that a small network runs, to measure the time of a rule.
REPEATS = 20


def part_costs(
    traced: fx.GraphModule, images: Images, parts: int, axis: int | None, rule: float = 0.0, compact: float = 1.0
) -> PartCosts:
    """Return the costs of a network with images that are divided, in a forward and a backward.

    The ranks run the network on the meta device, whose tensors have a shape but no values, by the rules of
    :class:`SpatialParts`. So the messages are those of the training.

    Args:
        traced: The traced network, which is not changed.
        images: Inputs of the network.
        parts: Number of parts of an image.
        axis: The dimension that is divided; None for the longest one.
        rule: Seconds that an operation takes longer if its operands are divided; see :func:`rule_seconds`.
        compact: Bytes of a value in the training as a multiple of its bytes here, for example 0.5 with autocast.

    Raises:
        Exception: The network cannot run on the meta device.
    """
    (costs,) = _costs(traced, images, [parts], axis, rule, compact)
    return costs


def _costs(
    traced: fx.GraphModule, images: Images, numbers: Sequence[int], axis: int | None, rule: float, compact: float
) -> Iterator[PartCosts]:
    """Yield the costs of a network for several numbers of parts. The other arguments are those of `part_costs`."""
    network = on_meta(traced)
    batch: Images = tree_map(
        lambda image: torch.empty((SAMPLES, *image.shape[1:]), dtype=image.dtype, device=META), images
    )
    dimension = divided_axis(tree_leaves(batch)[0]) if axis is None else axis
    whole, factor = _walk(network, batch, 0, 1, dimension), compact / SAMPLES
    for parts in numbers:
        # The inner ranks have two neighbours, and are alike but for rounding.
        walks = {rank: _walk(network, batch, rank, parts, dimension) for rank in sorted({0, parts // 2, parts - 1})}
        ranks = [walks.get(rank) or walks[parts // 2] for rank in range(parts)]
        yield PartCosts(
            parts=parts,
            shares=tuple(walk.kept / max(whole.kept, 1) for walk in ranks),
            sent_bytes=tuple(walk.sent * factor for walk in ranks),
            busiest_bytes=max(max(walk.sent, walk.received) for walk in ranks) * factor,
            early_bytes=max(max(walk.early_sent, walk.early_received) for walk in ranks) * factor,
            exchanges=max(walk.exchanges for walk in ranks),
            summed_bytes=max(walk.summed for walk in ranks),
            sums=max(walk.sums for walk in ranks),
            gradient_bytes=max(walk.gradients for walk in ranks),
            window_bytes=max(walk.window for walk in ranks) * factor,
            seconds=rule * max(walk.operations for walk in ranks),
            gathers=ranks[0].gathers,
        )


def possible_parts(
    traced: fx.GraphModule, images: Images, devices: int, device: torch.device, precision: str, axis: int | None = None
) -> tuple[tuple[PartCosts, ...], str]:
    """Return the costs of a network for each number of parts that divides the devices into groups of equal size.

    Args:
        traced: The traced network, which is not changed.
        images: Inputs of the network.
        devices: Number of devices.
        device: Device of the training.
        precision: Precision of the trainer, such as ``bf16-mixed``.
        axis: The dimension that is divided; None for the longest one.

    Returns:
        The costs, and the reason why there are none; an empty reason if there are costs, or if there is one device.
    """
    numbers = [parts for parts in range(2, min(devices, MOST_PARTS) + 1) if devices % parts == 0]
    if not numbers:
        return (), ""
    if any(image.dim() < 3 for image in tree_leaves(images)):
        return (), "the inputs of the network are not images"
    rule, compact = rule_seconds() if device.type == "cpu" else 0.0, 0.5 if precision in AUTOCAST else 1.0
    try:
        return tuple(_costs(traced, images, numbers, axis, rule, compact)), ""
    # Any operation of the network can fail on the meta device.
    except Exception as error:
        return (), f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def rule_seconds() -> float:
    """Measure the seconds that an operation on a CPU takes longer if its operands are divided.

    The mean of the operations of a convolution, batch norm and an activation on small images is measured.
    """
    network = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    images = torch.zeros(1, 8, 8, 8)
    walks = [[_walk(network, images, 0, parts, 2) for _ in range(REPEATS)] for parts in (1, 2)]
    plain, divided = (min(walk.seconds for walk in runs) for runs in walks)
    return max(0.0, divided - plain) / walks[1][0].operations


def divided_axis(images: Tensor) -> int:
    """Return the longest dimension of images, apart from batch and channels; of equal ones the first.

    Args:
        images: Images of shape (batch, channels, ...), with at least one more dimension.
    """
    return max(range(2, images.dim()), key=lambda dimension: (images.shape[dimension], -dimension))


@dataclass
class PartWalk:
    """Messages, memory and time of one rank in a forward and a backward.

    Attributes:
        exchanges: Number of exchanges of rows.
        sent: Bytes of rows that the rank sends.
        received: Bytes of rows that the rank receives.
        early_sent: Bytes of rows that the rank sends while an operation computes.
        early_received: Bytes of rows that the rank receives while an operation computes.
        sums: Number of sums over the ranks for which the rank waits.
        summed: Bytes of these sums.
        gradients: Bytes of the gradients of parameters that are summed during the backward.
        kept: Bytes of the tensors that autograd keeps, apart from parameters.
        window: Bytes of the largest copy of rows together with those of other ranks.
        operations: Number of operations with divided operands.
        seconds: Processor time.
        gathers: Operations that have gathered all rows.
    """

    exchanges: int = 0
    sent: int = 0
    received: int = 0
    early_sent: int = 0
    early_received: int = 0
    sums: int = 0
    summed: int = 0
    gradients: int = 0
    kept: int = 0
    window: int = 0
    operations: int = 0
    seconds: float = 0.0
    gathers: tuple[str, ...] = ()


class _CountingLink:
    """A connection that counts messages, and sends nothing."""

    def __init__(self, walk: PartWalk, rank: int, count: int) -> None:
        self._walk, self.rank, self.count = walk, rank, count

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Callable[[], None]:
        self._walk.exchanges += bool(sends or receives)
        self._walk.sent += sum(tensor.nbytes for tensor in sends.values())
        self._walk.received += sum(tensor.nbytes for tensor in receives.values())
        return lambda: None

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        self._walk.sums += 1
        self._walk.summed += tensor.nbytes
        return tensor.clone()

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        self._walk.gradients += tensor.nbytes
        return lambda: None


class _CountingParts(SpatialParts):
    """The rules for divided tensors, which note operations, rows that are requested early, and the largest copy."""

    def __init__(self, walk: PartWalk, rank: int, count: int) -> None:
        super().__init__(_CountingLink(walk, rank, count))
        self._walk, self._is_early = walk, True

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by the rules, and count it."""
        self._walk.operations += 1
        return super().run(func, args, kwargs)

    def fetch(self, rows: Tensor, axis: int, held: Bounds, wanted: Bounds, fill: float = 0) -> Tensor:
        """Return the rows that this rank wants, for which an operation waits before it computes."""
        self._is_early = False
        try:
            return super().fetch(rows, axis, held, wanted, fill)
        finally:
            self._is_early = True

    def request(self, rows: Tensor, axis: int, held: Bounds, wanted: Bounds) -> RequestedRows:
        """Begin to fetch the rows that this rank wants, and count them if an operation computes meanwhile."""
        walk = self._walk
        sent, received = walk.sent, walk.received
        requested = super().request(rows, axis, held, wanted)
        if self._is_early:
            walk.early_sent += walk.sent - sent
            walk.early_received += walk.received - received
        return requested

    def note_copy(self, copied: Tensor) -> None:
        """Note the bytes of a copy of rows."""
        self._walk.window = max(self._walk.window, copied.nbytes)


def _walk(network: nn.Module, batch: Images, rank: int, parts: int, axis: int) -> PartWalk:
    """Run a forward and a backward of one rank; of one device if there is one part."""
    walk = PartWalk()
    saved: dict[int, Any] = {}  # The storages, by their identity on the meta device, where storages have no address.
    with _CountingParts(walk, rank, parts) as rules:
        images: Images = tree_map(lambda image: rules.scatter(image, axis), batch) if parts > 1 else batch

        def pack(tensor: Tensor) -> Tensor:
            rows = tensor.rows if isinstance(tensor, RowsTensor) else tensor
            storage = rows.untyped_storage()
            saved[id(storage)] = storage
            return tensor

        start = time.thread_time()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = network(images)
        roots = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor) and tensor.requires_grad]
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        walk.seconds = time.thread_time() - start
    state = {id(tensor.untyped_storage()) for tensor in (*network.parameters(), *network.buffers())}
    walk.kept = sum(storage.nbytes() for identity, storage in saved.items() if identity not in state)
    walk.gathers = tuple(f"{operation} at {line}" for operation, line in rules.gathers)
    return walk
