"""However a run ends, it leaves no process, no socket, no temporary file and no partial checkpoint."""

import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DDPStrategy

from cnnstrategies._lightning_private import MultiProcessingLauncher
from cnnstrategies.commands.run.outcome import own_temporary_folder
from cnnstrategies.paramserver.private_directory import let_go, make_run_directory
from tests.cluster.processes_of import PYTHON, Program, fit, wait_until
from tests.runner.forked import alive
from tests.strategies.fault_injection import fault_arguments

STRATEGIES = ("ddp", "hybrid_pipeline", "parameter_server")
# By the kind of end: arguments of the run, the signal that ends it, and the exit codes that may follow. Without "done"
# and the signals, the run would take far too long.
ENDS = {
    "done": (["--trainer.max_steps=20"], None, (0,)),
    "ctrl-c": ([], signal.SIGINT, (130,)),
    "SIGTERM": ([], signal.SIGTERM, (143,)),
    "exception": (fault_arguments(victim="nobody", rank="null", step=20), None, (1,)),
    # With a parameter server the run goes on without the worker, and succeeds.
    "killed rank": (fault_arguments(step=20), None, (0, 1)),
}
CHEAP = {("ddp", "exception"), ("ddp_fork", "killed rank")}
# torch writes errors of the ranks that it starts into temporary files.
STARTED_BY_TORCH = [("ddp_fork", "killed rank"), ("ddp_spawn", "killed rank")]
CASES = [
    pytest.param(strategy, end, marks=[] if (strategy, end) in CHEAP else [pytest.mark.cluster])
    for strategy, end in [*itertools.product(STRATEGIES, ENDS), *STARTED_BY_TORCH]
]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a temporary folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="left") as folder:
        yield Path(folder)


@pytest.mark.warm
@pytest.mark.parametrize(("strategy", "end"), CASES)
def test_a_run_leaves_no_process_socket_or_file(tmp_path, temporary, strategy, end):
    arguments, signum, codes = ENDS[end]
    endless = 3 if end == "killed rank" else 2000
    options = [f"--trainer.strategy={strategy}", f"--trainer.max_epochs={endless}", *arguments]
    path = os.pathsep.join(sys.path)
    program = Program([PYTHON, *fit(*options)], tmp_path / "log", TMPDIR=str(temporary), PYTHONPATH=path)
    if signum is not None:
        program.wait_until(lambda: "Training" in program.output())
        time.sleep(0.3)
        # A terminal sends SIGINT to the whole process group; `kill` and schedulers send SIGTERM to one process.
        os.killpg(program.process.pid, signum) if signum == signal.SIGINT else os.kill(program.process.pid, signum)
    assert program.wait() in codes, program.output()
    wait_until(lambda: not alive(program.process.pid), program.output, 60)
    assert [str(path) for path in temporary.rglob("*")] == []
    assert [str(path) for path in Path("runs").rglob("*.partial")] == []


def test_the_temporary_folder_goes_after_a_killed_rank_writes(monkeypatch, temporary):
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    launcher = MultiProcessingLauncher(DDPStrategy(), "fork")
    until = time.monotonic() + 0.5

    def write():
        for number in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count()):
            place = Path(tempfile.gettempdir(), str(number))
            place.parent.mkdir(exist_ok=True)
            place.touch()

    with own_temporary_folder(launcher):
        launcher.procs = [multiprocessing.get_context("fork").Process(target=write)]
        launcher.procs[0].start()
        time.sleep(0.1)
    assert [str(path) for path in temporary.rglob("*")] == []


def test_sockets_find_a_place_below_a_long_temporary_path(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 10)))
    folder = make_run_directory()
    assert len(str(folder / "server-10-1000-1000")) < 107
    let_go(folder)
    assert not folder.exists()
    assert folder.parent == Path("/tmp")
