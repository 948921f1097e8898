"""The division of parameters into slices, and the distribution of the slices among the servers.

Every process computes the same division from the specification. A large parameter is cut into several slices. Several
small parameters form one slice together, because every message has a fixed cost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cnnstrategies.optimizer_trial import is_elementwise
from cnnstrategies.paramserver.compression import may_be_lossy
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.optimizers import load_optimizer
from cnnstrategies.paramserver.specification import DTYPES, Specification

SHARED_BYTES = 1 << 18  # largest size, in bytes, of a slice with several parameters
# Largest number of parameters in a slice. Messages have one bit for each parameter, in an integer below 2^63.
MOST_SHARED = 63
# A slice with several parameters must be so small that each server could have at least this many slices of this size.
SLICES_OF_A_SERVER = 4
MOST_STATES = 8  # largest number of state tensors that an optimizer keeps for a parameter, each of the parameter's size


@dataclass(frozen=True)
class Part:
    """A part of a slice: a range of elements of one flattened parameter.

    Attributes:
        parameter: Index of the parameter in `Specification.parameters`.
        start: Index of the part's first element in the flattened parameter.
        stop: Index of the part's last element in the flattened parameter, plus 1.
        shape: Shape of the part in the slice: ``(stop - start,)``, or the parameter's shape if the optimizer needs
            whole tensors.
    """

    parameter: int
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return self.stop - self.start


@dataclass(frozen=True)
class Slice:
    """The unit of pushes, updates and pulls: a part of a parameter, or several small parameters of one parameter group.

    Attributes:
        key: Number that identifies the slice in messages.
        parts: The parts, in the order of their elements in the slice.
        sizes: Number of elements of each part.
        numel: Number of elements of the slice.
        dtype: Dtype of the elements.
        servers: Ids of the servers that hold the slice. The first of them is the primary at the start of the run.
        is_whole: Whether the slice is a whole parameter, because the optimizer needs whole tensors.
    """

    key: int
    parts: tuple[Part, ...]
    sizes: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    servers: tuple[int, ...]
    is_whole: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor with the slice's values. The tensor is one-dimensional if the slice has several parts."""
        return self.parts[0].shape if len(self.parts) == 1 else (self.numel,)

    def views(self, values: Tensor) -> list[Tensor]:
        """Return a view of each part in the part's shape, from a tensor with the slice's values."""
        flat = values.view(-1).split_with_sizes(self.sizes)
        return [piece.view(part.shape) for piece, part in zip(flat, self.parts, strict=True)]

    @property
    def nbytes(self) -> int:
        """Size of the slice's values in bytes."""
        return self.numel * self.dtype.itemsize


def cut(specification: Specification) -> tuple[Slice, ...]:
    """Cut all parameters into slices, and distribute the slices among the servers.

    The slices are distributed in the order of their sizes, the largest first. Each slice gets as its primary the server
    whose slices have the fewest bytes so far. If the optimizer makes the steps of all parameters together, server 0
    gets all slices. Parameters are not cut if the optimizer does not work element by element.

    Returns the slices in the order of their keys, which is the order of the parameters.
    """
    needs_whole = not _is_elementwise(specification)
    contents = _contents_of_slices(specification)
    sizes = [sum(part.numel for part in parts) * dtype.itemsize for parts, dtype in contents]
    load = [0] * specification.servers
    primary = {}
    for key in sorted(range(len(contents)), key=lambda key: (-sizes[key], key)):
        least_loaded = min(range(specification.servers), key=lambda server: (load[server], server))
        load[least_loaded] += sizes[key]
        primary[key] = 0 if specification.is_joint else least_loaded
    return tuple(
        Slice(
            key,
            tuple(parts),
            tuple(part.numel for part in parts),
            sizes[key] // dtype.itemsize,
            dtype,
            tuple((primary[key] + copy) % specification.servers for copy in range(specification.replication)),
            needs_whole,
        )
        for key, (parts, dtype) in enumerate(contents)
    )


def _contents_of_slices(specification: Specification) -> list[tuple[list[Part], torch.dtype]]:
    """Return the parts and the dtype of each slice. The slices are sorted by the index of their first parameter."""
    needs_whole = not _is_elementwise(specification)
    shared_bytes = _shared_bytes(specification)
    group_of = {index: number for number, group in enumerate(specification.groups) for index in group.parameters}
    contents: list[tuple[list[Part], torch.dtype]] = []
    # The slices to which the next small parameter is added. Keys: parameter group and dtype. Values: parts of the
    # slice, and size of the slice in bytes.
    filled: dict[tuple[int, torch.dtype], tuple[list[Part], int]] = {}
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


def _is_elementwise(specification: Specification) -> bool:
    """Whether all optimizers work element by element."""
    return all(is_elementwise(load_optimizer(path)) for path in set(specification.optimizers))


def _shared_bytes(specification: Specification) -> int:
    """Return the largest allowed size, in bytes, of a slice with several parameters.

    The result is 0 if every slice must have only one parameter. This is the case if the optimizer needs whole tensors,
    or if a lossy compression may be used. A lossy compression leaves out a part of each gradient, and adds this part to
    the slice's next gradient. If a slice had several parameters, one of them could have no gradient in the next step,
    and its left-out part could then not be added.
    """
    lossy = may_be_lossy(specification.compression)
    if lossy or not _is_elementwise(specification):
        return 0
    total = sum(parameter.numel * DTYPES[parameter.dtype].itemsize for parameter in specification.parameters)
    return min(SHARED_BYTES, specification.slice_bytes, total // (SLICES_OF_A_SERVER * specification.servers))


def keys_by_parameter(slices: Iterable[Slice], parameters: int) -> list[list[int]]:
    """Return the keys of each parameter's slices, in the order of the parameter's elements.

    Args:
        slices: All slices, in the order of their keys.
        parameters: Number of parameters.
    """
    keys: list[list[int]] = [[] for _ in range(parameters)]
    for slice_ in slices:
        for part in slice_.parts:
            keys[part.parameter].append(slice_.key)
    return keys


def holders(slice_: Slice, view: View) -> list[int]:
    """Return the ids of the live servers that hold a slice: the primary first, then the servers with its backups.

    The primary is the oldest of these servers, because a younger server may not have received its copy yet. Servers of
    the same age, such as all servers at the start of training, are in the order of :attr:`Slice.servers`.
    """
    since = {server.id: view.age(server) for server in view.servers}
    live = [server for server in slice_.servers if server in since]
    return sorted(live, key=lambda server: (since[server], slice_.servers.index(server)))


def largest_payload(slices: Sequence[Slice]) -> int:
    """Return an upper bound, in bytes, for the payload of a slice's values and optimizer state.

    The bound assumes 8 bytes for each element, and `MOST_STATES` tensors of the slice's size in the optimizer's state.
    An optimizer that needs whole tensors may also have `MOST_STATES` square matrices for each dimension of a parameter,
    for example preconditioners.
    """
    return (1 + MOST_STATES) * max((8 * _elements(slice_) for slice_ in slices), default=0)


def _elements(slice_: Slice) -> int:
    """Return the largest number of elements of a tensor for the slice in the optimizer's state."""
    return slice_.numel + (sum(size**2 for size in slice_.shape) if slice_.is_whole else 0)
