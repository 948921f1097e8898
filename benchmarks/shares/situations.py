"""Measured shares against equal shares in twenty situations: ``shares: auto`` must never make a training slower.

The ranks' speeds are planted: a rank sleeps for each sample that it loads or computes, so that the ratios do not depend
on other work of the machine. Auto begins with equal shares. The steps in which it searches for shares, or tries shares
that do not help, count. The target is 0.97 of the speed of equal shares if both ranks are equally fast, and also where
shares cannot help.
"""

import argparse
import copy
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "parameter_server"), str(Path(__file__).parents[1] / "pipeline")]

import torch
from fits import Clock, in_fork  # First: it makes the pipeline's benchmarks importable.
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import report
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.strategies import BalancedDDPStrategy, ParameterServerStrategy

TIME_LIMIT = 300
KEPT = 0.97  # Least speed of measured shares, relative to equal shares.
SAMPLE = 0.0005  # Seconds that a rank of speed 1 computes for a sample.


@dataclass(frozen=True)
class Situation:
    """A training with planted speeds.

    Attributes:
        least: Least speed of measured shares, relative to equal shares.
        compute: Function of the rank and the step; it returns the seconds of the forward and backward for a sample.
        fixed: Seconds of the forward and backward that do not depend on the number of samples, for each rank.
        load: Seconds of loading a sample, for each rank.
        workers: Number of loading workers.
        batch: Number of samples of each rank, with equal shares.
        batch_norm: Whether the network has batch normalisation, so that DDP broadcasts buffers in each forward.
        log: Whether each step logs a value with ``sync_dist``.
        barrier: Whether each step calls a barrier.
        callbacks: Function that returns the callbacks.
        servers: Whether the strategy is ``parameter_server`` in mode ``sync``.
    """

    least: float = KEPT
    compute: Callable[[int, int], float] = lambda rank, step: SAMPLE
    fixed: tuple[float, float] = (0.0, 0.0)
    load: tuple[float, float] = (0.0, 0.0)
    workers: int = 0
    batch: int = 32
    batch_norm: bool = False
    log: bool = False
    barrier: bool = False
    callbacks: Callable[[], list[Callback]] = field(default=list)
    servers: bool = False


def slow(times: float) -> Callable[[int, int], float]:
    """Return the seconds for a sample where rank 1 takes so many times as long."""
    return lambda rank, step: SAMPLE * (times if rank == 1 else 1)


def noisy(deviation: float) -> Callable[[int, int], float]:
    """Return the seconds for a sample that differ from step to step and from rank to rank."""
    return lambda rank, step: SAMPLE * max(0.2, random.Random(f"{rank} {step}").gauss(1, deviation))


def drifting(rank: int, step: int) -> float:
    """Return the seconds for a sample on a machine whose speed changes slowly."""
    return SAMPLE * (1 + 0.3 * math.sin(step / 15))


def slow_later(rank: int, step: int) -> float:
    """Return the seconds for a sample where rank 1 becomes slow."""
    return SAMPLE * (4 if rank == 1 and step >= 50 else 1)


class Sleeper(Callback):
    """Sleeps after each batch, on some ranks."""

    def __init__(self, seconds: float, ranks: Sequence[int]) -> None:
        self.seconds, self.ranks = seconds, ranks

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Sleep."""
        if trainer.global_rank in self.ranks:
            time.sleep(self.seconds)


class Average(Callback):
    """Averages weights after each batch, with a deep copy of the module."""

    def __init__(self) -> None:
        self.average: Any = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Copy the module and average."""
        copied = copy.deepcopy(pl_module.network)
        if self.average is not None:
            with torch.no_grad():
                for mean, value in zip(self.average.parameters(), copied.parameters(), strict=True):
                    value.lerp_(mean, 0.99)
        self.average = copied


class SlowDisk(ModelCheckpoint):
    """Saves a checkpoint every ten steps, to a disk on which rank 0 writes for a while."""

    def __init__(self) -> None:
        super().__init__(every_n_train_steps=10)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.is_global_zero:
            time.sleep(0.05)
        super()._save_checkpoint(trainer, filepath)


