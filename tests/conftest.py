import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn

T = TypeVar("T")
ROOT = Path(__file__).parent.parent

# Forked ranks inherit this: one thread each, and no OpenMP pool that a fork would break.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# A job of the machine that runs the tests must not become theirs: with SLURM_NTASKS set every rank would be rank 0.
for name in list(os.environ):
    if name.startswith(("SLURM_", "PMI_", "OMPI_", "TORCHELASTIC_")) or name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        del os.environ[name]


class PlainCNN(nn.Sequential):
    """A CNN for the digits whose result depends on the global batch only: no normalisation, no dropout."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16 * 16, num_classes),
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest test into the middle, where others run beside it, but not SLURM's."""
    readme = [item for item in items if item.path.name == "test_readme.py"]
    others = [item for item in items if item not in readme]
    middle = len(others) // 2
    items[:] = [*others[:middle], *readme, *others[middle:]]


def pytest_collection_finish() -> None:
    """Keeps the garbage collectors of forked tests from what is imported, which they would have to copy and search."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Lets libraries that look for leaks at the end find none."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Runs every test in a forked process of its own.

    A process in which a Trainer was built or backward has run cannot fork ranks any more: Lightning refuses, or they
    hang. So no test may do that in pytest's own process, from which all others are forked.
    """
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    code, output = run_forked(lambda: pyfuncitem.obj(**arguments), timeout=230, keep_streams=True)
    if code != 0:
        pytest.fail(output, pytrace=False)
    return True


def in_fork(function: Callable[[], T]) -> T:
    """The result of a function that trains, for fixtures: they run in pytest's own process, and it must not train."""
    with tempfile.NamedTemporaryFile() as file:
        code, output = run_forked(lambda: torch.save(function(), file.name))
        assert code == 0, output
        result: T = torch.load(file.name, weights_only=False)
    return result


def run_forked(function: Callable[[], None], timeout: float = 120, keep_streams: bool = False) -> tuple[int, str]:
    """Runs a function in a forked process; gives its exit code and output, and fails if it leaves a process behind.

    With `keep_streams`, `sys.stdout` stays what pytest made of it, for tests that use `capsys`.
    """
    with tempfile.TemporaryFile("w+b") as log:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            streams = [os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2)]
            if not keep_streams:
                sys.stdout, sys.stderr = streams
            code = 1
            try:
                function()
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:
                traceback.print_exc(file=streams[1])
            sys.stdout.flush()
            os._exit(code)
        deadline = time.monotonic() + timeout
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        left = kill_group(pid)
        log.seek(0)
        output = log.read().decode(errors="replace")
    assert ended[0] == pid, f"no end after {timeout} s:\n{output}"
    assert not left, f"processes were left behind:\n{output}"
    return os.waitstatus_to_exitcode(ended[1]), output


def kill_group(group: int) -> bool:
    """Kills what is left of a process group a moment after its leader ended; whether there was anything."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    return True


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the command line in a forked process: `code, output = run_cli("fit", "--config", ...)`.

    Forked, because then Lightning is imported once. Without the picture of the curves, which takes longer than most of
    these runs; `test_training_callbacks.py` looks at it.
    """
    from cnnstrategies.callbacks import summary
    from cnnstrategies.cli import main

    monkeypatch.setattr(summary, "draw_curves", lambda history, path: None)

    def run(*args: object) -> tuple[int, str]:
        def command() -> None:
            sys.argv = ["cnnstrategies", *(str(arg) for arg in args)]
            main()

        return run_forked(command)

    return run


@pytest.fixture
def quick() -> list[str]:
    """The quickstart on two forked processes, without what only a person looks at."""
    return [
        "--config",
        str(ROOT / "configs/quickstart.yaml"),
        "--trainer.strategy=ddp_fork",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]
