"""Files and folders that several processes write at the same time, and the temporary files of killed processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cnnstrategies import ConfigurationError
from cnnstrategies.runtime.process_ids import ProcessId
from cnnstrategies.runtime.whole_file import ABANDONED, remove_abandoned, temporary_name, whole_file, whole_folder

pytestmark = pytest.mark.light
REMEDY = "free some space"


def names() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def test_two_processes_that_write_one_file_do_not_disturb_each_other() -> None:
    """The other process writes its whole file between the two parts of the first process."""
    first = whole_file(Path("last.ckpt"), REMEDY)
    file = first.__enter__()
    file.write(b"1" * 1000)
    child = os.fork()
    if not child:
        code = 1
        try:
            with whole_file(Path("last.ckpt"), REMEDY) as other:
                other.write(b"2" * 3000)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert Path("last.ckpt").read_bytes() == b"2" * 3000
    assert len(names()) == 2, "the partial file of the first process is still there"
    file.write(b"1" * 1000)
    first.__exit__(None, None, None)
    assert Path("last.ckpt").read_bytes() == b"1" * 2000
    assert names() == ["last.ckpt"]


def test_one_of_two_processes_creates_a_folder_and_the_other_is_refused() -> None:
    slow, fast = whole_folder(Path("out"), REMEDY), whole_folder(Path("out"), REMEDY)
    (slow.__enter__() / "slow").touch()
    (fast.__enter__() / "fast").touch()
    fast.__exit__(None, None, None)
    with pytest.raises(ConfigurationError, match="out exists, because another process has created it"):
        slow.__exit__(None, None, None)
    assert names() == ["out"]
    assert os.listdir("out") == ["fast"]


def test_only_partial_files_without_a_writer_are_removed() -> None:
    """The writer has ended: its process is gone, or another process has its id, or the file has not changed for a day.

    For a process on another machine, only the last reason counts.
    """
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = ProcessId.current()
    killed = [f".last.ckpt.{here.system}-{ended.pid}-0-7.partial", f".out.{here.system}-{here.pid}-1-0.partial"]
    other, old = ".last.ckpt.0123456789ab-1-5-0.partial", ".best.ckpt.0123456789ab-1-5-0.partial"
    mine = temporary_name(Path("last.ckpt" * 28)).name
    kept = [mine, other, ".last.ckpt.partial", ".notes.partial"]
    Path(killed[1]).mkdir()
    for name in (killed[0], old, *kept):
        Path(name).touch()
    now = os.stat(mine).st_mtime
    os.utime(old, (now - ABANDONED - 1, now - ABANDONED - 1))
    remove_abandoned(Path(), now)
    assert names() == sorted(kept)


def test_a_process_knows_of_a_process_of_its_machine_whether_it_has_ended() -> None:
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = int(Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[19])
    here = ProcessId.current()
    process = ProcessId(here.system, program.pid, start)
    assert process.has_ended() is False
    assert here.has_ended() is False
    assert ProcessId(here.system, program.pid, start + 1).has_ended() is True, "an earlier process had this id"
    assert ProcessId("0123456789ab", program.pid, start).has_ended() is None, "another machine, or before a reboot"
    assert ProcessId("", program.pid, start).has_ended() is None
    program.kill()
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    assert process.has_ended() is True, "although its parent has not read the exit code yet"
    program.communicate()
    assert process.has_ended() is True
