"""Tests of failing, dying and silent ranks: all processes end soon and name the rank; the last checkpoint is kept."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.cluster.processes_of import PYTHON, Program, fit
from tests.runner import warm
from tests.runner.forked import alive
from tests.strategies.digit_commands import COMMON, checkpoint
from tests.strategies.fault_injection import fault_arguments

pytestmark = pytest.mark.cluster  # These tests wait for time-outs.

# The time-out also holds for the rendezvous, and on a busy machine a second program's imports take long.
TIMEOUT = 60
SHORT = 15
STEP = 9  # A step of the second epoch.
ARGS = [
    *COMMON,
    "--trainer.devices=2",
    "--trainer.max_epochs=3",
    "--trainer.logger.init_args.name=fault",
    "--trainer.strategy.class_path=HybridPipelineStrategy",
    "--trainer.strategy.init_args.cuts=['2']",
]


def time_out(seconds: int) -> str:
    return f"--trainer.strategy.init_args.timeout={timedelta(seconds=seconds)}"


def check_checkpoint() -> None:
    saved = torch.load(checkpoint("fault"), weights_only=True)
    assert saved["epoch"] == 0
    assert [name.split(".")[1] for name in saved["state_dict"]] == ["0", "0", "2", "2", "5", "5"]


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("exception", ["this layer does not like the batch", "in stage 1, replica 0", "forward of microbatch 0"]),
        ("SIGKILL", ["ended by SIGKILL", "stage 1, replica 0 (rank 1)"]),
        ("asleep", ["stage 0, replica 0 (rank 0)", "stage 1, replica 0 (rank 1)"]),
    ],
)
def test_forked_ranks_end_with_a_message(run_cli, quick, how, messages):
    args = [*ARGS, "--trainer.strategy.init_args.start_method=fork", time_out(SHORT if how == "asleep" else TIMEOUT)]
    code, output = run_cli("fit", *quick, *args, *fault_arguments(how=how, step=STEP))
    assert code not in (0, 2), output
    for message in messages:
        assert message in output, output
    check_checkpoint()


@pytest.mark.warm
@pytest.mark.parametrize(("how", "rank"), [("SIGKILL", 1), ("SIGSTOP", 0)])
def test_started_ranks_end_and_leave_no_process(how, rank):
    """The run is a program that starts its other ranks as programs, like a user's script."""
    silent = how == "SIGSTOP"
    args = [*ARGS, time_out(SHORT if silent else TIMEOUT), *fault_arguments(how=how, rank=rank, step=STEP)]
    program = Program([PYTHON, *fit(*args)], Path("log"), PYTHONPATH=os.pathsep.join(sys.path))

    def states() -> list[str]:
        return [process.split()[-1] for process in alive(program.process.pid) if warm.HELPER not in process]

    if silent:
        try:
            program.wait_until(lambda: set(states()) == {"T"})
            assert "stage 1, replica 0 (rank 1)" in program.output()
            assert "are gone" not in program.output(), "consequences of the failure are not its cause"
        finally:
            os.killpg(program.process.pid, signal.SIGKILL)
            program.process.wait()
    else:
        assert program.wait(90) != 0
        assert not states(), program.output()
        assert "stage 0, replica 0 (rank 0)" in program.output()
    check_checkpoint()
