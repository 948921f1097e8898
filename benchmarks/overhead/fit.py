"""A step of `cnnstrategies fit` against one of a bare loop with the same network, loss, optimizer and loader.

    python benchmarks/overhead/fit.py [--strategy ddp] [--rounds 40]

Target: at most 1.03 times the bare loop's time. Under `ddp` the bare loop is torch's DistributedDataParallel; under
`hybrid_pipeline` and `parameter_server` it is their engines in plain torch, as in docs/examples. `fit` is the command
with all that it does by itself: callbacks, metrics, TensorBoard, and the progress bar, on a terminal. Lightning alone
is its Trainer with a module that logs nothing, no logger and no bar: its loops and hooks.

All run at the same time on two ranks and take turns of five steps, one of which is logged, in an order that changes,
while the others wait: what else happens on the machine hits all. Ratios are medians of those of each round, with the
95 % interval of that median.
"""

import argparse
import contextlib
import os
import pty
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import yaml
from loops import CLASSES, MICROBATCHES, NETWORKS, STEPS  # First: it makes the parameter server's importable.

sys.path.append(str(Path(__file__).parents[1] / "pipeline"))
from against import Contestant, ratio, take_turns
from ranks import report

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

STRATEGIES = ("ddp", "hybrid_pipeline", "parameter_server")


def configuration(strategy: str, name: str) -> dict[str, Any]:
    """Return a configuration for `fit` that is like the quickstart's."""
    kind, arguments, size, batch, cut = NETWORKS[name]
    strategy_value: Any = strategy
    if strategy == "hybrid_pipeline":
        layout = {"cuts": [cut], "replicas": [1, 1], "microbatches": MICROBATCHES}
        strategy_value = {"class_path": "cnnstrategies.strategies.HybridPipelineStrategy", "init_args": layout}
    logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "runs"}}
    network = {
        "class_path": f"{kind.__module__}.{kind.__name__}",
        "init_args": {"num_classes": CLASSES, **arguments},
    }
    sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01, "momentum": 0.9}}
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": strategy_value, "max_epochs": 1, "log_every_n_steps": 5}
    model = {"network": network, "num_classes": CLASSES, "optimizer": sgd}
    return {
        "seed_everything": 1,
        "trainer": {**trainer, "logger": logger},
        "model": {"class_path": "cnnstrategies.ImageClassifier", "init_args": model},
        "data": {"class_path": "loops.Data", "init_args": {"size": size, "batch": batch}},
    }


def terminal() -> int:
    """A new one, on which nobody looks."""
    reader, writer = pty.openpty()

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(reader, 65536):
                pass

    threading.Thread(target=read, daemon=True).start()
    return writer


def race(strategy: str, name: str, rounds: int) -> list[list[float]]:
    """Seconds of the turns of the bare loop, of `fit`, and under `ddp` of Lightning alone."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "run.yaml").write_text(yaml.safe_dump(configuration(strategy, name)), encoding="utf-8")
        commands = [
            [str(HERE / "loops.py"), strategy, name],
            [str(ROOT / "cli.py"), "fit", "--config", str(folder / "run.yaml")],
            *([[str(HERE / "loops.py"), "lightning", name]] if strategy == "ddp" else []),
        ]
        paths = os.pathsep.join(map(str, (ROOT, HERE)))
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "120"}
        workers = 1 if strategy == "hybrid_pipeline" else 2  # Only the first stage loads.
        shown = terminal()
        contestants = [
            Contestant(
                [sys.executable, *command],
                environment,
                folder / str(place),
                workers,
                cwd=folder,
                stdout=shown,
                stderr=shown if place == 1 else None,
            )
            for place, command in enumerate(commands)
        ]
        return take_turns(contestants, rounds)


def main() -> None:
    """Race, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="by default all; may be repeated")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    rows = [("strategy", "network", "bare loop, ms", "fit, ms", "fit / bare loop", "Lightning alone / bare loop")]
    for strategy in options.strategy or STRATEGIES:
        for name in NETWORKS:
            bare, *others = race(strategy, name, options.rounds)
            medians = [f"{1e3 / STEPS * statistics.median(each):.1f}" for each in (bare, others[0])]
            ratios = [ratio(each, bare) for each in others]
            rows.append((strategy, name, *medians, *ratios, *([""] if len(ratios) == 1 else [])))
            print(*rows[-1], flush=True)
    first, _, rest = (__doc__ or "").partition("\n\n")
    text = "\n\n".join((first, rest.partition("\n\n")[2]))
    sizes = (f"{name} with {of[3]} images of {of[2]} x {of[2]} a rank" for name, of in NETWORKS.items())
    text += f"\nNetworks: {', '.join(sizes)}."
    report(Path(__file__).with_suffix(".md"), "Overhead of fit", text, rows, "gloo, one thread per process")


if __name__ == "__main__":
    main()
