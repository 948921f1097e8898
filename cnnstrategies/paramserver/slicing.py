"""The division of the parameters into slices, and of the slices among the servers: the same in every process.

A large parameter is cut into several slices, and small parameters share a slice, because a message costs the same for
few elements as for many.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import may_be_lossy
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.optimizers import is_elementwise, load_optimizer
from cnnstrategies.paramserver.specification import DTYPES, Specification

SHARED_BYTES = 1 << 18  # largest shared slice, in bytes
MOST_SHARED = 63  # parameters per slice; a number of 64 bits says which of them have no gradient
SLICES_OF_A_SERVER = 4  # smallest number of slices per server that sharing may leave
MOST_STATES = 8  # largest number of tensors of a parameter's size in its optimizer state


@dataclass(frozen=True)
class Part:
    """A range of a flattened parameter, from `start` up to `stop` (exclusive).

    Attributes:
        parameter: Index of the parameter.
        start: First element.
        stop: Element after the last one.
        shape: ``(stop - start,)``, or the parameter's own shape where the optimizer needs whole tensors.
    """

    parameter: int
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Slice:
    """The unit of pushes, updates and pulls: a part of a parameter, or several small parameters of one parameter group.

    Attributes:
        key: Number of the slice.
        parts: Its parts, in sequence.
        sizes: Number of elements of each part.
        numel: Number of elements of the slice.
        dtype: Their dtype.
        servers: Ids of the servers that hold the slice; the first one is the preferred primary.
    """

    key: int
    parts: tuple[Part, ...]
    sizes: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    servers: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice's values."""
        return self.parts[0].shape if len(self.parts) == 1 else (self.numel,)

    def views(self, values: Tensor) -> list[Tensor]:
        """Return the parts of a tensor with the slice's values, in the same memory."""
        flat = values.view(-1).split_with_sizes(self.sizes)
        return [piece.view(part.shape) for piece, part in zip(flat, self.parts, strict=True)]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements."""
        return self.numel * self.dtype.itemsize


def cut(specification: Specification) -> tuple[Slice, ...]:
    """Cut all parameters into slices, and distribute the slices among the servers.

    The servers are balanced by bytes: the largest slice first, each to the least loaded server. Tensors stay whole for
    optimizers that do not work element by element.
    """
    contents = _contents_of_slices(specification)
    sizes = [sum(part.numel for part in parts) * dtype.itemsize for parts, dtype in contents]
    load = [0] * specification.servers
    primary = {}
    for key in sorted(range(len(contents)), key=lambda key: (-sizes[key], key)):
        least_loaded = min(range(specification.servers), key=lambda server: (load[server], server))
        load[least_loaded] += sizes[key]
        primary[key] = least_loaded
    return tuple(
        Slice(
            key,
            tuple(parts),
            tuple(part.numel for part in parts),
            sizes[key] // dtype.itemsize,
            dtype,
            tuple((primary[key] + copy) % specification.servers for copy in range(specification.replication)),
        )
        for key, (parts, dtype) in enumerate(contents)
    )


def _contents_of_slices(specification: Specification) -> list[tuple[list[Part], torch.dtype]]:
    """Return the parts and the dtype of each slice, in the order of the slices' first parameters."""
    needs_whole = not is_elementwise(load_optimizer(specification.optimizer))
    shared_bytes = _shared_bytes(specification)
    group_of = {index: number for number, group in enumerate(specification.groups) for index in group.parameters}
    contents: list[tuple[list[Part], torch.dtype]] = []
    filled: dict[tuple[int, torch.dtype], tuple[list[Part], int]] = {}  # the last shared slice and its bytes
    for index, parameter in enumerate(specification.parameters):
        dtype = DTYPES[parameter.dtype]
        size = parameter.numel * dtype.itemsize
        if 0 < size <= shared_bytes:
            group_and_dtype = group_of[index], dtype
            parts, filled_bytes = filled.get(group_and_dtype, ([], shared_bytes))
            if filled_bytes + size > shared_bytes or len(parts) == MOST_SHARED:
                parts, filled_bytes = [], 0
                contents.append((parts, dtype))
            parts.append(Part(index, 0, parameter.numel, (parameter.numel,)))
            filled[group_and_dtype] = parts, filled_bytes + size
            continue
        step = parameter.numel if needs_whole else max(1, specification.slice_bytes // dtype.itemsize)
        for start in range(0, parameter.numel, max(step, 1)):
            stop = min(start + step, parameter.numel)
            contents.append(([Part(index, start, stop, parameter.shape if needs_whole else (stop - start,))], dtype))
    return contents


def _shared_bytes(specification: Specification) -> int:
    """Return the largest size, in bytes, of a slice that small parameters share; 0 if none share one.

    Parameters do not share slices under a lossy compression. What it leaves out of a gradient is sent with the next
    gradient of the slice, and a parameter in the slice may have gradients only now and then.
    """
    lossy = may_be_lossy(specification.compression)
    if lossy or not is_elementwise(load_optimizer(specification.optimizer)):
        return 0
    total = sum(parameter.numel * DTYPES[parameter.dtype].itemsize for parameter in specification.parameters)
    return min(SHARED_BYTES, specification.slice_bytes, total // (SLICES_OF_A_SERVER * specification.servers))


def keys_by_parameter(slices: Iterable[Slice], parameters: int) -> list[list[int]]:
    """Return the keys of each parameter's slices, in order."""
    keys: list[list[int]] = [[] for _ in range(parameters)]
    for slice_ in slices:
        for part in slice_.parts:
            keys[part.parameter].append(slice_.key)
    return keys


def holders(slice_: Slice, view: View) -> list[int]:
    """Return the live servers that hold a slice: its primary, then its backups.

    The oldest process comes first, because only it certainly has the slice's state. All servers with which training
    began are equally old, so that each of them is the primary of its share of the slices.
    """
    since = {server.id: view.age(server) for server in view.servers}
    live = [server for server in slice_.servers if server in since]
    return sorted(live, key=lambda server: (since[server], slice_.servers.index(server)))


def largest_payload(slices: Sequence[Slice]) -> int:
    """Return the bytes of the largest payload of a slice: values and optimizer state, in numbers of 8 bytes."""
    return (1 + MOST_STATES) * max((8 * slice_.numel for slice_ in slices), default=0)
