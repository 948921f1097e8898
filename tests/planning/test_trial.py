"""Programs that are forked from a process which has imported their module."""

import json
import signal
import time

import pytest
from conftest import kill_group

from cnnstrategies.planning.tune import trial

MODULE = "forked_program"
PROGRAM = """
import json, os, signal, sys, time
imported = os.getpid()

def main():
    if "waits" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(100)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    program = sys.modules["__main__"].__name__
    print(json.dumps([sys.argv[1:], os.environ["TOLD"], imported, os.getpid(), os.getsid(0), program]))
    sys.stdout.flush()
    if "waits" in sys.argv:
        time.sleep(100)
    if "fails" in sys.argv:
        raise MemoryError("can't allocate memory")
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trial, "COMMAND", MODULE)
    monkeypatch.setenv("TOLD", "so")
    programs = []

    def begin(*words):
        programs.append(trial.Trial(tmp_path, str(len(programs)), words, 30))
        return programs[-1]

    yield begin
    for program in programs:
        program.close(0.1)


def said(program):
    until = time.monotonic() + 30
    while not program.output.read_text().endswith("\n"):
        assert time.monotonic() < until, program.output.read_text()
        time.sleep(0.01)
    return json.loads(program.output.read_text().splitlines()[0])


def test_it_runs_with_its_words_in_a_session_of_its_own(start):
    """And what Lightning takes for the program is the module."""
    first, second = start("a", "b"), start("c")
    for each in (first, second):
        each.process.join(30)
        assert each.process.exitcode == 0
    words, told, imported, own, session, program = said(first)
    assert (words, told, own, session, program) == (["a", "b"], "so", first.process.pid, own, MODULE)
    assert imported == said(second)[2] != own, "both were forked from the process that has imported it"


def test_its_end_is_told_and_all_its_processes_end_with_it(start):
    failed, waiting = start("fails"), start("waits")
    failed.process.join(30)
    assert failed.process.exitcode == 1
    with pytest.raises(trial.TrialError, match="out of memory"):
        failed.wait_until_ready()
    group = said(waiting)[3]
    waiting.close()
    assert waiting.process.exitcode == -signal.SIGTERM
    assert "ended by SIGTERM" in waiting.cause()
    assert not kill_group(group, 10), "what it has started goes on"
