"""The private torch names that this package needs, each with the reason.

A test fails when one of the names changes; `tests/test_torch_private.py` has tests for names that no other test would
notice.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

# A mode that sees every operation below autograd, and so also collectives, which no function mode sees.
OperationMode = TorchDispatchMode
# The operation behind `Tensor.item`, `float` and `if`, for which the host waits for the device.
READ = torch.ops.aten._local_scalar_dense.default


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, with one call for all tensors."""
    torch._foreach_copy_(list(targets), list(sources))


def add_all(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add to each target its other tensor, with one call for all tensors."""
    torch._foreach_add_(list(targets), list(others))


def put_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    """Replace the tensor of a registered buffer.

    An assignment does the same after a dozen checks, in about 20 microseconds: too long for each layer and microbatch.
    """
    module._buffers[name] = buffer


def measure_every_step(model: DistributedDataParallel) -> None:
    """Make DDP's reducer time each step; on a GPU each forward then waits for the previous backward."""
    model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]


def measure_rarely(model: DistributedDataParallel) -> None:
    """Make DDP's reducer time its first ten steps and then one in a hundred, which is the default."""
    model._set_ddp_runtime_logging_sample_rate(100)  # type: ignore[no-untyped-call]


def writes(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; autograd counts this to find tensors that changed too early."""
    return tensor._version


def communication_seconds(model: DistributedDataParallel) -> tuple[float, float]:
    """Return the time of the last step's gradient all-reduce, and the part of it that overlapped with backward.

    DDP's reducer times the buckets with every communication hook. There is no public way: DDP accepts one hook, and
    the user may need it.

    Returns:
        Seconds from the first bucket's start to the last bucket's end, and the seconds of these in which backward was
        still computing.
    """
    data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return data.get("backward_comm_time", 0) / 1e9, data.get("backward_compute_comm_overlap_time", 0) / 1e9


def abort_all_groups() -> None:
    """Abort NCCL's work in all groups, so that this process does not wait for a lost rank.

    The public ``ProcessGroup.abort`` aborts one group, and may wait for another group's work on the device.
    """
    dist.distributed_c10d._abort_process_group()


def put_module(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a submodule without calling the parent's own ``__setattr__``."""
    parent._modules[name] = module


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was returned by ``torch.compile``, or was compiled in its place by ``compile()``.

    The class that ``torch.compile`` returns is not public, and importing it takes seconds.
    """
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


# Attribute in which a SequentialLR or a ChainedScheduler holds its schedules, and key of their states in its state.
PARTS_OF_A_SCHEDULE = "_schedulers"
