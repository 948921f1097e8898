"""Run a function on several ranks, in processes that are forked from the test's process.

The test's process must not have run backward before.
"""

import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.runner.ports import free_port

TIMEOUT = 60.0  # Seconds after which a collective fails that not all ranks call.
LONGEST = 180.0  # Seconds of the longest run. With more tests than cores, runs with many programs take minutes.

_context = multiprocessing.get_context("fork")


def _main(rank: int, world: int, store: str, pipe: Connection, function: Callable[..., Any], args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    os.chdir(os.path.dirname(store))
    try:
        if world:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
            )
        # A tensor that is sent through a pipe would be shared memory of a process that has ended.
        buffer = io.BytesIO()
        torch.save(function(*args), buffer)
        pipe.send(("ok", buffer.getvalue()))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of ``function(*args)`` in a process of its own, without a process group."""
    return run_ranks(0, function, *args)[0]


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of ``function(*args)`` on the ranks of a gloo world, in rank order.

    Fails if a rank raises an error or hangs.
    """
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(max(world, 1)):
            receiver, sender = _context.Pipe(duplex=False)
            arguments = (rank, world, f"{directory}/store", sender, function, args)
            process = _context.Process(target=_main, args=arguments)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        deadline = time.monotonic() + LONGEST
        results = []
        try:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} gave no answer"
                try:
                    results.append(pipe.recv())
                except (EOFError, ConnectionResetError):
                    results.append(("error", "the process died"))
            for process in processes:
                process.join(10)
        finally:
            for process in processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
    errors = [f"rank {rank}: {value}" for rank, (state, value) in enumerate(results) if state == "error"]
    assert not errors, "\n".join(errors)
    return [torch.load(io.BytesIO(value), weights_only=False) for _, value in results]


def run_started(world: int, function: Callable[[], object]) -> list[int | None]:
    """Return the exit codes of ranks that are started as `srun` starts them: with the local rank in the environment."""
    port = str(free_port())

    def main(rank: int) -> None:
        variables = {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= variables
        function()

    processes = [_context.Process(target=main, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]
