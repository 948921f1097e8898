"""Tests of the rank watch: if a rank dies while NCCL waits for it, the other ranks learn about the death and end."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies.pipeline import transport
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.runtime.groups import PeerError
from tests.runner.ranks import run_started

SOON = 40.0  # Seconds. NCCL's time-out would take ten minutes.


class Kernel:
    """A transfer that waits on the device until its group is aborted, like NCCL's, even if gloo reports a lost rank.

    Args:
        work: The transfer of gloo.
        aborted: Event that is set when groups are aborted.
    """

    def __init__(self, work: Any, aborted: threading.Event) -> None:
        self.work = work
        self.aborted = aborted

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError:
            self.aborted.wait(2 * SOON)
            raise RuntimeError("NCCL communicator was aborted") from None


def a_rank_is_killed(directory: Path) -> None:
    """Train as one of three ranks. The last rank kills itself in its third step; the others record error and time."""
    rank = int(os.environ["LOCAL_RANK"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store, aborted = f"file://{directory}/store", threading.Event()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    isend, irecv = dist.isend, dist.irecv

    def abort() -> None:
        aborted.set()
        (directory / f"told {rank}").touch()

    network = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    losses = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal losses
        losses += 1
        if losses == 10:
            (directory / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(outputs, targets)

    with (
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        mock.patch.object(transport, "abort_all_groups", abort),
    ):
        pipeline = Pipeline(network, ["1", "3"], (1, 1, 1), 4)

        def on_the_device(transfer: Any) -> Any:
            def begin(tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
                work = transfer(tensor, peer, group=group, tag=tag)
                return work if group is pipeline.transport.control else Kernel(work, aborted)

            return begin

        with mock.patch.multiple(dist, isend=on_the_device(isend), irecv=on_the_device(irecv)):
            try:
                for _ in range(5):
                    pipeline.train(pipeline.share(torch.ones(8, 3), torch.ones(8, 3)), loss)
            except PeerError as error:
                (directory / str(rank)).write_text(f"{time.time()} {error}")
        until = time.monotonic() + SOON / 4
        while not (directory / "told 0").exists() and time.monotonic() < until:
            time.sleep(0.01)  # Otherwise rank 0 might see this rank end before it is told about the lost rank.
    os._exit(1)


def test_the_other_ranks_end_within_seconds_and_name_the_lost_rank(tmp_path: Path) -> None:
    assert run_started(3, lambda: a_rank_is_killed(tmp_path)) == [1, 1, -signal.SIGKILL]
    for rank in (0, 1):
        at, _, error = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(at) - float((tmp_path / "killed").read_text()) < SOON
        assert error.startswith(f"stage {rank}, replica 0 (rank {rank})")
        assert error.endswith("stage 2, replica 0 (rank 2) has ended")
