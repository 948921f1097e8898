"""When a rank fails, dies or falls silent, every process ends soon, says who it was, and the last checkpoint stands."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import warm
from conftest import ROOT
from fault_injection import Network

pytestmark = pytest.mark.cluster  # They wait for time-outs, and train meanwhile.

# Also for the rendezvous, and a second program's imports take longer on a busy machine.
TIMEOUT = 60
SHORT = 15
ARGS = [
    "--trainer.devices=2",
    "--trainer.max_epochs=3",
    "--trainer.limit_train_batches=5",
    "--trainer.limit_val_batches=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.logger.init_args.name=fault",
    "--trainer.strategy.class_path=HybridPipelineStrategy",
    "--trainer.strategy.init_args.cuts=[pool]",
    "--model.init_args.network=fault_injection.Network",
    "--trainer.callbacks+=fault_injection.Fault",
]


def time_out(seconds: int) -> str:
    return f"--trainer.strategy.init_args.timeout={timedelta(seconds=seconds)}"


def check_checkpoint() -> None:
    checkpoint = torch.load(next(Path("runs/fault").glob("*/checkpoints/last.ckpt")), weights_only=True)
    assert checkpoint["epoch"] == 0
    assert checkpoint["state_dict"].keys() == {f"network.{name}" for name in Network().state_dict()}


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        ("exception 1", ["this layer does not like the batch", "in stage 1, replica 0", "forward of microbatch 0"]),
        ("kill 1", ["ended by SIGKILL", "stage 1, replica 0 (rank 1)"]),
        ("asleep 1", ["stage 0, replica 0 (rank 0)", "stage 1, replica 0 (rank 1)"]),
    ],
)
def test_forked_ranks_end_with_a_message(run_cli, monkeypatch, fault, messages):
    monkeypatch.setenv("FAULT", fault)
    seconds = SHORT if fault.startswith("asleep") else TIMEOUT
    args = [*ARGS, "--trainer.strategy.init_args.start_method=fork", time_out(seconds)]
    code, output = run_cli("fit", "--config", ROOT / "configs/quickstart.yaml", *args)
    assert code not in (0, 2), output
    for message in messages:
        assert message in output, output
    check_checkpoint()


@pytest.mark.warm
@pytest.mark.parametrize("fault", ["kill 1", "silent 0"])
def test_started_ranks_end_and_leave_no_process(monkeypatch, fault):
    """As a user starts it: a script whose other ranks are scripts, too."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
    command = [sys.executable, str(ROOT / "cli.py"), "fit", "--config", str(ROOT / "configs/quickstart.yaml"), *ARGS]
    command.append(time_out(SHORT if fault == "silent 0" else TIMEOUT))
    with open("output.txt", "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        if fault == "silent 0":
            wait_for_children(process.pid, 90)
            text = Path("output.txt").read_text()
            assert "stage 1, replica 0 (rank 1)" in text
            assert "are gone" not in text, "what the failure has left behind is not the cause"
            check_checkpoint()
            return
        code = process.wait(90)
    finally:
        left = group_is_alive(process.pid, ended=process.poll() is not None)
        if left or process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = Path("output.txt").read_text()
    assert code != 0
    assert not left, text
    assert "stage 0, replica 0 (rank 0)" in text
    check_checkpoint()


def wait_for_children(pid: int, timeout: float) -> None:
    """Wait until a stopped process is the only one of its group that is left."""
    deadline = time.monotonic() + timeout
    started = False
    while time.monotonic() < deadline:
        listed = subprocess.check_output(["ps", "-eo", "pgid,stat,comm"], text=True).splitlines()
        members = [line.split(maxsplit=2) for line in listed]
        states = [state for group, state, name in members if group == str(pid) and name != warm.HELPER]
        started = started or len(states) > 1
        if started and all(state.startswith(("T", "Z")) for state in states):
            return
        time.sleep(0.2)
    raise AssertionError(f"still running: {Path('output.txt').read_text()}")


def group_is_alive(group: int, ended: bool) -> bool:
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        if not ended:
            return True
        time.sleep(0.05)
    return True