SITUATIONS = {
    "both ranks alike": Situation(),
    "noise of 20 %": Situation(compute=noisy(0.2)),
    "noise of 50 %": Situation(compute=noisy(0.5)),
    "the machine's speed drifts": Situation(compute=drifting),
    "two samples for each rank": Situation(compute=noisy(0.3), batch=2),
    "time of a step without samples": Situation(compute=lambda rank, step: 0.0, fixed=(0.015, 0.015)),
    "the same, rank 1 twice as slow": Situation(compute=lambda rank, step: 0.0, fixed=(0.01, 0.02)),
    "a callback on both ranks": Situation(callbacks=lambda: [Sleeper(0.01, (0, 1))]),
    # Lightning's broadcast in each batch makes rank 1 wait for the callback, so that shares cannot help.
    "a callback on rank 0": Situation(callbacks=lambda: [Sleeper(0.02, (0,))]),
    "averages by deep copies": Situation(callbacks=lambda: [Average()]),
    "checkpoints on a slow disk": Situation(callbacks=lambda: [SlowDisk()]),
    "a log with sync_dist in each step": Situation(log=True),
    "the same, rank 1 at a quarter": Situation(1.6, compute=slow(4), log=True),
    "a barrier in each step, batch norm": Situation(batch_norm=True, barrier=True),
    "the same, rank 1 at half speed": Situation(1.15, compute=slow(2), batch_norm=True, barrier=True),
    "rank 1 at a quarter, batch norm": Situation(1.6, compute=slow(4), batch_norm=True),
    "rank 1 at a quarter after a third": Situation(1.3, compute=slow_later),
    "a slow loader on rank 0, batch norm": Situation(1.1, load=(0.0015, 0.0), batch_norm=True),
    "the same, two workers": Situation(1.1, load=(0.003, 0.0), batch_norm=True, workers=2),
    "servers, rank 1 at a quarter, logs": Situation(1.5, compute=slow(4), log=True, servers=True),
}


