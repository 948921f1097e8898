"""A process group of ``torch.distributed`` whose collectives go through the coordinator of the parameter servers.

Importing this module registers the backend :data:`BACKEND`. A group of this backend does not open any connection: it
passes each collective to an :class:`Exchange`. All operations are complete when they return.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from cnnstrategies._torch_private import asks_default_group
from cnnstrategies.errors import ConfigurationError

BACKEND = "coordinator"  # Name of the backend; torch.distributed.get_backend() returns it.
# Largest number of bytes that the workers together send in one collective. Larger tensors are sent in several parts,
# because the coordinator holds the contributions of all workers in memory.
MOST_BYTES = 64 << 20
REDUCTIONS = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "mean"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.PRODUCT, "product"),
)


class Exchange(Protocol):
    """Collectives among the workers of a run. All workers must call the same methods in the same order."""

    @property
    def alone(self) -> bool:
        """Whether this worker does not wait for others. The group then uses its own tensors for those of all."""
        ...

    def check(self, operation: str) -> None:
        """Check whether the workers can exchange tensors at this point of the run.

        Raises:
            ConfigurationError: They cannot.
        """

    def barrier(self, operation: str) -> None:
        """Wait until all living workers have called this method."""

    def gather(self, tensors: list[Tensor], operation: str) -> list[list[Tensor]]:
        """Return the tensors of all workers, in rank order.

        Raises:
            RunEnded: A worker of the run is lost.
        """
        ...

    def reduce(self, tensor: Tensor, how: str, operation: str) -> Tensor:
        """Return the ``sum``, ``mean``, ``max``, ``min`` or ``product`` of the workers' tensors, which have one shape.

        Raises:
            RunEnded: A worker of the run is lost.
        """
        ...


class FinishedWork(dist.Work):
    """Handle of an operation that was complete when it returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Any:
        """Return a future that has a result."""
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class CoordinatorGroup(ProcessGroup):
    """Process group whose collectives are carried out by an exchange.

    The methods override those of torch's class, which ``torch.distributed`` and torch's own C++ code call. A group of
    all workers, or of this worker alone, is supported.

    Args:
        rank: Rank of this worker.
        size: World size of the run.
        exchange: The exchange among the workers.
    """

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._exchange = exchange
        self._name = ""

    @property
    def exchange(self) -> Exchange:
        """The exchange that the group's collectives use."""
        return self._exchange

    # Names and subgroups

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Store the name under which torch's functional collectives find this group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that `setGroupName` has stored."""
        return self._name

    def new_group(self, ranks: Sequence[int], group_name: str = "", **_: Any) -> "CoordinatorGroup | None":
        """Return a group of all workers or of this worker alone. Return None if this worker is not in `ranks`.

        The requested backend and time-out have no effect, because the new group uses the same exchange.

        Raises:
            ConfigurationError: The group has some of the workers only.
        """
        if self._rank not in ranks:
            return None
        if len(ranks) not in (1, self._size):
            raise ConfigurationError(
                f"torch.distributed.new_group({list(ranks)}): with strategy parameter_server a group has all "
                f"{self._size} workers, or a single worker: use one of these groups, or strategy ddp"
            )
        group = CoordinatorGroup(self._rank if len(ranks) > 1 else 0, len(ranks), self._exchange)
        group.setGroupName(group_name)
        return group

    # Collectives

    def barrier(self, opts: Any = None) -> FinishedWork:
        """Wait until all workers have called this method."""
        self.monitored_barrier()
        return FinishedWork()

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all workers have called this method."""
        self._exchange.check("barrier")
        if self._size > 1 and not self._exchange.alone:
            self._exchange.barrier("barrier")

    def allreduce(self, tensors: list[Tensor], opts: Any) -> FinishedWork:  # type: ignore[override]
        """Replace each tensor by its reduction over all workers."""
        for tensor in tensors:
            tensor.copy_(self._reduced(tensor, opts.reduceOp, "all_reduce"))
        return FinishedWork()

    allreduce_coalesced = allreduce  # type: ignore[assignment]

    def reduce(self, tensors: list[Tensor], opts: Any) -> FinishedWork:  # type: ignore[override]
        """Replace each tensor by its reduction over all workers, on the root rank only."""
        for tensor in tensors:
            reduced = self._reduced(tensor, opts.reduceOp, "reduce")
            if opts.rootRank == self._rank:
                tensor.copy_(reduced)
        return FinishedWork()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> FinishedWork:  # type: ignore[override]
        """Replace each tensor by the tensor of the root rank."""
        sent = self._gather(tensors, "broadcast", opts.rootRank)[opts.rootRank]
        for tensor, source in zip(tensors, sent, strict=True):
            _fill(tensor, source)
        return FinishedWork()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> FinishedWork:  # type: ignore[override]
        """Fill each list of output tensors with one input tensor of all workers."""
        for targets, gathered in zip(outputs, zip(*self._gather(inputs, "all_gather"), strict=True), strict=True):
            for target, source in zip(targets, gathered, strict=True):
                _fill(target, source)
        return FinishedWork()

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> FinishedWork:
        """Fill the output tensor with the input tensors of all workers, one after the other."""
        gathered = self._gather([source], "all_gather_into_tensor")
        _fill(output, torch.cat([tensors[0] for tensors in gathered]))
        return FinishedWork()

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> FinishedWork:  # type: ignore[override]
        """Fill the list of output tensors with the input tensors of all workers, on the root rank only."""
        gathered = self._gather(inputs, "gather")
        if opts.rootRank == self._rank:
            for target, tensors in zip(outputs[0], gathered, strict=True):
                _fill(target, tensors[0])
        return FinishedWork()

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> FinishedWork:  # type: ignore[override]
        """Fill the output tensor with the input tensor that the root rank has for this worker."""
        # The other workers do not know the root rank's tensors, which have the shape of the output tensor.
        tensors = inputs[0] if inputs else [outputs[0]] * self._size
        _fill(outputs[0], self._gather(tensors, "scatter", opts.rootRank)[opts.rootRank][self._rank])
        return FinishedWork()

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> FinishedWork:  # type: ignore[override]
        """Fill each output tensor with the reduction of the workers' input tensors for this worker."""
        for output, tensors in zip(outputs, inputs, strict=True):
            parts = [tensor.flatten() for tensor in tensors]
            reduced = self._reduced(torch.cat(parts), opts.reduceOp, "reduce_scatter")
            output.copy_(torch.split(reduced, [part.numel() for part in parts])[self._rank].view_as(output))
        return FinishedWork()

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> FinishedWork:
        """Fill the output tensor with this worker's part of the reduction of the workers' input tensors."""
        reduced = self._reduced(source, opts.reduceOp, "reduce_scatter_tensor")
        output.copy_(reduced.flatten().chunk(self._size)[self._rank].view_as(output))
        return FinishedWork()

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> FinishedWork:
        """Fill the output tensors with the input tensors that the workers have for this worker."""
        for output, tensors in zip(outputs, self._gather(inputs, "all_to_all", uneven=True), strict=True):
            _fill(output, tensors[self._rank])
        return FinishedWork()

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> FinishedWork:
        """Fill the parts of the output tensor with the parts of the input tensors that are for this worker.

        Args:
            output: The tensor to fill.
            source: This worker's input tensor.
            output_sizes: Numbers of rows that each worker sends to this worker; empty for equal numbers.
            input_sizes: Numbers of rows that this worker sends to each worker; empty for equal numbers.
            opts: Options of torch, which have no effect.
        """
        parts = torch.split(source, input_sizes) if input_sizes else source.chunk(self._size)
        received = [tensors[self._rank] for tensors in self._gather(parts, "all_to_all_single", uneven=True)]
        _fill(output, torch.cat(received))
        return FinishedWork()

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> FinishedWork:
        """Call `all_gather_single` for each pair of tensors."""
        for output, source in zip(outputs, sources, strict=True):
            self.all_gather_single(output, source)
        return FinishedWork()

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> FinishedWork:
        """Call `reduce_scatter_single` for each pair of tensors."""
        for output, source in zip(outputs, sources, strict=True):
            self.reduce_scatter_single(output, source, opts)
        return FinishedWork()

    # Name by which the C++ code of torch calls the method.
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    # Names of the methods in torch 2.11.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # Operations that are not supported

    def send(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to send a tensor to one worker."""
        _refuse("send")

    def recv(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to receive a tensor from one worker, or from any worker."""
        _refuse("recv")

    recv_anysource = recv

    def _gather(
        self, tensors: Sequence[Tensor], operation: str, root: int | None = None, uneven: bool = False
    ) -> list[list[Tensor]]:
        """Return the tensors of all workers as flat tensors of bytes: by rank, and by position in `tensors`.

        Args:
            tensors: This worker's tensors.
            operation: Name of the operation.
            root: Rank whose tensors are needed. The other workers send tensors without elements. They must pass
                tensors of the root rank's shapes and dtypes. If None, the tensors of all workers are needed.
            uneven: Whether the workers' tensors may have different sizes.
        """
        flat = [_bytes(tensor) for tensor in tensors]
        self._exchange.check(operation)
        if self._size == 1 or self._exchange.alone:
            return [flat] * self._size
        longest = max(part.numel() for part in flat)
        if uneven:
            lengths = self._exchange.gather([torch.tensor([longest])], f"sizes of {operation}")
            longest = max(int(length) for (length,) in lengths)
        if root not in (None, self._rank):
            flat = [part[:0] for part in flat]
        most = max(1, MOST_BYTES // self._size)
        if longest * len(flat) <= most:
            return self._exchange.gather(flat, operation)
        gathered: list[list[Tensor]] = [[] for _ in range(self._size)]
        for tensor in flat:
            parts = [
                self._exchange.gather([tensor[start : start + most]], f"{operation} from byte {start}")
                for start in range(0, longest, most)
            ]
            for rank, row in enumerate(gathered):
                row.append(torch.cat([part[rank][0] for part in parts]))
        return gathered

    def _reduced(self, tensor: Tensor, reduction: Any, operation: str) -> Tensor:
        how = next((name for entry, name in REDUCTIONS if reduction == entry), None)
        if how is None or tensor.layout != torch.strided:
            names = ", ".join(str(entry).rpartition(".")[2] for entry, _ in REDUCTIONS)
            raise ConfigurationError(
                f"torch.distributed.{operation}: strategy parameter_server reduces dense tensors with ReduceOp {names} "
                "only: use one of these, or strategy ddp"
            )
        self._exchange.check(operation)
        if self._size == 1 or self._exchange.alone:
            return tensor
        flat = tensor.detach().flatten()
        parts = torch.split(flat, max(1, MOST_BYTES // self._size // tensor.element_size()))
        reduced = [self._exchange.reduce(part, how, f"{operation} of {tuple(tensor.shape)}") for part in parts]
        return torch.cat(reduced).view_as(tensor)


def _bytes(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise ConfigurationError(
            "torch.distributed: strategy parameter_server sends dense tensors only: call to_dense() before the "
            "collective, or use strategy ddp"
        )
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _fill(target: Tensor, source: Tensor) -> None:
    """Copy a flat tensor of bytes into a tensor."""
    if source.numel() != target.numel() * target.element_size():
        raise ConfigurationError(
            f"a collective of torch.distributed has received {source.numel()} bytes for a tensor of shape "
            f"{tuple(target.shape)} and dtype {target.dtype}: pass tensors of the same shape and dtype on all workers"
        )
    target.copy_(source.contiguous().view(target.dtype).view(target.shape))


def _refuse(operation: str) -> NoReturn:
    raise ConfigurationError(
        f"torch.distributed.{operation}: workers of strategy parameter_server do not exchange tensors in pairs: use a "
        "collective such as all_gather or broadcast, or strategy ddp"
    )


class NoStore(dist.Store):  # type: ignore[name-defined, misc]
    """Store that refuses all operations. torch requires a store, but a group of this backend does not need it."""

    def set(self, *_: Any) -> NoReturn:
        """Refuse the operation."""
        raise ConfigurationError(
            "strategy parameter_server has no store of torch.distributed: pass torch a store of your own, or use "
            "strategy ddp"
        )

    get = add = wait = check = compare_set = delete_key = num_keys = set


# torch keeps only the C++ part of a store, which needs the Python object to exist.
_NO_STORE = NoStore()


def open_group(rank: int, size: int, exchange: Exchange) -> None:
    """Make a group of this backend the default process group of ``torch.distributed``.

    Args:
        rank: Rank of this worker. Additional workers have ranks from `size` on.
        size: World size of the run.
        exchange: The exchange among the workers.
    """
    dist.init_process_group(BACKEND, store=_NO_STORE, rank=rank, world_size=size, pg_options=exchange)


def _asking(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.distributed.new_group`` of torch 2.11, changed so that it creates groups of this backend.

    Without the change, torch would connect workers by the backend that the caller names, for which there is no store.
    """

    @wraps(new_group)
    def created(
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        **options: Any,
    ) -> Any:
        default = dist.group.WORLD
        if isinstance(default, CoordinatorGroup):
            default.new_group(range(default.size()) if ranks is None else ranks)  # This call refuses other groups.
            backend, pg_options = BACKEND, default.exchange
        return new_group(ranks, timeout, backend, pg_options, **options)

    return created


def _create(options: Any, exchange: Any) -> CoordinatorGroup:
    if exchange is None:
        raise ConfigurationError(
            f"torch.distributed: only strategy parameter_server can create a process group with backend {BACKEND}: "
            "choose gloo or nccl"
        )
    return CoordinatorGroup(options.group_rank, options.group_size, exchange)


if not asks_default_group():
    dist.new_group = _asking(dist.new_group)
dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda", "xpu", "mps"])
