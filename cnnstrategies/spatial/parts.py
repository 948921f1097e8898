"""The parts of tensors on all ranks: rows are handed out, fetched from other ranks, and gathered."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

import torch
from torch import Tensor

from cnnstrategies._torch_private import tracked_views
from cnnstrategies.placed.call_site import call_site
from cnnstrategies.placed.messages import DivergedError, LinkError
from cnnstrategies.spatial.gradient_sums import GradientSums
from cnnstrategies.spatial.layout import Bounds, RowLayout, bounds, scaled
from cnnstrategies.spatial.link import PartsLink
from cnnstrategies.spatial.requested_rows import RequestedRows, overlap, with_length
from cnnstrategies.spatial.rows_tensor import RowsTensor, in_memory_order, local_shape, memory_format_of
from cnnstrategies.spatial.runner import run

# Dtypes of tensors that a rank hands out, which has a number in the message about the tensor's form.
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)  # fmt: skip
_MOST_DIMENSIONS = 8


@dataclass
class Gathers:
    """Gathers of one operation at one line of the program.

    Attributes:
        calls: Number of operations.
        received_bytes: Bytes that this rank has received for them.
    """

    calls: int = 0
    received_bytes: int = 0


class SpatialParts:
    """One rank's rules for divided tensors, and its messages to the other ranks.

    All ranks run the same program with equal values and equal random number generators. ::

        with SpatialParts(GroupLink(group)) as parts:
            images = parts.scatter(images, axis=-2)    # Every rank has all images, and keeps its own rows.
            loss = criterion(network(images), parts.scatter(targets, axis=-2))
            loss.backward()                            # Parameters get the gradients of the whole images.

    Args:
        link: Connection to the other ranks.

    Attributes:
        rank: This rank.
        count: Number of ranks.
        gathers: By operation and line of the program, what was gathered because an operation needs all rows. The line
            is empty for gradients of parameters.
        sent_bytes: Bytes that this rank has sent to other ranks, apart from sums.
        operation: The operation that runs, for error messages.
        describe: Function that returns a text that names a rank, for error messages.
        note_loss: Function that is called with the message of a `DivergedError` before it is raised; None for none.
        gradient_sums: Sums of gradients, by the number of the backward that computes them.
        checks_order: Whether the ranks compare their operations before each message. Otherwise sums of different
            operations, which only some ranks run, can be taken for each other.
        hooked: Identities of the parameters that have hooks on any rank, as far as the ranks have compared them.
    """

    def __init__(self, link: PartsLink) -> None:
        self._link = link
        self.rank, self.count = link.rank, link.count
        self.gathers: defaultdict[tuple[str, str], Gathers] = defaultdict(Gathers)
        self.sent_bytes = 0
        self.operation = "no operation"
        self.describe: Callable[[int], str] = "rank {}".format
        self.note_loss: Callable[[str], None] | None = None
        self.gradient_sums: WeakValueDictionary[int, GradientSums] = WeakValueDictionary()
        self.checks_order = False
        self.hooked: set[int] = set()
        self._tracking: list[Any] = []

    def __enter__(self) -> "SpatialParts":
        """Let autograd repeat views of divided tensors that the program writes, instead of using their strides."""
        self._tracking.append(tracked_views())
        return self

    def __exit__(self, *_: object) -> None:
        """Let autograd do as before."""
        self._tracking.pop().__exit__(None, None, None)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by the rules."""
        return run(self, func, args, kwargs)

    def bounds(self, size: int) -> Bounds:
        """Return the rows of each rank."""
        return bounds(size, self.count)

    def own(self, size: int) -> int:
        """Return the number of this rank's rows."""
        low, high = bounds(size, self.count)[self.rank]
        return high - low

    # Tensors of the program.

    def scatter(self, whole: Tensor, axis: int) -> Tensor:
        """Return a divided tensor, or the tensor itself if it has too few rows. Every rank has the whole tensor.

        Args:
            whole: The tensor.
            axis: The dimension that is divided.
        """
        axis %= whole.dim()
        layout = RowLayout(axis, whole.shape[axis])
        if self._has_few_rows(layout):
            return whole
        return RowsTensor.create(
            self, self.take(whole, layout).contiguous(memory_format=memory_format_of(whole)), layout
        )

    def hand_out(
        self, whole: Tensor | None, axis: int, source: int, device: torch.device, pins: bool = False
    ) -> Tensor:
        """Return a divided tensor that only one rank has. The rank sends each rank its rows; all rows if they are few.

        Args:
            whole: The tensor on the rank that has it.
            axis: The dimension that is divided.
            source: The rank that has the tensor.
            device: Device of the rows.
            pins: Whether the result is in pinned memory of the CPU.
        """
        self.operation = "the next batch"
        form = torch.zeros(_MOST_DIMENSIONS + 3, dtype=torch.int64)
        if self.rank == source:
            assert whole is not None
            is_channels_last = memory_format_of(whole) is not torch.contiguous_format
            values = (_DTYPES.index(whole.dtype), is_channels_last, whole.dim(), *whole.shape)
            form[: len(values)] = torch.tensor(values)
        kind, is_channels_last, dimensions, *shape = self.reduce(form.to(device)).tolist()
        shape, axis = shape[:dimensions], axis % dimensions
        layout = RowLayout(axis, shape[axis])
        memory_format = torch.contiguous_format
        if is_channels_last:
            memory_format = torch.channels_last if dimensions == 4 else torch.channels_last_3d
        rows = torch.empty(
            local_shape(shape, layout, self.own(layout.size)),
            dtype=_DTYPES[kind], device=device, memory_format=memory_format, pin_memory=pins,
        )  # fmt: skip
        # The rows are sent as they are in memory, where the dimensions may be in another order.
        sends = {}
        if self.rank == source:
            assert whole is not None
            for peer, (low, high) in enumerate(self.bounds(layout.size)):
                piece = whole.narrow(axis, low, high - low).to(device).contiguous(memory_format=memory_format)
                if peer == self.rank:
                    rows.copy_(piece)
                else:
                    sends[peer] = in_memory_order(piece)
        self._post(sends, {source: in_memory_order(rows)} if self.rank != source else {})()
        result = self.with_enough_rows(RowsTensor.create(self, rows, layout))
        return result if isinstance(result, RowsTensor) or not pins else result.pin_memory()

    def with_enough_rows(self, tensor: Tensor) -> Tensor:
        """Return a tensor, or all its rows on all ranks if a rank has fewer than two of them.

        The strides of a single row do not say in which order the dimensions are in memory. Ranks with one row and with
        several rows would then differ in the strides that the program sees, and torch chooses operations by strides.
        """
        if not isinstance(tensor, RowsTensor) or tensor.row_layout is None or not self._has_few_rows(tensor.row_layout):
            return tensor
        whole, memory_format = self._gathered(tensor.rows, tensor.row_layout), memory_format_of(tensor)
        # A rank without rows does not know the format. The message is from CPU to CPU, so no GPU is waited for.
        is_known = torch.tensor([memory_format is not torch.contiguous_format])
        if whole.dim() in (4, 5) and whole.device.type != "meta" and self.reduce(is_known, "max").item():
            memory_format = torch.channels_last if whole.dim() == 4 else torch.channels_last_3d
        return whole.contiguous(memory_format=memory_format)

    def _has_few_rows(self, layout: RowLayout) -> bool:
        return self.count > 1 and layout.size < 2 * self.count

    def gather(self, tensor: Tensor, why: str, place: str | None = None) -> Tensor:
        """Return a tensor with all rows on all ranks, and record the operation that needs them.

        Args:
            tensor: The tensor.
            why: Name of the operation.
            place: Line of the program that needs the rows; by default the line that runs, and "" for none.
        """
        if not isinstance(tensor, RowsTensor):
            return tensor
        if tensor.row_layout is None:
            return tensor.rows
        layout, self.operation = tensor.row_layout, why
        whole = self._gathered(tensor.rows, layout)
        record = self.gathers[why, call_site() if place is None else place]
        record.calls += 1
        record.received_bytes += whole.nbytes - tensor.rows.nbytes
        # The dimensions have the same order in memory as on one device: the order of random numbers depends on it.
        strides = tensor.stride()
        order = sorted(range(whole.dim()), key=lambda dimension: -strides[dimension])
        return whole.permute(order).contiguous().permute([order.index(dimension) for dimension in range(whole.dim())])

    def plain_gradients(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Give plain gradients to parameters whose gradients are divided, such as those of position embeddings.

        Args:
            named_parameters: Parameters with their names, for the records of what was gathered.
        """
        for name, parameter in named_parameters:
            if isinstance(parameter.grad, RowsTensor):
                parameter.grad = self.gather(parameter.grad, f"the gradient of {name}", "")

    # Parts of tensors, for the rules.

    def take(self, whole: Tensor, layout: RowLayout) -> Tensor:
        """Return this rank's part of a tensor that all ranks have."""
        low, high = self.bounds(layout.size)[self.rank]
        if layout.outer == 1:
            return whole.narrow(layout.axis, low * layout.inner, (high - low) * layout.inner)
        blocks = whole.reshape(_unflattened(whole, layout, layout.size))
        return blocks.narrow(layout.axis + 1, low, high - low).flatten(layout.axis, layout.axis + 2)

    def part(self, tensor: Tensor, layout: RowLayout, why: str = "another layout") -> Tensor:
        """Return this rank's part of a tensor, which is plain or divided in any way."""
        if not isinstance(tensor, RowsTensor) or tensor.row_layout is None:
            return self.take(tensor.rows if isinstance(tensor, RowsTensor) else tensor, layout)
        present = tensor.row_layout
        if present == layout:
            return tensor.rows
        if present.axis == layout.axis and present.outer == layout.outer == 1:
            held, wanted = self.bounds(present.size), self.bounds(layout.size)
            return self.fetch(tensor.rows, layout.axis, scaled(held, present.inner), scaled(wanted, layout.inner))
        return self.take(self.gather(tensor, why), layout)

    def fetch(self, rows: Tensor, axis: int, held: Bounds, wanted: Bounds, fill: float = 0) -> Tensor:
        """Return the rows that this rank wants, which it gets from the ranks that have them.

        Args:
            rows: This rank's rows.
            axis: Dimension of the rows.
            held: The rows that each rank has.
            wanted: The rows that each rank wants. Rows that no rank has are filled.
            fill: Value of these rows.
        """
        return self.request(rows, axis, held, wanted).rows(*wanted[self.rank], fill)

    def request(self, rows: Tensor, axis: int, held: Bounds, wanted: Bounds) -> "RequestedRows":
        """Begin to fetch the rows that this rank wants. The arguments are those of :meth:`fetch`."""
        start = held[self.rank][0]
        sends, receives = {}, {}
        for peer in range(self.count):
            if peer != self.rank:
                first, last = overlap(held[self.rank], wanted[peer])
                if first < last:
                    sends[peer] = rows.narrow(axis, first - start, last - first).contiguous()
                first, last = overlap(held[peer], wanted[self.rank])
                if first < last:
                    receives[peer] = (first, rows.new_empty(with_length(rows, axis, last - first)))
        wait = self._post(sends, {peer: piece for peer, (_, piece) in receives.items()})
        received = [receives[peer] for peer in sorted(receives)]
        return RequestedRows(rows, axis, held[self.rank], received, wait, self.note_copy)

    def note_copy(self, copied: Tensor) -> None:
        """Do nothing. A subclass may note a copy of rows together with rows of other ranks."""

    def give_back(self, values: Tensor, axis: int, held: Bounds, wanted: Bounds) -> Tensor:
        """Return the sums of values for this rank's rows, which several ranks have computed. Adjoint of :meth:`fetch`.

        Args:
            values: Values for the rows that this rank has wanted.
            axis: Dimension of the rows.
            held: The rows that each rank has.
            wanted: The rows for which each rank has values. Values for rows that no rank has are dropped.
        """
        (start, end), (low, _) = held[self.rank], wanted[self.rank]
        first, last = overlap(held[self.rank], wanted[self.rank])
        memory_format = memory_format_of(values)
        if (first, last) == (start, end) and first < last:
            total = values.narrow(axis, first - low, last - first).contiguous(memory_format=memory_format)
        else:
            shape = with_length(values, axis, end - start)
            total = torch.empty(shape, dtype=values.dtype, device=values.device, memory_format=memory_format).zero_()
            if first < last:
                total.narrow(axis, first - start, last - first).copy_(values.narrow(axis, first - low, last - first))
        return self.add_returned(
            total, lambda first, last: values.narrow(axis, first - low, last - first), axis, held, wanted
        )

    def add_returned(
        self, total: Tensor, piece: Callable[[int, int], Tensor], axis: int, held: Bounds, wanted: Bounds
    ) -> Tensor:
        """Send values to the ranks that have their rows, and add to ``total`` the values that other ranks send.

        Args:
            total: Values for this rank's rows.
            piece: Function that returns this rank's values for a range of other ranks' rows.
            axis: Dimension of the rows.
            held: The rows that each rank has.
            wanted: The rows for which each rank has values.
        """
        sends, receives = {}, {}
        for peer in range(self.count):
            if peer != self.rank:
                first, last = overlap(held[peer], wanted[self.rank])
                if first < last:
                    sends[peer] = piece(first, last).contiguous()
                first, last = overlap(held[self.rank], wanted[peer])
                if first < last:
                    receives[peer] = total.new_empty(with_length(total, axis, last - first))
        self._post(sends, receives)()
        for peer in sorted(receives):
            first, last = overlap(held[self.rank], wanted[peer])
            total.narrow(axis, first - held[self.rank][0], last - first).add_(receives[peer])
        return total

    def reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        """Return the sum, maximum or minimum of a tensor over the ranks."""
        if self.count == 1:
            return tensor
        self._check_order(f"{operation} of {tuple(tensor.shape)} {tensor.dtype}")
        try:
            return self._link.reduce(tensor, operation)
        except LinkError as error:
            raise self.diverged(error) from error

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of tensors of one dtype over the ranks, in one message."""
        if self.count == 1 or len(tensors) < 2:
            return [self.reduce(tensor) for tensor in tensors]
        total = self.reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        pieces = torch.split(total, [tensor.numel() for tensor in tensors])
        return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum a tensor over the ranks in place, and return a function that waits for the sum."""
        self._check_order(f"sum of {tuple(tensor.shape)} {tensor.dtype}")
        return self._begun(lambda: self._link.begin_sum(tensor))

    def _gathered(self, rows: Tensor, layout: RowLayout) -> Tensor:
        axis, size = layout.axis, layout.size
        if layout.outer > 1:
            blocks = rows.reshape(_unflattened(rows, layout, self.own(size)))
            return self._gathered(blocks, RowLayout(axis + 1, size)).flatten(axis, axis + 2)
        held = scaled(self.bounds(size), layout.inner)
        return self.fetch(rows, axis, held, ((0, size * layout.inner),) * self.count)

    def _post(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Callable[[], None]:
        self._check_order("rows")
        self.sent_bytes += sum(tensor.nbytes for tensor in sends.values())
        return self._begun(lambda: self._link.exchange(sends, receives))

    def _begun(self, begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Begin a message, and return a function that waits for its end. Both name the operation if they fail."""
        try:
            wait = begin()
        except LinkError as error:
            raise self.diverged(error) from error

        def waiting() -> None:
            try:
                wait()
            except LinkError as error:
                raise self.diverged(error) from error

        return waiting

    def _check_order(self, message: str) -> None:
        """Check that all ranks have come to the same message of the same operation. All ranks must call this.

        Args:
            message: The message, as a text that is the same on all ranks.

        Raises:
            DivergedError: Another rank is at another message or operation.
        """
        if not self.checks_order or self.count == 1:
            return
        number = crc32(f"{self.operation}: {message}".encode())
        try:
            # On the CPU, so that no device is waited for.
            most, least = self._link.reduce(torch.tensor([number, -number]), "max").tolist()
        except LinkError as error:
            raise self.diverged(error) from error
        if most != -least:
            text = (
                f"{self.describe(self.rank)} is in {self.operation} at {call_site()}, but another rank is in another "
                "operation: all ranks that have parts of the same images must run the same operations in the same order"
            )
            if self.note_loss is not None:
                self.note_loss(text)
            raise DivergedError(text)

    def diverged(self, error: LinkError) -> DivergedError:
        """Return an error that names the operation that waits, and its line of the program."""
        me, others = self.describe(self.rank), "the other ranks" if error.peer is None else self.describe(error.peer)
        text = (
            f"{me} waits in {self.operation} at {call_site()} for {others}: {error}. All ranks that have parts of the "
            "same images must run this line, and none of them may have ended"
        )
        if self.note_loss is not None:
            self.note_loss(text)
        return DivergedError(text)


def _unflattened(tensor: Tensor, layout: RowLayout, rows: int) -> list[int]:
    """Return the shape in which the divided dimension is split into three, of which the second contains the rows."""
    shape = list(tensor.shape)
    shape[layout.axis : layout.axis + 1] = [layout.outer, rows, layout.inner]
    return shape
