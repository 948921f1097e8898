import contextlib
import gc
import logging
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import prepared
import pytest
import torch
import warm
from lightning.fabric.plugins.environments import lightning as lightning_environment
from lightning.pytorch import Trainer
from ports import free_port
from roomy_stack import roomy
from torch import nn

# Imported once: tests, and the programs that those marked `warm` start, are forked from here.
from cnnstrategies import cli
from cnnstrategies.callbacks import summary

T = TypeVar("T")
ROOT = Path(__file__).parent.parent

# Forked ranks inherit this: one thread each, and no OpenMP pool that a fork would break.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Lightning asks the system for a port that rank 0 takes a moment later; by then another test may have it.
lightning_environment.find_free_network_port = free_port
# Seeds are kept for devices not yet in use, with the stack of each: every process would read some 20 files for that.
torch.cuda.traceback = torch.xpu.traceback = torch.mtia.traceback = SimpleNamespace(format_stack=list)
# A job of the machine that runs the tests must not become theirs: with SLURM_NTASKS set every rank would be rank 0.
LAUNCHERS = ("SLURM_", "PMI_", "MPI_LOCAL", "OMPI_", "TORCHELASTIC_", "CNNSTRATEGIES_RUN_")
for name in list(os.environ):
    if name.startswith(LAUNCHERS) or name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
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


def quiet_trainer(strategy: Any = "auto", devices: int = 1, **options: Any) -> Trainer:
    """A trainer on the CPU that shows and writes nothing, unless the options say otherwise."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "num_sanity_val_steps": 0, **quiet, **options}
    return Trainer(strategy=strategy, devices=devices, **options)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Lets the tests be run with other random numbers: what they prove must not hang on them."""
    parser.addoption("--seed-offset", type=int, default=0, help="added to seeds of torch and of simulated runs")


def pytest_configure(config: pytest.Config) -> None:
    """Shifts the seeds of torch's own generator, from which networks draw their first weights.

    Also has the processes that run the tests start as forks of this one, which has imported everything.
    """
    if offset := config.getoption("--seed-offset"):
        seed = torch.manual_seed
        torch.manual_seed = lambda number: seed(number + offset)
    if config.getoption("numprocesses", None):
        everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        prepared.read(many=everything)
        if everything:
            prepared.import_tests(Path(__file__).parent)
        warm.install(inherited=False)


# They take longest, so they start first, and at the end all workers are busy.
SLOWEST = (
    *("test_slurm.py", "test_readme.py", "test_torchrun.py", "test_hybrid_pipeline_faults.py", "test_chain.py"),
    *("test_cli.py", "test_quantize.py", "test_configs.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the slowest tests first."""
    items.sort(key=lambda item: item.path.name not in SLOWEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Does once what every forked test would do for itself."""
    prepared.prepare(many=len(session.items) > 50)


def pytest_unconfigure() -> None:
    """Lets libraries that look for leaks at the end find none."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs every test in a forked process of its own, except those marked `light`.

    A process in which a Trainer was built or backward has run cannot fork ranks any more: Lightning refuses, or they
    hang. So no test may do that in pytest's own process, from which all others are forked; but for the debugger's one.
    """
    if pyfuncitem.config.getoption("usepdb"):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if pyfuncitem.get_closest_marker("light") is not None:
        with torch.random.fork_rng(devices=[]):  # What comes after it must not depend on it.
            roomy(lambda: pyfuncitem.obj(**arguments))
        return True
    start_warm = pyfuncitem.get_closest_marker("warm") is not None
    timeout = pyfuncitem.config.getoption("timeout") - 10
    code, output = run_forked(
        lambda: pyfuncitem.obj(**arguments), timeout=timeout, keep_streams=True, start_warm=start_warm
    )
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


def run_forked(
    function: Callable[[], None], timeout: float = 200, keep_streams: bool = False, start_warm: bool = False
) -> tuple[int, str]:
    """Runs a function in a forked process; gives its exit code and output, and fails if it leaves a process behind.

    With `keep_streams`, `sys.stdout` stays what pytest made of it, for tests that use `capsys`. With `start_warm`, the
    programs that it starts are warm; see there.
    """
    with tempfile.TemporaryFile("w+b") as log:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            torch.set_num_threads(1)  # In one thread, before backward's may do it at once; see NetworkModule.setup.
            torch.ones(1, requires_grad=True).exp()  # Likewise: autograd's first use after a fork replaces its engine.
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            if start_warm or warm.is_installed():
                warm.install()
            streams = [os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2)]
            if not keep_streams:
                sys.stdout, sys.stderr = streams
                for name in ("lightning.fabric", "lightning.pytorch"):
                    for handler in logging.getLogger(name).handlers:
                        if isinstance(handler, logging.StreamHandler):
                            handler.setStream(sys.stderr)  # It has that of the import, which is pytest's.
            code = 1
            try:
                assert not torch._C._cuda_isInBadFork(), "a test marked `light` has asked for CUDA before this one"
                roomy(function)
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:
                traceback.print_exc(file=streams[1])
            sys.stdout.flush()
            os._exit(code)
        process = os.pidfd_open(pid)
        in_time, _, _ = select.select([process], [], [], timeout)
        os.close(process)
        if not in_time:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        left = kill_group(pid)
        log.seek(0)
        output = log.read().decode(errors="replace")
    assert in_time, f"no end after {timeout} s:\n{output}"
    assert not left, f"processes were left behind:\n{left}\n{output}"
    return os.waitstatus_to_exitcode(status), output


def kill_group(group: int, seconds: float = 30.0) -> str:
    """Waits a moment for a process group to end; what is left of it is killed, and listed."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while left := alive(group):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            return "\n".join(left)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return ""


def alive(group: int) -> list[str]:
    """The processes of a group, but not those that have ended and wait for their parent to ask."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = status.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(f"{name}) {state}")
    return found


@contextlib.contextmanager
def leaves_no_sockets() -> Iterator[None]:
    """Gives what runs inside a temporary folder of its own, since others run beside it, in which no sockets stay."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
        assert not list(Path(folder).glob("cnnstrategies*")), "a directory of sockets was left behind"
        tempfile.tempdir = None


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the command line in a forked process: `code, output = run_cli("fit", "--config", ...)`.

    Forked, because then Lightning is imported once. Without pictures, which take longer than most of these runs;
    `test_training_callbacks.py` looks at them.
    """
    monkeypatch.setattr(summary, "draw_curves", lambda history, path: None)

    def run(*args: object) -> tuple[int, str]:
        def command() -> None:
            sys.argv = [str(ROOT / "cli.py"), *(str(arg) for arg in args)]
            cli.main()

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
