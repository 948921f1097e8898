"""An hour's soak: a training without faults, with the callbacks `Guard` and `SlowLines`, under all strategies in turn.

    python benchmarks/guard/soak.py [--minutes 60] [--rounds 3] [--results FILE]

A residual network trains on noisy images of 16 x 16, with random flips, a cyclic learning rate, and a validation and a
checkpoint in each epoch of 64 steps. Two processes share the machine, or one. The guard checks after each 20 steps, and
computes layers twice in each hundredth step. It should find nothing.

The machine also does other work, so steps do become slower: a line about slow steps can be true. Each rank therefore
measures its own step times without the callback. A line about steps counts as confirmed if the median of the 50 steps
from its first step on is at least a tenth above the median of the 150 steps before them, on any rank. The load is the
mean number of processes that could run, during the run. "Left" counts process groups that still exist after a run.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "pipeline"), str(Path(__file__).parent)]

import torch
from guarded import run_in_fork
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from ranks import report
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import Guard, SlowLines
from cnnstrategies.cluster.rendezvous import ranks_meet
from cnnstrategies.networks import SmallResNet
from cnnstrategies.strategies import (
    BalancedDDPStrategy,
    HybridPipelineStrategy,
    ParameterServerStrategy,
    SpatialStrategy,
)

FORK: Any = {"start_method": "fork"}
# For each strategy: number of processes, samples in a batch of the loader, and the strategy.
STRATEGIES: dict[str, tuple[int, int, Callable[[], Any]]] = {
    "one device": (1, 8, lambda: "auto"),
    "ddp": (2, 8, lambda: DDPStrategy(**FORK)),
    "ddp_balanced": (2, 8, lambda: BalancedDDPStrategy(**FORK)),
    "hybrid_pipeline": (2, 16, lambda: HybridPipelineStrategy(cuts=["group2"], microbatches=2, **FORK)),
    "spatial": (2, 16, lambda: SpatialStrategy(parts=2, **FORK)),
    "parameter_server, sync": (2, 8, lambda: ParameterServerStrategy(**FORK)),
    "parameter_server, async": (2, 8, lambda: ParameterServerStrategy(mode="async", **FORK)),
    "parameter_server, ssp": (2, 8, lambda: ParameterServerStrategy(mode="ssp", **FORK)),
    "parameter_server, local": (2, 8, lambda: ParameterServerStrategy(mode="local", **FORK)),
}
CLASSES, SAMPLES, EVERY = 5, 1024, 20
SINCE = re.compile(r"^slow since step (\d+):.*", re.M)
LATER, EARLIER, SLOWER = 50, 150, 1.1  # Steps after and before the first slow one, and their smallest ratio.


class NoisyImages(Dataset[tuple[Tensor, int]]):
    """Images with the pattern of their class, which are flipped and disturbed when they are read.

    Args:
        samples: Number of images.
    """

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.patterns = torch.randn(CLASSES, 3, 16, 16, generator=generator)
        self.targets = torch.randint(CLASSES, (samples,), generator=generator).tolist()

    def __len__(self) -> int:
        """Number of images."""
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Image (3, 16, 16), and its class."""
        image = self.patterns[self.targets[index]] + 3 * torch.randn(3, 16, 16)
        return image.flip(-1) if torch.rand(()) < 0.5 else image, self.targets[index]


class RunLog(Callback):
    """Callback that writes what a rank has seen to a file.

    Args:
        guard: The guard.
        folder: Folder of the files, which have the ranks' numbers as names.
    """

    def __init__(self, guard: Guard, folder: Path) -> None:
        self.guard, self.folder = guard, folder
        self.seconds: list[float] = []
        self.loads: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Measure the step, without what runs between two epochs."""
        now = time.monotonic()
        self.seconds.append(now - getattr(self, "last", now))
        self.last = now

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the load, and the loss."""
        self.loads.append(os.getloadavg()[0])
        if trainer.is_global_zero and "train_loss" in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        values = {
            "steps": trainer.global_step,
            "summary": dict(self.guard.summary_rows()).get("guard", "0 checks"),
            "findings": [str(finding) for finding in self.guard.findings],
            "seconds": self.seconds,
            "load": statistics.fmean(self.loads or [os.getloadavg()[0]]),
            "losses": self.losses,
        }
        (self.folder / str(trainer.global_rank)).write_text(json.dumps(values))


