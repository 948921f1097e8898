"""The processes of a run end with the one that has started them."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, run_forked

from cnnstrategies.processes import STARTER, end_with_parent


def ended():
    """The process id of a process that is no more."""
    program = subprocess.Popen(["true"])
    program.wait()
    return program.pid


def test_a_process_ends_if_its_parent_has_ended_before_it_could_ask_to():
    code, _ = run_forked(lambda: end_with_parent(ended()))
    assert code == -signal.SIGKILL


def test_a_process_goes_on_while_its_parent_does():
    assert run_forked(lambda: end_with_parent(os.getppid())) == (0, "")


@pytest.mark.warm
def test_a_rank_whose_starter_has_ended_during_its_imports_ends():
    """It would wait half an hour for the others to appear."""
    rank = [sys.executable, str(ROOT / "cli.py"), "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"]
    environment = {**os.environ, "LOCAL_RANK": "1", "MASTER_PORT": "1", STARTER: str(ended())}
    assert subprocess.run(rank, env=environment, timeout=60).returncode == -signal.SIGKILL
