"""Slices cover every element once, are balanced, and move to their copies when a server dies."""

import pytest
import torch
from torch import nn

from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.slicing import MOST_SHARED, Part, Slice, cut, holders
from cnnstrategies.paramserver.specification import Specification

pytestmark = pytest.mark.light


class Norm(torch.optim.SGD):
    """An optimizer that is not known to work element by element."""


def specify(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: object) -> Specification:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(100, 50), (7,), (), (3, 1000), (64, 3, 3, 3)]]
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    return Specification.of(named, kind(parameters, lr=0.1), 1, **options)


def load(slices: tuple[Slice, ...], server: int) -> int:
    return sum(slice_.nbytes for slice_ in slices if slice_.servers[0] == server)


def test_slices_cover_every_element_once_and_are_balanced() -> None:
    specification = specify(servers=3, slice_bytes=1024, replication=2)
    slices = cut(specification)
    assert [slice_.key for slice_ in slices] == list(range(len(slices)))
    for index, parameter in enumerate(specification.parameters):
        own = [part for slice_ in slices for part in slice_.parts if part.parameter == index]
        assert [part.start for part in own] == [0, *(part.stop for part in own[:-1])]
        assert own[-1].stop == parameter.numel
    assert all(slice_.nbytes <= 1024 and len(set(slice_.servers)) == 2 for slice_ in slices)
    loads = [load(slices, server) for server in range(3)]
    assert max(loads) - min(loads) <= 1024
    assert cut(Specification.from_json(specification.to_json())) == slices


def test_the_largest_slice_is_placed_first() -> None:
    named = [(str(index), nn.Parameter(torch.zeros(size))) for index, size in enumerate((10, 10, 20))]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    slices = cut(Specification.of(named, optimizer, 1, servers=2))
    assert [load(slices, server) for server in range(2)] == [80, 80]


@pytest.mark.parametrize("compression", ["topk", "onebit", "auto"])
def test_small_parameters_share_a_slice_unless_something_is_left_out_of_gradients(compression: str) -> None:
    assert max(len(slice_.parts) for slice_ in cut(specify())) > 1
    assert {len(slice_.parts) for slice_ in cut(specify(compression=compression))} == {1}


def test_what_shares_a_slice_is_of_one_group_and_has_few_parts_and_bytes() -> None:
    small = [nn.Parameter(torch.zeros(1 + index % 8)) for index in range(400)]
    large = nn.Parameter(torch.zeros(100, 100))
    named = [(str(index), parameter) for index, parameter in enumerate((*small, large))]
    groups = [{"params": small[::2], "lr": 0.1}, {"params": [*small[1::2], large], "lr": 0.2}]
    specification = Specification.of(named, torch.optim.SGD(groups), 1, slice_bytes=256)
    shared = [slice_.parts for slice_ in cut(specification) if len(slice_.parts) > 1]
    assert sum(len(parts) for parts in shared) == len(small)
    assert all(len({part.parameter % 2 for part in parts}) == 1 for parts in shared)
    assert all(4 * sum(part.numel for part in parts) <= 256 for parts in shared)
    single = Specification.of(named, torch.optim.SGD(groups), 1)
    assert max(len(slice_.parts) for slice_ in cut(single)) == MOST_SHARED


def test_tensors_stay_whole_for_other_optimizers() -> None:
    slices = cut(specify(Norm, slice_bytes=64))
    assert [slice_.shape for slice_ in slices] == [(100, 50), (7,), (), (3, 1000), (64, 3, 3, 3)]


def test_the_oldest_live_copy_is_the_primary() -> None:
    slice_ = Slice(0, (Part(0, 0, 1, (1,)),), (1,), 1, torch.float32, (2, 0))
    servers = [ServerInfo(id, f"ipc://{id}", since=1) for id in range(3)]
    assert holders(slice_, View(1, tuple(servers), ())) == [2, 0]
    assert holders(slice_, View(2, tuple(servers[:2]), ())) == [0]
    restarted = (*servers[:2], ServerInfo(2, "ipc://new", since=3))
    assert holders(slice_, View(3, restarted, ())) == [0, 2], "the new process has no state"
    assert holders(slice_, View(4, (servers[1],), ())) == []
    one_by_one = tuple(ServerInfo(id, f"ipc://{id}", since=id + 1) for id in range(3))
    assert holders(slice_, View(4, one_by_one, (), begun=4)) == [2, 0], "none of them had state"
