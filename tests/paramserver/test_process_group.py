"""The process group over the coordinator gives the results of gloo, and refuses by name what it cannot do."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as operations
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.nn import functional

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver import process_group
from cnnstrategies.paramserver.collectives import REDUCTIONS
from tests.runner.ranks import run_ranks

WORLD = 3


class GlooExchange(process_group.Exchange):
    """Exchange over the gloo group of the test's ranks."""

    alone = False

    def __init__(self) -> None:
        self.parts = 0

    def barrier(self, operation: str) -> None:
        dist.barrier()

    def gather(self, tensors: list[Tensor], operation: str) -> list[list[Tensor]]:
        self.parts += 1
        gathered: list[Any] = [None] * WORLD
        dist.all_gather_object(gathered, (tensors, operation))
        assert len({name for _, name in gathered}) == 1, f"the ranks disagree about the operation: {gathered}"
        return [tensors for tensors, _ in gathered]

    def reduce(self, tensor: Tensor, how: str, operation: str) -> Tensor:
        return REDUCTIONS[how](torch.stack([tensors[0] for tensors in self.gather([tensor], operation)])).to(tensor)


def mine(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a tensor of this rank, whose elements are different on each rank."""
    count = torch.Size(shape).numel()
    return (torch.arange(1, count + 1) * (dist.get_rank() + 2)).view(shape).to(dtype)


def zeros(count: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


def reduced(operation: Any) -> Callable[[Any], Any]:
    def collective(group: Any) -> Tensor:
        tensor = mine(2, 3)
        dist.all_reduce(tensor, operation, group=group)
        return tensor

    return collective


def gathered(dtype: torch.dtype, *shape: int) -> Callable[[Any], Any]:
    def collective(group: Any) -> list[Tensor]:
        outputs = zeros(WORLD, *shape, dtype=dtype)
        dist.all_gather(outputs, mine(*shape, dtype=dtype), group=group)
        return outputs

    return collective


def gathered_on_one(group: Any) -> list[Tensor]:
    outputs = zeros(WORLD, 2) if dist.get_rank() == 1 else None
    dist.gather(mine(2), outputs, dst=1, group=group)
    return outputs or []


def scattered(group: Any) -> Tensor:
    output = torch.zeros(2, dtype=torch.float64)
    dist.scatter(output, [mine(2) + rank for rank in range(WORLD)] if dist.get_rank() == 2 else None, 2, group)
    return output


def reduced_and_scattered(group: Any) -> list[Tensor]:
    first, second = zeros(2, 2)
    dist.reduce_scatter(first, [mine(2) + rank for rank in range(WORLD)], group=group)
    dist.reduce_scatter_tensor(second, mine(2 * WORLD), group=group)
    return [first, second]


def exchanged(group: Any) -> list[Tensor]:
    sizes = [dist.get_rank() + 1] * WORLD
    output = torch.zeros(sum(range(1, WORLD + 1)), dtype=torch.float64)
    dist.all_to_all_single(output, mine(sum(sizes)), [1, 2, 3], sizes, group=group)
    even = torch.zeros(WORLD, dtype=torch.float64)
    dist.all_to_all_single(even, mine(WORLD), group=group)
    return [output, even]


def in_one_tensor(group: Any) -> Tensor:
    output = torch.zeros(2 * WORLD, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(output, mine(2, 3), group=group)
    return output


def from_one(group: Any) -> list[Tensor]:
    sent, summed = mine(2, 2), mine(2)
    dist.broadcast(sent, 1, group=group)
    dist.reduce(summed, 2, group=group)
    return [sent, summed if dist.get_rank() == 2 else mine(0)]


def objects(group: Any) -> list[Any]:
    everyones: list[Any] = [None] * WORLD
    dist.all_gather_object(everyones, {"rank": dist.get_rank()}, group=group)
    first = [dist.get_rank(), {"rank": dist.get_rank()}]
    dist.broadcast_object_list(first, 1, group=group)
    return [everyones, first]


def waited(group: Any) -> list[Any]:
    tensor = mine(2)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    finished = work is not None and work.wait() and work.is_completed()
    dist.barrier(group=group)
    return [finished, tensor]


def by_functions(group: Any) -> list[Tensor]:
    """Return the results of torch's functional collectives, which call the group from C++."""
    group = group or dist.group.WORLD
    # The second names are those of torch 2.11.
    gather = getattr(operations, "all_gather_single", None) or operations.all_gather_tensor
    reduce_scatter = getattr(operations, "reduce_scatter_single", None) or operations.reduce_scatter_tensor
    collectives = [
        operations.all_reduce(mine(2), "sum", group),
        gather(mine(2), 0, group),
        reduce_scatter(mine(WORLD), "sum", 0, group),
        operations.all_to_all_single(mine(WORLD), None, None, group),
    ]
    return [operations.wait_tensor(tensor) for tensor in collectives]


def gradients(group: Any) -> list[Tensor]:
    """Return the gradients of a loss that depends on the tensors of all ranks in a different way on each rank."""
    tensor = mine(2).requires_grad_()
    parts = functional.all_gather(tensor, group=group)
    loss = sum(((rank + 1 + dist.get_rank()) * part**2).sum() for rank, part in enumerate(parts))
    (loss + (functional.all_reduce(tensor, group=group) ** 3).sum()).backward()
    assert tensor.grad is not None
    return [tensor.grad]


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "sum": reduced(ReduceOp.SUM),
    "product": reduced(ReduceOp.PRODUCT),
    "maximum": reduced(ReduceOp.MAX),
    "minimum": reduced(ReduceOp.MIN),
    "all_gather": gathered(torch.float64, 2, 3),
    "all_gather of one number": gathered(torch.int64),
    "all_gather of no elements": gathered(torch.float32, 0),
    "all_gather of bytes": gathered(torch.uint8, 5),
    "all_gather of truth values": gathered(torch.bool, 3),
    "all_gather of halves": gathered(torch.bfloat16, 3),
    "all_gather of complex numbers": gathered(torch.complex64, 3),
    "all_gather_into_tensor": in_one_tensor,
    "broadcast, reduce": from_one,
    "gather": gathered_on_one,
    "scatter": scattered,
    "reduce_scatter": reduced_and_scattered,
    "all_to_all_single": exchanged,
    "objects": objects,
    "async_op": waited,
    "functional collectives": by_functions,
    "gradients": gradients,
}


