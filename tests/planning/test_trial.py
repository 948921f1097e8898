"""Programs that are forked from a process which has imported their module."""

import signal

import pytest
from cluster.processes_of import wait_until
from conftest import kill_group

from cnnstrategies.planning.tune import trial

MODULE = "forked_program"
PROGRAM = """
import os, signal, sys, time

def main():
    if "waits" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(100)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print(os.getsid(0), flush=True)
    if "waits" in sys.argv:
        time.sleep(100)
    if "tells" in sys.argv:
        print("This trial has failed: no such row\\nThis trial has failed: connection closed")
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


def test_its_end_is_told_and_all_its_processes_end_with_it(start):
    failed, told, ended, waiting = start("fails"), start("tells"), start("ends"), start("waits")
    for one in (failed, told, ended):
        one.process.join(30)
    assert failed.process.exitcode == 1
    with pytest.raises(trial.TrialError, match="out of memory"):
        failed.wait_until_ready()
    assert told.cause() == "no such row", "of the rank that was the first"
    assert ended.cause().startswith("it ended by itself")
    wait_until(lambda: waiting.output.read_text().endswith("\n"), waiting.output.read_text)
    group = int(waiting.output.read_text())
    assert group == waiting.process.pid
    waiting.close()
    assert waiting.process.exitcode == -signal.SIGTERM
    assert "ended by SIGTERM" in waiting.cause()
    assert not kill_group(group, 10), "what it has started goes on"
