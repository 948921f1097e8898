"""Makes a process ready to be forked for a test, which then does what all tests would do, and pay, again."""

import contextlib
import gc
import importlib
import io
import sys
from pathlib import Path

import large_pages

from cnnstrategies.commands.run import lightning_cli

CONFIG = f"--config={Path(__file__).parent.parent / 'configs/quickstart.yaml'}"
LOGGER = ["--trainer.logger=CSVLogger", "--trainer.logger.init_args.save_dir=runs"]
ADAMW = ["--model.init_args.optimizer=torch.optim.AdamW", "--model.init_args.optimizer.init_args.lr=0.002"]
DECAY = ["--model.init_args.lr_scheduler=torch.optim.lr_scheduler.ExponentialLR"]
DECAY += ["--model.init_args.lr_scheduler.init_args.gamma=0.7"]
# Together they name most of the classes that the tests configure.
COMMON = [
    [],
    ["--trainer.strategy.class_path=HybridPipelineStrategy", *LOGGER, *ADAMW, *DECAY],
    [
        "--trainer.strategy.class_path=ParameterServerStrategy",
        "--trainer.strategy.init_args.servers_per_node=1",
        *LOGGER,
    ],
]


_read = 0  # of them, in this process or in the one that it was forked from


def read(many: bool) -> None:
    """Read configurations: jsonargparse keeps the parsers of classes.

    Args:
        many: Whether there are tests enough that all of it is worth its seconds.
    """
    global _read
    own = sys.argv
    for args in COMMON[_read : len(COMMON) if many else 1]:
        words = ["fit", CONFIG, *args]
        sys.argv = ["", *words, "--print_config"]
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            lightning_cli.CLI()
        _read += 1
    sys.argv = own


def import_tests(folder: Path) -> None:
    """Import the tests' modules, as pytest finds them later."""
    for file in sorted(folder.rglob("test_*.py")):
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        importlib.import_module(file.stem)


def prepare(many: bool) -> None:
    """Read configurations, and arrange the memory.

    Args:
        many: Whether there are tests enough that all of it is worth its seconds.
    """
    read(many)
    gc.collect()
    gc.freeze()  # Forks need neither copy nor search what is imported.
    # A tenth of what a run of the command line takes went into looking for the little garbage that it makes.
    gc.set_threshold(50_000, 20, 50)
    if many:
        large_pages.collapse()