def compare(most: int) -> int:
    """Compare all collectives with those of gloo, and return the number of messages that the group has exchanged."""
    warnings.simplefilter("ignore")
    process_group.MOST_BYTES = most
    exchange = GlooExchange()
    group = dist.new_group(backend=process_group.BACKEND, pg_options=exchange)
    assert dist.get_backend(group) == process_group.BACKEND
    for name, collective in COLLECTIVES.items():
        expected, actual = collective(None), collective(group)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    return exchange.parts


def test_collectives_and_their_gradients_equal_those_of_gloo_also_in_parts() -> None:
    whole, parts = (run_ranks(WORLD, compare, most)[0] for most in (process_group.MOST_BYTES, 20 * WORLD))
    assert parts > 1.2 * whole, "large tensors are sent in several parts"


class Alone(process_group.Exchange):
    """Exchange of a worker that does not wait for the other workers."""

    alone = True

    def check(self, operation: str) -> None:
        if operation == "all_to_all":
            raise ConfigurationError("refused by name: all_to_all")


def test_what_workers_cannot_do_is_refused_by_name() -> None:
    process_group.open_group(0, 2, Alone())
    tensor, store = torch.ones(2), process_group.NoStore()
    refused: dict[str, Callable[[], Any]] = {
        r"torch\.distributed\.send: .* collective": lambda: dist.send(tensor, 1),
        r"torch\.distributed\.recv: .* collective": lambda: dist.recv(tensor, 1),
        r"torch\.distributed\.recv: .* or strategy ddp": lambda: dist.recv(tensor),
        r"all_reduce: .* with ReduceOp SUM, AVG, MAX, MIN, PRODUCT only": lambda: dist.all_reduce(
            tensor, ReduceOp.BAND
        ),
        r"sends dense tensors only: call to_dense": lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
        r"refused by name: all_to_all": lambda: dist.all_to_all([tensor] * 2, [tensor] * 2),
        r"received 8 bytes for a tensor of shape \(3,\)": lambda: dist.all_gather([torch.ones(3)] * 2, tensor),
        r"strategy parameter_server has no store": lambda: dist.PrefixStore("prefix", store).get("key"),
    }
    for message, use in refused.items():
        with pytest.raises(ConfigurationError, match=message):
            use()
    dist.destroy_process_group()
    with pytest.raises(ConfigurationError, match="only strategy parameter_server can create"):
        dist.init_process_group(process_group.BACKEND, store=dist.HashStore(), rank=0, world_size=1)


def test_groups_of_all_workers_or_of_one_worker_are_supported() -> None:
    process_group.open_group(1, 3, Alone())
    both = dist.new_group(backend="gloo")
    both.monitored_barrier()
    assert (dist.get_rank(both), dist.get_world_size(both)) == (1, 3)
    single = dist.new_group([1])
    assert (dist.get_rank(single), dist.get_world_size(single)) == (0, 1)
    assert dist.new_group([0, 2]) is dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ConfigurationError, match=r"new_group\(\[0, 1\]\): .* all 3 workers, or a single worker"):
        dist.new_group([0, 1])
