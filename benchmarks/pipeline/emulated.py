"""Stages that sleep and messages that take a fixed time: what a schedule is worth, whatever else the machine does."""

import queue
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FORWARD = 0.010  # seconds of a stage's microbatch; its backward takes twice as long


class Sleep(torch.autograd.Function):
    """Takes its time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Take a stage's time."""
        time.sleep(FORWARD)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Take twice as long."""
        time.sleep(2 * FORWARD)
        return gradients[0]


class Slow(nn.Linear):
    """A layer that takes a stage's time."""

    def forward(self, values: Tensor) -> Tensor:
        """Compute, and sleep."""
        result: Tensor = Sleep.apply(super().forward(values))
        return result


def two_slow_layers() -> nn.Sequential:
    """A stage each."""
    return nn.Sequential(Slow(4, 4), Slow(4, 4))


class Late:
    """A send that starts when the link has had its time."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.work: Any = None

    def wait(self, *_: Any) -> None:
        """Wait for the end of the transfer."""
        self.begun.wait()
        self.work.wait()


def delay_messages(seconds: float) -> None:
    """Have every message of this process, whoever sends it, leave later; one after the other."""
    send, module = dist.isend, dist.distributed_c10d
    waiting: queue.Queue[Any] = queue.Queue()

    def pump() -> None:
        while True:
            start, late, args, kwargs = waiting.get()
            time.sleep(max(0.0, start - time.monotonic()))
            late.work = send(*args, **kwargs)
            late.begun.set()

    def isend(*args: Any, **kwargs: Any) -> Late:
        late = Late()
        waiting.put((time.monotonic() + seconds, late, args, kwargs))
        return late

    threading.Thread(target=pump, daemon=True).start()
    dist.isend = module.isend = isend
