"""A checkpoint is the old one or the new one, never half of one."""

import os
import signal
import time

import pytest
import torch

from cnnstrategies.checkpoint_io import AtomicCheckpointIO


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("cannot be stored")


def test_a_failing_save_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "new" / "directory" / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises(RuntimeError, match="cannot be stored"):
        io.save_checkpoint({"step": 2, "bad": Unpicklable()}, path)
    assert io.load_checkpoint(path, weights_only=True) == {"step": 1}
    io.save_checkpoint({"step": 3}, path)
    assert io.load_checkpoint(path, weights_only=True) == {"step": 3}
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"], "the leftover was overwritten and renamed"


def test_kills_at_any_moment_leave_a_whole_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": -1, "weights": torch.full((1,), -1.0)}, path)
    newest = -1
    attempt = 0
    while attempt < 8 or newest <= 3:  # A busy machine writes slowly.
        attempt += 1
        assert attempt < 200
        pid = os.fork()
        if pid == 0:
            step = newest
            while True:
                step += 1
                io.save_checkpoint({"step": step, "weights": torch.full((500_000,), float(step))}, path)
        time.sleep(0.05 + 0.013 * (attempt % 8))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        stored = torch.load(path, weights_only=True)
        assert stored["step"] >= newest
        assert (stored["weights"] == stored["step"]).all()
        newest = stored["step"]
