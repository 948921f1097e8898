"""The simulated GPU, which other tests use: it refuses and waits like a GPU, and computes like the CPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runner.simulated_cuda import simulate
from tests.runner.simulated_gpu import DEVICE, MixedError

HOST = torch.arange(6.0).reshape(2, 3)
MASK = HOST > 2
WAITING: list[Callable[[Tensor], object]] = [
    lambda x: x.sum().item(),
    lambda x: bool((x > 1).any()),
    lambda x: x.cpu(),
    lambda x: x.nonzero(),
    lambda x: x[x > 2],
    lambda x: x[torch.tensor([1, 0])],
    lambda x: torch.equal(x, x),
    lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    lambda x: HOST.to("cuda"),
    lambda x: HOST.to("cuda", non_blocking=True),
    lambda x: HOST.pin_memory().to("cuda"),
    lambda x: x.copy_(HOST),
    lambda x: HOST.clone().copy_(x, non_blocking=True),
    lambda x: torch.cuda.synchronize(),
    lambda x: torch.cuda.current_stream().record_event().synchronize(),
]
GOING_ON: list[Callable[[Tensor], object]] = [
    lambda x: x.relu().sum(),
    lambda x: x * torch.tensor(2.0),
    lambda x: x[torch.ones(1, dtype=torch.int64, device="cuda")],
    lambda x: x.__setitem__(0, 1.0),
    lambda x: torch.zeros(3, device="cuda"),
    lambda x: x.half(),
    lambda x: HOST.pin_memory().to("cuda", non_blocking=True),
    lambda x: x.to("cpu", non_blocking=True),
    lambda x: torch.empty(2, 3, pin_memory=True).copy_(x, non_blocking=True),
    lambda x: torch.optim.SGD([nn.Parameter(x)], lr=0.1).step(),
    lambda x: F.one_hot(x.long(), 6),
]


def test_the_simulated_gpu_counts_exactly_the_waits_of_the_host() -> None:
    with simulate():
        for number, act in enumerate([*WAITING, *GOING_ON]):
            tensor = HOST.to("cuda")
            with DEVICE.waits_inside() as waits:
                act(tensor)
            assert sum(waits.values()) == (number < len(WAITING)), (number, waits)


def test_operations_that_mix_host_and_device_are_refused() -> None:
    with simulate():
        tensor = HOST.to("cuda")
        for act in (lambda: tensor + HOST, lambda: torch.cat([tensor, HOST]), lambda: F.linear(tensor, HOST)):
            with pytest.raises(MixedError):
                act()
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            tensor.numpy()


def test_a_copy_that_the_host_does_not_wait_for_is_late() -> None:
    with simulate():
        tensor = HOST.to("cuda")
        for copied in (tensor.to("cpu", non_blocking=True), torch.empty(2, 3, pin_memory=True)):
            copied.copy_(tensor, non_blocking=True)
            event = torch.cuda.current_stream().record_event()
            tensor.add_(1)  # Later work does not change an earlier copy.
            assert copied.isnan().all()
            event.synchronize()
            assert torch.equal(copied + 1, tensor.cpu())
        HOST.pin_memory().to("cuda", non_blocking=True)
        changed = HOST.pin_memory()
        changed.to("cuda", non_blocking=True)
        changed.add_(1)
        with pytest.raises(AssertionError, match="pinned memory was written to"):
            torch.cuda.synchronize()


def test_a_side_stream_copies_when_another_stream_waits_for_it() -> None:
    with simulate():
        side, tensor, pinned = torch.cuda.Stream(), HOST.to("cuda"), torch.empty(2, 3, pin_memory=True)
        target = torch.zeros(2, 3, device="cuda")
        with torch.cuda.stream(side):
            target.copy_(HOST.pin_memory(), non_blocking=True)
            first = side.record_event()
            pinned.copy_(tensor, non_blocking=True)
        assert target.sum().isnan()
        torch.cuda.current_stream().wait_event(first)
        assert torch.equal(target.cpu(), HOST)
        tensor.zero_()
        assert pinned.isnan().all()
        torch.cuda.current_stream().wait_stream(side)
        assert not pinned.any(), "the values at the time of the copy"
        with torch.cuda.stream(side):
            pinned.copy_(tensor.clone(), non_blocking=True)
        with pytest.raises(AssertionError, match="memory was freed"):
            side.synchronize()
