"""End torch's default process group before the interpreter ends.

The group's threads would go on running while the interpreter is taken down. What they then free can abort a process
that is done, ``terminate called without an active exception``: one run in many, where processors are scarce. Lightning
ends the group for NCCL alone, and torch never does.
"""

import atexit

import torch.distributed as dist


def end_at_exit() -> None:
    """Have the default group end, if there is one then, when this process does."""
    atexit.register(_end)


def leave_at_exit() -> None:
    """Undo :func:`end_at_exit`: after a failure its end would wait for what a lost rank does not send any more."""
    atexit.unregister(_end)


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
