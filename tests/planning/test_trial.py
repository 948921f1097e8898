"""Tests of `tune`'s trials: programs that are forked from a process that has imported their module."""

import multiprocessing
import signal

import pytest

from cnnstrategies.planning.tune import trial
from tests.cluster.processes_of import wait_until
from tests.runner.forked import kill_group

MODULE = "forked_program"
PROGRAM = """
import multiprocessing, os, signal, sys, time

def main():
    if "ends" in sys.argv:
        print(multiprocessing.get_start_method())
    if "waits" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(100)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print(os.getsid(0), flush=True)
    if "waits" in sys.argv:
        time.sleep(100)
    if "tells" in sys.argv:
        print("This trial has failed: no such row\\nThis trial has failed: connection closed", flush=True)
        if "terminated" not in sys.argv:
            sys.exit(1)
        os.kill(os.getpid(), signal.SIGTERM)
    if "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    if "lost" in sys.argv:
        print("The run cannot continue: rank 1 was ended by SIGKILL, which the system sends when memory runs out")
        sys.exit(1)
    if "fails" in sys.argv:
        raise MemoryError("can't allocate memory")
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    programs = []

    def begin(*words):
        programs.append(trial.Trial(tmp_path, str(len(programs)), words, 30, MODULE))
        return programs[-1]

    yield begin
    for program in programs:
        program.close(0.1)


def test_a_trial_reports_its_end_and_ends_all_its_processes(start):
    failed, reporting, ended, waiting = start("fails"), start("tells"), start("ends"), start("waits")
    terminated = start("tells", "terminated")
    for program in (failed, reporting, ended, terminated):
        program.process.join(30)
    assert failed.process.exitcode == 1
    with pytest.raises(trial.TrialError, match="out of memory"):
        failed.wait_until_ready()
    assert reporting.cause() == "no such row", "the first rank's error is the cause"
    assert terminated.cause() == "no such row (and ended by SIGTERM)"
    assert ended.cause().startswith("it ended by itself")
    started = ended.output.read_text().split()[0]
    assert started == multiprocessing.get_start_method(), "workers of loaders start as in fit"
    wait_until(lambda: waiting.output.read_text().endswith("\n"), waiting.output.read_text)
    group = int(waiting.output.read_text())
    assert group == waiting.process.pid
    waiting.close()
    assert waiting.process.exitcode == -signal.SIGTERM
    assert "ended by SIGTERM" in waiting.cause()
    assert not kill_group(group, 10), "a process that the trial started is still running"


def test_a_run_that_is_out_of_memory_is_recognised(start):
    """An allocator's error, a killed rank 0 and another killed rank are out of memory; other failures are not."""
    programs = [start(word) for word in ("fails", "killed", "lost", "tells")]
    for program in programs:
        program.process.join(30)
    assert [program.ran_out_of_memory() for program in programs] == [True, True, True, False]
