"""Prepare a process from which tests are forked: it does once what every test would otherwise do again."""

import contextlib
import gc
import importlib
import io
import sys
from pathlib import Path

from cnnstrategies.commands.run import lightning_cli
from tests.runner import large_pages

CONFIG = f"--config={Path(__file__).parents[2] / 'configs/quickstart.yaml'}"
LOGGER = ["--trainer.logger=CSVLogger", "--trainer.logger.init_args.save_dir=runs"]
ADAMW = ["--model.init_args.optimizer=torch.optim.AdamW", "--model.init_args.optimizer.init_args.lr=0.002"]
DECAY = ["--model.init_args.lr_scheduler=torch.optim.lr_scheduler.ExponentialLR"]
DECAY += ["--model.init_args.lr_scheduler.init_args.gamma=0.7"]
# Together these arguments name most of the classes that the tests configure.
COMMON = [
    [],
    ["--trainer.strategy.class_path=HybridPipelineStrategy", *LOGGER, *ADAMW, *DECAY],
    [
        "--trainer.strategy.class_path=ParameterServerStrategy",
        "--trainer.strategy.init_args.servers_per_node=1",
        *LOGGER,
    ],
]


_read = 0  # Number of entries of COMMON that this process, or the process from which it was forked, has parsed.


def read(many: bool) -> None:
    """Parse common configurations, because jsonargparse caches the parsers of classes.

    Args:
        many: Whether so many tests run that parsing all configurations is worth its seconds.
    """
    global _read
    arguments = sys.argv
    for args in COMMON[_read : len(COMMON) if many else 1]:
        words = ["fit", CONFIG, *args]
        sys.argv = ["", *words, "--print_config"]
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            lightning_cli.CLI()
        _read += 1
    sys.argv = arguments


def import_tests(folder: Path) -> None:
    """Import the tests' modules under the names under which pytest imports them later, and timm.

    Runs with learning rates that fall from layer to layer use timm, whose import takes 0.7 s of processor time.
    """
    importlib.import_module("timm.optim")
    for file in sorted(folder.rglob("test_*.py")):
        importlib.import_module(".".join(("tests", *file.relative_to(folder).with_suffix("").parts)))


def keep() -> None:
    """Collect garbage from now on, but not among the objects that exist, so that forks neither copy nor search them.

    To collect the garbage among them first would take more time than it spares.
    """
    gc.freeze()
    gc.enable()


def prepare(many: bool) -> None:
    """Parse common configurations, and arrange the memory so that forks are cheap.

    Args:
        many: Whether so many tests run that complete preparation is worth its seconds.
    """
    read(many)
    keep()
    # With the default threshold a run of the command line spends a tenth of its time on the search for garbage, of
    # which there is little.
    gc.set_threshold(50_000, 20, 50)
    if many:
        large_pages.collapse()
