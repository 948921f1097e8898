"""How the parameters are cut into slices and the slices spread over the servers: the same in every process."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.optimizers import is_elementwise
from cnnstrategies.paramserver.specification import DTYPES, Specification


@dataclass(frozen=True)
class Slice:
    """A range of a flattened parameter.

    Attributes:
        key: Its number.
        parameter: Index of the parameter.
        start: First element.
        stop: One past the last element.
        dtype: Of the elements.
        shape: ``(stop - start,)``, or the parameter's own shape where the optimizer needs whole tensors.
        servers: Ids of the servers that hold it, the first choice for its primary first.
    """

    key: int
    parameter: int
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    servers: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize


def cut(specification: Specification) -> tuple[Slice, ...]:
    """Cut all parameters and spread the slices, balanced by bytes: the largest first, each to the least loaded server.

    Tensors stay whole for optimizers that do not work element by element.
    """
    whole = not is_elementwise(specification.optimizer)
    ranges: list[tuple[int, int, int, torch.dtype, tuple[int, ...]]] = []
    for index, parameter in enumerate(specification.parameters):
        dtype = DTYPES[parameter.dtype]
        step = parameter.numel if whole else max(1, specification.slice_bytes // dtype.itemsize)
        for start in range(0, parameter.numel, max(step, 1)):
            stop = min(start + step, parameter.numel)
            ranges.append((index, start, stop, dtype, parameter.shape if whole else (stop - start,)))
    load = [0] * specification.servers
    primary = {}
    for key in sorted(
        range(len(ranges)), key=lambda key: ((ranges[key][1] - ranges[key][2]) * ranges[key][3].itemsize, key)
    ):
        chosen = min(range(specification.servers), key=lambda server: (load[server], server))
        load[chosen] += (ranges[key][2] - ranges[key][1]) * ranges[key][3].itemsize
        primary[key] = chosen
    return tuple(
        Slice(
            key,
            *entry,
            tuple((primary[key] + copy) % specification.servers for copy in range(specification.replication)),
        )
        for key, entry in enumerate(ranges)
    )


def keys_by_parameter(slices: Iterable[Slice], parameters: int) -> list[list[int]]:
    """The keys of each parameter's slices, in order."""
    keys: list[list[int]] = [[] for _ in range(parameters)]
    for slice_ in slices:
        keys[slice_.parameter].append(slice_.key)
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
    """Bytes of the largest payload that a slice needs: float32 values with indices, or its own dtype."""
    return max((max(slice_.nbytes, 8 * slice_.numel) for slice_ in slices), default=0)