def train(strategy: str, seconds: float, seed: int, folder: Path) -> None:
    """Train for a time. The process leads a process group of its own, whose number is written to a file."""
    os.setsid()
    (folder / "group").write_text(str(os.getpid()))
    seed_everything(seed, verbose=False)
    devices, batch, make = STRATEGIES[strategy]
    (folder / "ranks").mkdir()
    guard = Guard(every=EVERY, replay_every=5 * EVERY)
    module = ImageClassifier(
        SmallResNet(CLASSES, blocks=1),
        CLASSES,
        partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-4),
        partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=300),
        lr_interval="step",
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=make(),
        max_epochs=-1,
        max_time={"seconds": round(seconds)},
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[guard, SlowLines(), ModelCheckpoint(folder), RunLog(guard, folder / "ranks")],
    )
    with ranks_meet(trainer.strategy):
        trainer.fit(module, DataLoader(NoisyImages(SAMPLES), batch, shuffle=True), DataLoader(NoisyImages(64), batch))


def is_confirmed(first: int, times: Sequence[Sequence[float]]) -> bool:
    """Return whether steps were slower from a step on, on any rank.

    Args:
        first: Number of the first slow step.
        times: Seconds of the steps, for each rank.
    """
    pairs = [(seconds[max(0, first - EARLIER) : first], seconds[first : first + LATER]) for seconds in times]
    return any(
        before and after and statistics.median(after) >= SLOWER * statistics.median(before) for before, after in pairs
    )


def soaked(strategy: str, seconds: float, seed: int) -> dict[str, Any]:
    """Train for a time, and return what was seen."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        run_in_fork(partial(train, strategy, seconds, seed, folder), folder / "printed", seconds + 300)
        ranks = [json.loads(file.read_text()) for file in sorted((folder / "ranks").iterdir())]
        printed = (folder / "printed").read_text(errors="replace")
        is_left = has_members(int((folder / "group").read_text()))
    times = [rank["seconds"] for rank in ranks]
    return {
        "steps": max(rank["steps"] for rank in ranks),
        "checks": sum(int(rank["summary"].split()[0]) for rank in ranks),
        "findings": sorted({finding for rank in ranks for finding in rank["findings"]}),
        "slow": [
            {"line": match[0], "confirmed": is_confirmed(int(match[1]), times), "in steps": "a step takes" in match[0]}
            for match in SINCE.finditer(printed)
        ],
        "load": statistics.fmean(rank["load"] for rank in ranks),
        "losses": ranks[0]["losses"],
        "seconds": seconds,
        "left": int(is_left),
    }


def has_members(group: int) -> bool:
    """Return whether a process group has members."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def row_of(strategy: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the page's row about the runs of a strategy."""
    slow = [entry for run in runs for entry in run["slow"]]
    judged = [entry for entry in slow if entry["in steps"]]
    losses = [f"{run['losses'][0]:.2f} to {run['losses'][-1]:.2f}" for run in runs if run["losses"]]
    return [
        strategy,
        f"{sum(run['seconds'] for run in runs) / 60:.1f}",
        f"{sum(run['steps'] for run in runs):,}",
        f"{sum(run['checks'] for run in runs):,}",
        "; ".join(finding for run in runs for finding in run["findings"]) or "none",
        f"{len(judged)} ({sum(entry['confirmed'] for entry in judged)} confirmed)",
        str(len(slow) - len(judged)),
        f"{statistics.fmean(run['load'] for run in runs):.1f}",
        losses[0] if losses else "",
        str(sum(run["left"] for run in runs)),
    ]


HEADING = (
    *("strategy", "minutes", "steps", "checks", "findings", "lines about slow steps"),
    *("lines about validations, checkpoints and callbacks", "load", "loss", "left"),
)


def main() -> None:
    """Run the soak, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="length of all runs together")
    parser.add_argument("--rounds", type=int, default=3, help="number of runs under each strategy")
    parser.add_argument("--results", type=Path, help="file that keeps results; known runs are not repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text())
    seconds = 60 * options.minutes / options.rounds / len(STRATEGIES)
    for seed in range(options.rounds):
        for strategy in STRATEGIES:
            key = f"{strategy}, run {seed}"
            if key in results:
                continue
            results[key] = soaked(strategy, seconds, seed)
            print(key, {name: value for name, value in results[key].items() if name != "losses"}, flush=True)
            if options.results is not None:
                options.results.write_text(json.dumps(results, indent=1))
    rows = [
        row_of(strategy, [run for key, run in results.items() if key.startswith(f"{strategy}, run ")])
        for strategy in STRATEGIES
    ]
    text = "\n\n".join(part for part in (__doc__ or "").split("\n\n") if not part.startswith(" "))
    report(Path(__file__).with_suffix(".md"), "An hour's soak of the guard", text, [list(HEADING), *rows])


if __name__ == "__main__":
    main()
