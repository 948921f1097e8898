"""A rank that is done ends with exit code 0, whatever its script still refers to."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("starts_and_ends.py")


@pytest.mark.warm
def test_no_thread_of_a_group_is_left_when_the_interpreter_ends() -> None:
    """It aborts the process, now and then: starts_and_ends.py with larger numbers looks for that."""
    kinds = [f"--{kind}=1" for kind in ("forked", "strategy", "command", "stopped")]
    command = [sys.executable, str(PROGRAM), *kinds, "--busy=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 starts, 0 bad") == len(kinds)
