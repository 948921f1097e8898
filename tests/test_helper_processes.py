"""Helper processes of a rank ignore the signals that stop a run, and end with their rank."""

import multiprocessing
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cnnstrategies.runtime.helper_processes import shield_helpers, unshielded_start
from cnnstrategies.runtime.processes import spawned_by_a_thread
from cnnstrategies.runtime.stop_signals import acting_on
from tests.helper_program import STOPS, answer
from tests.runner.forked import alive, run_forked


def check_ends_on_signal():
    """Start a process, and check that SIGTERM has its default effect on it."""
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    other.start()
    subprocess.run(["kill", str(other.pid)], check=True)
    other.join(60)
    assert other.exitcode == -signal.SIGTERM


def wait_until_handled(process):
    """Wait until a process has no pending signal. The system merges a new one with a pending one of another sender."""
    for _ in range(6000):
        (pending,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        if int(pending, 16) == 0:
            return
        time.sleep(0.01)
    pytest.fail("the process does not handle its signals")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_helper_ends_only_by_its_rank(method):
    def act() -> None:
        shield_helpers()
        with unshielded_start():
            check_ends_on_signal()
        early = list(STOPS)
        # These signals arrive after the fork, and before multiprocessing calls `shield` in the helper.
        os.register_at_fork(after_in_child=lambda: [os.kill(os.getpid(), early.pop()) for _ in STOPS if early])
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        with spawned_by_a_thread():
            helper = context.Process(target=answer, args=(theirs, method == "fork"), daemon=True)
            helper.start()
        theirs.close()
        early.clear()
        # The first signals arrive while a spawned helper is still importing.
        for number in range(3):
            for signum in STOPS:
                subprocess.run(["sh", "-c", f"kill -{int(signum)} {helper.pid}"], check=True)
            ours.send(number)
            assert ours.recv() == number
        ours.send(None)
        blocked, ignored = ours.recv()
        of_stops = sum(1 << signum - 1 for signum in STOPS)
        assert int(blocked, 16) & of_stops == int(ignored, 16) & of_stops == 0
        wait_until_handled(helper.pid)
        helper.terminate()
        helper.join(60)
        assert helper.exitcode == 0
        shield_helpers(False)
        check_ends_on_signal()

    def run() -> None:
        with acting_on(STOPS, lambda signum: None):  # As in a rank.
            act()

    assert run_forked(run, timeout=100) == (0, "")


def test_a_helper_that_has_ignored_a_signal_ends_after_its_rank():
    """The rank may be killed because it has not stopped in time. Nobody would end the helper."""

    def run() -> None:
        shield_helpers()
        helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        helper.start()
        subprocess.run(["kill", str(helper.pid)], check=True)
        print(helper.pid, flush=True)
        os._exit(0)

    # `run_forked` fails if a process is left behind.
    code, output = run_forked(run, timeout=100)
    assert code == 0
    assert not alive(int(output))
