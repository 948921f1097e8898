"""Gradients and parameters compressed to a part of their elements over 100 Mbit/s, against DDP: two hosts.

The hosts are network namespaces with links of 100 Mbit/s, a worker and a server on each. Target: at least 5 times the
samples/s of DDP with VGG-11, and an accuracy on the digits that does not differ by more than half a point.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from across import fit_across, trainer_of
from fits import data, digits_classifier, sgd
from hosts import missing
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from networks import vgg_like
from ranks import report

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies import CompressedDDPStrategy, ParameterServerStrategy

MEGABITS = 100
BATCH_SIZE = 32
EPOCHS = 20


def served(**options: Any) -> Any:
    """A parameter server without encryption, as the peers are."""
    return ParameterServerStrategy(security="none", **options)


def both(compression: Any, **options: Any) -> Any:
    """Compressed in the same way both ways."""
    return served(compression=compression, pull_compression=compression, **options)


STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "ddp_fp16": lambda: CompressedDDPStrategy("fp16"),
    "sync": served,
    "sync, fp16 both ways": lambda: both("fp16"),
    "sync, topk 5 %, pulls fp16": lambda: served(compression="topk", topk_density=0.05, pull_compression="fp16"),
    "sync, onebit both ways": lambda: both("onebit"),
    "sync, topk 5 %, pulls onebit": lambda: served(compression="topk", topk_density=0.05, pull_compression="onebit"),
    "sync, topk 5 % both ways": lambda: both("topk", topk_density=0.05),
    "sync, topk 1 % both ways": lambda: both("topk", topk_density=0.01),
}
TRAINED = ("ddp", "sync, topk 5 % both ways", "sync, onebit both ways")


def worker(folder: Path, name: str, steps: int, seed: int) -> None:
    """One host's part: some steps of VGG-11, or with a seed the digits to the end."""
    if not seed:
        seed_everything(1, verbose=False)
        trainer = trainer_of(STRATEGIES[name](), folder, epochs=1)
        model = ImageClassifier(vgg_like(), 100, optimizer=sgd)
        trainer.fit(model, data(32, 100, 2 * steps * BATCH_SIZE, BATCH_SIZE))
        return
    seed_everything(seed, verbose=False)
    trainer = trainer_of(STRATEGIES[name](), folder, EPOCHS)
    model = digits_classifier([64, 128], EPOCHS)
    trainer.fit(model, DigitsDataModule(batch_size=BATCH_SIZE, seed=seed))


def main() -> None:
    """Time each strategy, train with some, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="of each strategy in a round; the first 5 do not count")
    parser.add_argument("--seeds", type=int, default=5)
    for name, kind in (("--folder", str), ("--strategy", str), ("--seed", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        worker(Path(options.folder), options.strategy, options.steps, options.seed)
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    speeds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    size: dict[str, float] = {}
    for index in range(options.rounds):
        for name in sorted(STRATEGIES, reverse=bool(index % 2)):
            fit, notes = fit_across(MEGABITS, ["--strategy", name, "--steps", str(options.steps), "--seed", "0"])
            speeds[name].append(2 * BATCH_SIZE / fit.seconds_per_step())
            size[name] = notes["bytes"] / 1e6
    reached: dict[str, list[float]] = {name: [] for name in TRAINED}
    for seed in range(1, options.seeds + 1):
        for name in TRAINED:
            _, notes = fit_across(MEGABITS, ["--strategy", name, "--seed", str(seed)])
            reached[name].append(notes["val_acc"])
    rows = [("strategy", "samples/s", "times DDP's, of each round", "MB sent by a host in a step", "digits: val_acc")]
    for name, rates in speeds.items():
        times = ", ".join(f"{speed / base:.2f}" for speed, base in zip(rates, speeds["ddp"], strict=True))
        accuracy = described(reached[name], reached["ddp"]) if name in reached else ""
        rows.append((name, f"{statistics.median(rates):.1f}", times, f"{size[name]:.2f}", accuracy))
    parameters = sum(parameter.numel() for parameter in vgg_like().parameters())
    report(
        Path(__file__).with_suffix(".md"),
        "Compressed both ways over a slow link",
        f"{__doc__}\nVGG-11 with {parameters:,} parameters, batches of {BATCH_SIZE} for each of 2 workers. On the "
        f"digits: SmallCNN with momentum, {EPOCHS} epochs, the mean over {options.seeds} seeds and splits, and the "
        "mean difference to DDP in pairs with the deviation of these.",
        rows,
    )


def described(accuracies: list[float], base: list[float]) -> str:
    """Mean, and mean and deviation of the differences."""
    mean = f"{statistics.mean(accuracies):.4f}"
    if accuracies is base or len(base) < 2:
        return mean
    pairs = [accuracy - base_accuracy for accuracy, base_accuracy in zip(accuracies, base, strict=True)]
    return f"{mean} ({statistics.mean(pairs):+.4f}, {statistics.stdev(pairs):.4f})"


if __name__ == "__main__":
    main()
