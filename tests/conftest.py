import atexit
import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

gc.disable()  # There is little garbage among imported objects. `prepared` collects again.
import torch
from lightning.fabric.plugins.environments import lightning as lightning_environment
from lightning.fabric.utilities import registry
from lightning.pytorch import Trainer
from torch import nn

# Imported once, because all tests are forked from this process, and so are the programs that `warm` tests start.
from cnnstrategies import cli
from cnnstrategies.callbacks import picture_drawing, pictures, summary
from tests.runner import prepared, warm
from tests.runner.forked import run_forked
from tests.runner.ports import free_port
from tests.runner.roomy_stack import roomy

ROOT = Path(__file__).parent.parent

# Forked ranks inherit these settings: each rank has one thread, and there is no OpenMP pool that a fork would break.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Programs that tests start keep the package's bytecode for the next program, whatever the environment says. To compile
# the package takes 0.3 s in each program.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Some libraries would report frozen objects as leaks at exit. pytest collects garbage before, which takes 0.4 s in each
# worker if the objects are not frozen any more.
atexit.register(gc.unfreeze)
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
        prepared.keep()
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


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave curves and pictures undrawn, because drawing takes longer than most runs of the command line.

    `test_training_callbacks.py` and `test_pictures.py` test them.
    """
    monkeypatch.setattr(summary, "draw_curves", lambda history, path: None)
    leave_undrawn(monkeypatch)


@pytest.fixture
def run_cli(_undrawn: None) -> Callable[..., tuple[int, str]]:
    """Run the command line in a forked process: `code, output = run_cli("fit", "--config", ...)`.

    The process is forked so that Lightning is imported only once. Curves and pictures are not drawn.
    """

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
