import contextlib
import functools
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
from lightning.fabric.utilities import registry
from lightning.pytorch import Trainer
from ports import free_port
from roomy_stack import roomy
from torch import nn

# Imported once, because all tests are forked from this process, and so are the programs that `warm` tests start.
from cnnstrategies import cli
from cnnstrategies.callbacks import picture_drawing, pictures, summary

T = TypeVar("T")
ROOT = Path(__file__).parent.parent

# Forked ranks inherit these settings: each rank has one thread, and there is no OpenMP pool that a fork would break.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Programs that tests start keep the package's bytecode for the next program, whatever the environment says. To compile
# the package takes 0.3 s in each program.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Each Trainer looks for callbacks in the metadata of all installed packages.
registry.entry_points = functools.cache(registry.entry_points)
# Lightning asks the system for a free port, and rank 0 binds it a moment later. By then another test may have bound it.
lightning_environment.find_free_network_port = free_port
# torch keeps seeds for devices that are not yet in use, each with a formatted stack. Every process would read about 20
# source files to format it.
torch.cuda.traceback = torch.xpu.traceback = torch.mtia.traceback = SimpleNamespace(format_stack=list)
# If a launcher's job runs the tests, they must not believe that they are its ranks: with SLURM_NTASKS set every rank
# would be rank 0.
LAUNCHERS = ("SLURM_", "PMI_", "MPI_LOCAL", "OMPI_", "TORCHELASTIC_", "JSM_", "LSF_PM_", "FLUX_", "PALS_", "PBS_")
LAUNCHERS += ("SM_HOSTS", "PET_", "CLUSTER_SPEC", "TF_CONFIG", "CNNSTRATEGIES_RUN_", "CNNSTRATEGIES_CHECKED")
for name in list(os.environ):
    if name.startswith(LAUNCHERS) or name in ("LOCAL_RANK", "NODE_RANK", "NNODES", "RANK", "WORLD_SIZE"):
        del os.environ[name]


class PlainCNN(nn.Sequential):
    """A CNN for the digits without normalisation and dropout: its result depends on the global batch only."""

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
    """Return a trainer on the CPU that shows and writes nothing, unless the options say otherwise."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "num_sanity_val_steps": 0, **quiet, **options}
    return Trainer(strategy=strategy, devices=devices, **options)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option that changes the tests' random numbers: their results must not depend on a lucky seed."""
    parser.addoption("--seed-offset", type=int, default=0, help="added to seeds of torch and of simulated runs")


def pytest_configure(config: pytest.Config) -> None:
    """Shift the seeds of torch's generator, from which networks draw their first weights, and fork pytest's workers.

    With ``-n``, pytest's worker processes are forked from this process, which has imported everything.
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


# These files take longest. They start first, so that all workers are busy until the end.
SLOWEST = (
    *("test_slurm.py", "test_readme.py", "test_torchrun.py", "test_hybrid_pipeline_faults.py", "test_chain.py"),
    *("test_mpirun.py", "test_cli.py", "test_quantize.py", "test_configs.py", "test_simulation.py", "test_wires.py"),
    *("test_compiled.py", "test_refusals.py", "test_equality.py", "test_elastic.py", "test_scaling_command.py"),
    *("test_trainer_on_gpu.py", "test_pipeline_shares.py", "test_added_strategy.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest tests first."""
    items.sort(key=lambda item: item.path.name not in SLOWEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Do once what every forked test would otherwise do for itself."""
    prepared.prepare(many=len(session.items) > 50)


def pytest_unconfigure() -> None:
    """Unfreeze the garbage collector's objects: some libraries would report them as leaks at exit."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run every test in a forked process of its own, except tests marked `light`.

    A process that has built a Trainer or has run backward cannot fork ranks any more: Lightning refuses, or the ranks
    hang. So no test may do either in pytest's own process, from which all tests are forked. With ``--pdb`` tests are
    not forked, because the debugger needs the terminal.
    """
    if pyfuncitem.config.getoption("usepdb"):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if pyfuncitem.get_closest_marker("light") is not None:
        with torch.random.fork_rng(devices=[]):  # Later tests must not depend on the numbers that this test draws.
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
    """Return the result of a function that trains, for fixtures.

    Fixtures run in pytest's own process, which must not train, so the function runs in a forked process.
    """
    with tempfile.NamedTemporaryFile() as file:
        code, output = run_forked(lambda: torch.save(function(), file.name))
        assert code == 0, output
        result: T = torch.load(file.name, weights_only=False)
    return result


def run_forked(
    function: Callable[[], None], timeout: float = 200, keep_streams: bool = False, start_warm: bool = False
) -> tuple[int, str]:
    """Run a function in a forked process and return its exit code and output; fail if it leaves a process behind.

    Args:
        function: Function that the process runs.
        timeout: Seconds after which the process and its group are killed, and the test fails.
        keep_streams: Keep pytest's `sys.stdout`, for tests that use `capsys`.
        start_warm: Start the function's own programs warm; see `warm.py`.
    """
    with tempfile.TemporaryFile("w+b") as log:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            # Here one thread does it. Otherwise backward's threads may do it at the same time; see NetworkModule.setup.
            torch.set_num_threads(1)
            # Likewise: the first use of autograd after a fork replaces its engine.
            torch.ones(1, requires_grad=True).exp()
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
                            handler.setStream(sys.stderr)  # Until now it is pytest's stream of the time of the import.
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
    """Wait for a process group to end; after `seconds`, kill the processes that are left and return a list of them."""
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
    """Return the processes of a group, without zombies: processes that have ended but were not waited for."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = status.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state not in "ZX":
                members.append(f"{name}) {state}")
    return members


@contextlib.contextmanager
def leaves_no_sockets() -> Iterator[None]:
    """Use a temporary folder of its own for the code inside, and check that no sockets are left in the folder.

    The folder is separate because other tests run at the same time.
    """
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
    """Run the command line in a forked process: `code, output = run_cli("fit", "--config", ...)`.

    The process is forked so that Lightning is imported only once. Curves and pictures are not drawn, because drawing
    takes longer than most of these runs; `test_training_callbacks.py` and `test_pictures.py` test them.
    """
    monkeypatch.setattr(summary, "draw_curves", lambda history, path: None)
    leave_undrawn(monkeypatch)

    def run(*args: object) -> tuple[int, str]:
        def command() -> None:
            sys.argv = [str(ROOT / "cli.py"), *(str(arg) for arg in args)]
            cli.main()

        return run_forked(command)

    return run


def leave_undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create empty files instead of an evaluation's pictures. The tables are written."""
    for name in [name for name in vars(picture_drawing) if name.startswith("draw_")]:
        monkeypatch.setattr(picture_drawing, name, lambda *arguments: arguments[-1].touch())
    monkeypatch.setattr(pictures, "log_pictures", lambda *_: None)


@pytest.fixture
def quick() -> list[str]:
    """Return arguments for the quickstart on two forked processes, without progress bar and model summary."""
    return [
        "--config",
        str(ROOT / "configs/quickstart.yaml"),
        "--trainer.strategy=ddp_fork",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]