class Planted(LightningModule):
    """A small network whose training step takes the planted time: a third in the forward, the rest in backward."""

    def __init__(self, situation: Situation) -> None:
        super().__init__()
        self.situation = situation
        norm = [nn.BatchNorm1d(16)] if situation.batch_norm else []
        self.network = nn.Sequential(nn.Linear(16, 16), *norm, nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Sleep for each sample, and train."""
        images, targets = batch
        rank = self.trainer.global_rank
        seconds = len(images) * self.situation.compute(rank, batch_idx) + self.situation.fixed[rank]
        time.sleep(seconds / 3)
        loss = nn.functional.cross_entropy(self.network(images), targets)
        loss.register_hook(lambda gradient: time.sleep(seconds * 2 / 3))
        if self.situation.log:
            self.log("loss", loss, sync_dist=True)
        if self.situation.barrier:
            self.trainer.strategy.barrier()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), 0.01)


class Collate:
    """Makes a batch, and sleeps for each of its samples."""

    seconds = 0.0

    def __call__(self, samples: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Make a batch."""
        time.sleep(self.seconds * len(samples))
        return [torch.stack(column) for column in zip(*samples, strict=True)]


class Shares(Clock):
    """Notes the end of each batch and its samples, and plants the seconds of the rank's loader."""

    def __init__(self, folder: Path, situation: Situation, collate: Collate) -> None:
        super().__init__(folder)
        self.situation, self.collate = situation, collate

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Plant the seconds before the loader starts."""
        self.collate.seconds = self.situation.load[trainer.global_rank]


Shares.__module__ = "cnnstrategies.shares"  # Otherwise its hooks would count as hooks of a user.


def train(folder: Path, name: str, shares: str, steps: int) -> None:
    """Train with these shares; the ranks write their notes into the folder."""
    situation, collate = SITUATIONS[name], Collate()
    strategy = ParameterServerStrategy if situation.servers else BalancedDDPStrategy
    callbacks = situation.callbacks()
    samples = 2 * situation.batch * steps
    dataset = TensorDataset(torch.randn(samples, 16), torch.randint(2, (samples,)))
    loader: DataLoader[Any] = DataLoader(
        dataset, situation.batch, shuffle=True, collate_fn=collate, num_workers=situation.workers
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(shares=shares, start_method="fork"),
        max_epochs=1,
        callbacks=[*callbacks, Shares(folder, situation, collate)],
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Planted(situation), loader)


def measured(name: str, shares: str, steps: int) -> tuple[float, list[int], list[str]]:
    """Return the samples/s of a training, the last samples of each rank, and the lines about changes of the shares."""
    fit, output = in_fork(partial(train, name=name, shares=shares, steps=steps), 2, TIME_LIMIT)
    lines = [line for line in output.splitlines() if "shares" in line or "ranks" in line]
    return fit.samples_per_second(), [counts[-1] for counts in fit.samples], lines


Rounds = list[tuple[float, float, list[int]]]  # Samples/s with equal shares and with auto, and auto's last samples.


def one_round(name: str, steps: int) -> tuple[float, float, list[int]]:
    """Train with equal shares and with measured shares."""
    equal, auto = (measured(name, shares, steps) for shares in ("equal", "auto"))
    print(*auto[2], sep="\n")
    return equal[0], auto[0], auto[1]


def ratios(rounds: Rounds) -> list[float]:
    """Return the speeds of measured shares, relative to equal shares."""
    return [auto / equal for equal, auto, _ in rounds]


def spread(rounds: Rounds) -> str:
    """Return the median ratio with the least and the largest ratio."""
    return f"{statistics.median(ratios(rounds)):.2f} ({min(ratios(rounds)):.2f} to {max(ratios(rounds)):.2f})"


def main() -> None:
    """Measure all situations, or some, in turns, and write the page. Situations that were measured are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="situations to try, without a page; by default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--longer", type=int, default=500, help="steps with which rows below their target are repeated")
    parser.add_argument("--results", type=Path, help="file of the results so far, for a run that was interrupted")
    options = parser.parse_args()
    results = options.results or Path(tempfile.gettempdir()) / "cnnstrategies_situations.json"
    settings = [options.rounds, options.steps, options.longer]
    done: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    if done.get("settings") != settings:
        done = {"settings": settings}

    def rounds_of(name: str, steps: int) -> Rounds:
        key = f"{name}, {steps} steps"
        if key not in done:
            done[key] = [one_round(name, steps) for _ in range(options.rounds)]
            results.write_text(json.dumps(done))
            print(key, [f"{auto / equal:.2f} {counts}" for equal, auto, counts in done[key]], flush=True)
        rounds: Rounds = done[key]
        return rounds

    names = options.names or list(SITUATIONS)
    for name in names:
        rounds_of(name, options.steps)
    if options.names:
        return  # The page has all situations.
    longer = f"with {options.longer} steps"
    rows = [("situation", "equal, samples/s", "auto, times as fast", "samples of the ranks at last", "target", longer)]
    for name in names:
        rounds, least = rounds_of(name, options.steps), SITUATIONS[name].least
        reaches = statistics.median(ratios(rounds)) >= least
        rows.append(
            (
                name,
                f"{statistics.median(equal for equal, _, _ in rounds):.0f}",
                spread(rounds) if reaches else f"**{spread(rounds)}**",
                "; ".join(" and ".join(map(str, counts)) for _, _, counts in rounds),
                f"at least {least:g}",
                "" if reaches else spread(rounds_of(name, options.longer)),
            )
        )
    report(
        Path(__file__).with_suffix(".md"),
        "Twenty situations for measured shares",
        f"{__doc__}\nA small network on two ranks, {options.steps} steps, equal and auto in turns; medians of "
        f"{options.rounds} rounds, with the smallest and largest. Rows below their target (bold) are measured again "
        "with more steps: shares that bring less than was predicted are taken back, which costs the same number of "
        "steps in a short training as in a long one.",
        rows,
    )
    results.unlink()


if __name__ == "__main__":
    main()
