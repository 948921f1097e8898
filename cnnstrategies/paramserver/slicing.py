"""How the parameters are cut into slices and the slices spread over the servers: the same in every process.

A large parameter is cut, and small ones share a slice: a message costs the same for few elements as for many.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import may_be_lossy
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.optimizers import is_elementwise, load_optimizer
from cnnstrategies.paramserver.specification import DTYPES, Specification

SHARED_BYTES = 1 << 18  # of small parameters that share a slice
MOST_SHARED = 63  # of a slice: which of them have no gradient is a number of 64 bits
SLICES_OF_A_SERVER = 4  # that small parameters leave at least, where there are as many
MOST_STATES = 8  # tensors of a parameter's size in its optimizer state


@dataclass(frozen=True)
class Part:
    """A range of a flattened parameter, from `start` up to `stop`.

    Attributes:
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
    """What is pushed, updated and pulled as one: a part of a parameter, or some small ones of one parameter group.

    Attributes:
        parts: What lies in it, one after the other, of so many elements: `sizes`.
        servers: Ids of the servers that hold it, the first choice for its primary first.
    """

    key: int
    parts: tuple[Part, ...]
    sizes: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    servers: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of its values."""
        return self.parts[0].shape if len(self.parts) == 1 else (self.numel,)

    def views(self, values: Tensor) -> list[Tensor]:
        """The parts of some values, in the same memory."""
        flat = values.view(-1).split_with_sizes(self.sizes)
        return [one.view(part.shape) for one, part in zip(flat, self.parts, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


def cut(specification: Specification) -> tuple[Slice, ...]:
    """Cut all parameters and spread the slices, balanced by bytes: the largest first, each to the least loaded server.

    Tensors stay whole for optimizers that do not work element by element.
    """
    found = _cut(specification)
    sizes = [sum(part.numel for part in parts) * dtype.itemsize for parts, dtype in found]
    load = [0] * specification.servers
    primary = {}
    for key in sorted(range(len(found)), key=lambda key: (-sizes[key], key)):
        chosen = min(range(specification.servers), key=lambda server: (load[server], server))
        load[chosen] += sizes[key]
        primary[key] = chosen
    return tuple(
        Slice(
            key,
            tuple(parts),
            tuple(part.numel for part in parts),
            sizes[key] // dtype.itemsize,
            dtype,
            tuple((primary[key] + copy) % specification.servers for copy in range(specification.replication)),
        )
        for key, (parts, dtype) in enumerate(found)
    )


def _cut(specification: Specification) -> list[tuple[list[Part], torch.dtype]]:
    """The slices' parts, in the order of their first parameters, with their dtypes."""
    whole = not is_elementwise(load_optimizer(specification.optimizer))
    small = _shared_bytes(specification)
    group_of = {index: number for number, group in enumerate(specification.groups) for index in group.parameters}
    found: list[tuple[list[Part], torch.dtype]] = []
    filled: dict[tuple[int, torch.dtype], tuple[list[Part], int]] = {}  # the last slice that is shared, and its bytes
    for index, parameter in enumerate(specification.parameters):
        dtype = DTYPES[parameter.dtype]
        size = parameter.numel * dtype.itemsize
        if 0 < size <= small:
            kind = group_of[index], dtype
            parts, filling = filled.get(kind, ([], small))
            if filling + size > small or len(parts) == MOST_SHARED:
                parts, filling = [], 0
                found.append((parts, dtype))
            parts.append(Part(index, 0, parameter.numel, (parameter.numel,)))
            filled[kind] = parts, filling + size
            continue
        step = parameter.numel if whole else max(1, specification.slice_bytes // dtype.itemsize)
        for start in range(0, parameter.numel, max(step, 1)):
            stop = min(start + step, parameter.numel)
            found.append(([Part(index, start, stop, parameter.shape if whole else (stop - start,))], dtype))
    return found


def _shared_bytes(specification: Specification) -> int:
    """Bytes of small parameters that share a slice; 0 where none do.

    Where something is left out of gradients, that of one which comes now and then must wait for it.
    """
    lossy = may_be_lossy(specification.compression)
    if lossy or not is_elementwise(load_optimizer(specification.optimizer)):
        return 0
    total = sum(one.numel * DTYPES[one.dtype].itemsize for one in specification.parameters)
    return min(SHARED_BYTES, specification.slice_bytes, total // (SLICES_OF_A_SERVER * specification.servers))


def keys_by_parameter(slices: Iterable[Slice], parameters: int) -> list[list[int]]:
    """The keys of each parameter's slices, in order."""
    keys: list[list[int]] = [[] for _ in range(parameters)]
    for slice_ in slices:
        for part in slice_.parts:
            keys[part.parameter].append(slice_.key)
    return keys


def holders(slice_: Slice, view: View) -> list[int]:
    """The live servers that hold a slice: its primary, then its backups.

    The process that has been there longest comes first: only it is sure to have the slice's state. Those that training
    began with are equal, so that each has its share of the slices.
    """
    since = {server.id: view.age(server) for server in view.servers}
    live = [server for server in slice_.servers if server in since]
    return sorted(live, key=lambda server: (since[server], slice_.servers.index(server)))


def largest_payload(slices: Sequence[Slice]) -> int:
    """Bytes of the largest payload that a slice needs: its values with the optimizer's state, numbers of 8 bytes."""
    return (1 + MOST_STATES) * max((8 * slice_.numel for slice_ in slices), default=0)
