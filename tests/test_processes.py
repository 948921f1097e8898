"""The processes of a run end when the process ends that has started them."""

import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer

from cnnstrategies import ImageClassifier
from cnnstrategies.commands.run import outcome
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.process_ids import is_ending
from cnnstrategies.runtime.processes import ENDS_WITH, STARTER, end_with_parent, killed_rank, spawned_by_a_thread
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy
from tests.conftest import ROOT
from tests.runner.forked import run_forked


def ended():
    """Return the process id of a process that has ended."""
    program = subprocess.Popen(["true"])
    program.wait()
    return program.pid


def test_a_process_ends_if_its_parent_is_gone_before_it_asks():
    code, _ = run_forked(lambda: end_with_parent(ended()))
    assert code == -signal.SIGKILL
    assert run_forked(lambda: end_with_parent(os.getppid())) == (0, "")


@pytest.mark.parametrize(
    ("signum", "reason"),
    [(signal.SIGTERM, "was ended by SIGTERM"), (signal.SIGSTOP, "is stopped, for example by SIGSTOP"), (0, None)],
)
def test_a_rank_that_is_killed_or_stopped_is_named(signum, reason):
    programs = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    programs[1].send_signal(signum)
    if signum:
        os.waitid(os.P_PID, programs[1].pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    message = killed_rank(SimpleNamespace(procs=programs))
    for program in programs:
        program.kill()
        program.wait()
    assert message == (reason and f"rank 2 {reason}")


def test_only_the_killed_one_of_forked_ranks_is_named():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # The ranks inherit this, so SIGTERM ends them.
    ranks = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)) for _ in range(2)]
    for rank, signum in zip(ranks, (signal.SIGTERM, signal.SIGKILL), strict=True):
        rank.start()
        os.kill(rank.pid, signum)
        rank.join()
    assert killed_rank(SimpleNamespace(procs=ranks)).startswith("rank 1 was ended by SIGKILL")
    assert killed_rank(SimpleNamespace(procs=ranks[:1])) is None


@pytest.mark.parametrize("in_trainer", [True, False])
def test_a_process_that_waits_for_a_killed_rank_ends_and_names_it(monkeypatch, in_trainer):
    """A process that has left its trainer ends by itself. It has killed the ranks that have not ended."""
    monkeypatch.setattr(outcome, "PATIENCE", 0.1)

    def wait():
        ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
        ranks[1].kill()
        outcome.end_all_after_one(ranks, lambda: in_trainer)
        ranks[0].kill()

    code, output = run_forked(wait)
    assert code == (-signal.SIGKILL if in_trainer else 0)
    assert ("rank 2 was ended by SIGKILL" in output) is in_trainer
    assert "rank 1" not in output


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_starting_a_process_that_dies_or_stops_in_its_imports_does_not_block(monkeypatch, signum):
    """The start returns although the process reads nothing and its input is larger than a pipe's buffer."""
    spawn = multiprocessing.util.spawnv_passfds

    def hit(path, args, files):
        if "--multiprocessing-fork" not in map(os.fsdecode, args):
            return spawn(path, args, files)
        return spawn(b"/bin/sh", [b"sh", b"-c", f"kill -{signum:d} $$".encode()], files)

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", hit)
    process = multiprocessing.get_context("spawn").Process(target=len, args=(bytes(1 << 20),))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the start waits for a process that will not read"))
    signal.alarm(5)
    with spawned_by_a_thread():
        process.start()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.warm
@pytest.mark.parametrize(("rank", "starter"), [("1", STARTER), ("0", ENDS_WITH)])
def test_a_rank_whose_starter_has_ended_during_its_imports_ends(rank, starter):
    """Otherwise the rank would wait half an hour for the other ranks."""
    words = [sys.executable, str(ROOT / "cli.py"), "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"]
    environment = {**os.environ, "LOCAL_RANK": rank, "MASTER_PORT": "1", starter: str(ended())}
    assert subprocess.run(words, env=environment, timeout=60).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("strategy", "question", "words"),
    [
        (HybridPipelineStrategy, "is_initialized", "this process has used a GPU"),
        (ParameterServerStrategy, "is_initialized", "this process has used a GPU"),
        (HybridPipelineStrategy, "_is_in_bad_fork", "asked CUDA for the GPUs.* PYTORCH_NVML_BASED_CUDA_CHECK=1"),
    ],
)
def test_ranks_are_not_forked_from_a_process_that_has_used_a_gpu(strategy, question, words, monkeypatch):
    """The ranks could not use their GPUs. Lightning's own check notices this only in the ranks."""
    made = strategy(start_method="fork")
    trainer = Trainer(accelerator="cpu", strategy=made, logger=False, enable_checkpointing=False)
    made.parallel_devices = [torch.device("cuda", 0)]
    monkeypatch.setattr(torch.cuda, question, lambda: True)
    module = ImageClassifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)), 2)
    with pytest.raises(ConfigurationError, match=f"start_method=fork: .*{words}"):
        trainer.fit(module, [(torch.zeros(1, 3, 2, 2), torch.zeros(1, dtype=torch.int64))])


@pytest.mark.light
def test_a_process_is_ending_from_its_kill_to_its_end():
    program = subprocess.Popen(["sleep", "60"])
    assert not is_ending(program.pid)
    program.kill()
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(program.pid), "it has ended, but nobody has read its exit code"
    program.wait()
    assert is_ending(program.pid)


def test_a_killed_rank_is_found_as_soon_as_its_connection_breaks():
    """The process may not have an exit code yet, for example because the kernel is freeing its memory."""
    ours, theirs = socket.socketpair()
    fill = "m = mmap.mmap(-1, 2**28); m[::4096] = bytes(2**16); print(flush=True); sys.stdin.read()"
    program = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import mmap, sys; {fill}"], stdin=theirs, stdout=subprocess.PIPE
    )
    theirs.close()
    assert program.stdout is not None
    program.stdout.readline()
    program.kill()
    assert ours.recv(1) == b""
    message = killed_rank(SimpleNamespace(procs=[program]))
    assert message is not None
    assert message.startswith("rank 1 was ended by SIGKILL")
