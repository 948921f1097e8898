"""The private torch names that this package needs, each with the reason.

A test fails when one of them changes; `tests/test_torch_private.py` has those that no other test would notice.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

# What sees each operation below autograd, and so collectives, which no function mode sees.
OperationMode = TorchDispatchMode
# What `Tensor.item`, `float` and an `if` call: the host waits for the device.
READ = torch.ops.aten._local_scalar_dense.default


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each of many tensors into another one: a call for all instead of one for each."""
    torch._foreach_copy_(list(targets), list(sources))


def add_all(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add to each of many tensors another one: a call for all instead of one for each."""
    torch._foreach_add_(list(targets), list(others))


def put_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    """Give a registered buffer another tensor.

    An assignment does the same by a dozen checks, in about 20 microseconds: too many for each layer and microbatch.
    """
    module._buffers[name] = buffer


def measure_every_step(model: DistributedDataParallel) -> None:
    """Have DDP's reducer time each step; on a GPU it then waits in each forward for the backward before."""
    model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]


def measure_rarely(model: DistributedDataParallel) -> None:
    """Have DDP's reducer time its first ten steps and then one in a hundred, as it does by default."""
    model._set_ddp_runtime_logging_sample_rate(100)  # type: ignore[no-untyped-call]


def writes(tensor: Tensor) -> int:
    """How often a tensor was written to in place, as autograd counts it to find what was changed too early."""
    return tensor._version


def communication_seconds(model: DistributedDataParallel) -> tuple[float, float]:
    """How long the last step's gradient all-reduce took, and how much of it backward hid.

    DDP's reducer times the buckets itself, whatever communication hook is registered. There is no public way: a
    hook of our own would take the only place there is.

    Returns:
        Seconds from the first bucket's start to the last one's end, and of those the seconds in which backward was
        still computing.
    """
    data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return data.get("backward_comm_time", 0) / 1e9, data.get("backward_compute_comm_overlap_time", 0) / 1e9


def abort_all_groups() -> None:
    """End what NCCL is doing in all groups, so that nobody here waits for a rank that is lost.

    The public ``ProcessGroup.abort`` ends one group, and may wait for what another one does on the device.
    """
    dist.distributed_c10d._abort_process_group()


def put_module(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of a submodule, whatever the parent's own ``__setattr__`` does."""
    parent._modules[name] = module


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` has returned, or was compiled in its place by ``compile()``.

    The class of the first is public nowhere, and importing it takes seconds.
    """
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


# Where a SequentialLR and a ChainedScheduler have the schedules that they are made of, and their states have theirs.
PARTS_OF_A_SCHEDULE = "_schedulers"
