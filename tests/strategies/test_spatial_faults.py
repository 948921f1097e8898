"""Tests of dying and silent ranks with parts of images: all processes end soon, and a line names the rank."""

import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.cluster.processes_of import PYTHON, Program, fit
from tests.runner import warm
from tests.runner.forked import alive
from tests.runner.patience import at_most
from tests.strategies.digit_commands import COMMON, checkpoint
from tests.strategies.fault_injection import fault_arguments

pytestmark = pytest.mark.cluster  # These tests wait for time-outs.

SHORT = timedelta(seconds=15)
STEP = 9  # A step of the second epoch.
ARGS = [
    *COMMON,
    "--trainer.devices=2",
    "--trainer.max_epochs=3",
    "--trainer.logger.init_args.name=fault",
    "--trainer.strategy.class_path=SpatialStrategy",
]
WAITS = r"rank 0 waits in \w+ at \w+\.py:\d+ for rank 1: Timed out"


def check_checkpoint() -> None:
    assert torch.load(checkpoint("fault"), weights_only=True)["epoch"] == 0


@pytest.mark.parametrize(
    ("how", "pattern"),
    [
        (
            "SIGKILL",
            r"The run cannot continue: rank 1 was ended by SIGKILL, .* in step 9 .* \(predicted: .* messages .*\); .*, "
            r"a plan that fits by prediction: --trainer.accumulate_grad_batches=2 with a group's batch of 32 samples ",
        ),
        ("asleep", WAITS),
    ],
)
def test_forked_ranks_end_with_a_message(run_cli, quick, how, pattern):
    start = ["--trainer.strategy.init_args.start_method=fork", f"--trainer.strategy.init_args.timeout={SHORT}"]
    code, output = run_cli("fit", *quick, *ARGS, *start, *fault_arguments(how=how, step=STEP))
    assert code not in (0, 2), output
    lines = [line for line in output.splitlines() if re.search(pattern, line)]
    assert lines, output
    assert "process.py" not in lines[-1], "a line of the program, and not of the fork"
    check_checkpoint()


@pytest.mark.warm
def test_a_stopped_rank_is_named_by_the_other_rank():
    """The run is a program that starts its other rank as a program, like a user's script."""
    args = [*ARGS, f"--trainer.strategy.init_args.timeout={SHORT}", *fault_arguments(how="SIGSTOP", step=STEP)]
    program = Program([PYTHON, *fit(*args)], Path("log"), PYTHONPATH=os.pathsep.join(sys.path))

    def states() -> list[str]:
        return [process.split()[-1] for process in alive(program.process.pid) if warm.HELPER not in process]

    assert program.wait(90) != 0
    deadline = time.monotonic() + at_most(10)
    while states() and time.monotonic() < deadline:  # A killed process needs a moment to end.
        time.sleep(0.1)
    assert not states(), program.output()
    assert re.search(WAITS, program.output()), program.output()
    assert "The run cannot continue: rank 1 is stopped, for example by SIGSTOP" in program.output()
    check_checkpoint()
