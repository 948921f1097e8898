"""Own steps between outer ones over 100 Mbit/s and 20 ms, against a step in common each time: two hosts.

    python benchmarks/parameter_server/low_communication.py [--seconds 1500] [--only speed]

The hosts are network namespaces with a worker and a server on each, and a wire of 100 Mbit/s and 20 ms there and back
between them. Target: at least 10 times the samples/s of a parameter server in `sync`, and an accuracy on the digits
that does not differ from DDP's by more than half a point. What is measured is kept: the same command goes on with it.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from across import fit_across, trainer_of  # First: it makes the pipeline's benchmarks importable.
from both_ways import described
from fits import WARM_UP, data, digits_classifier, sgd
from hosts import missing
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from networks import vgg_like
from pieces import Pieces, parser
from ranks import report

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies import ParameterServerStrategy

MEGABITS, MILLISECONDS = 100, 20.0
BATCH_SIZE = 16
STEPS = 15  # of what exchanges something in each of them
EPOCHS, SEEDS = 20, 5
DILOCO: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}


def local(every: int, **options: Any) -> Any:
    """A parameter server in mode local, without encryption, as the peer is."""
    return ParameterServerStrategy("local", sync_every=every, security="none", timeout=60, **options)


SPEED: dict[str, Any] = {
    "ddp": DDPStrategy,
    "sync": lambda: ParameterServerStrategy(security="none", timeout=60),
    "local, 32 own steps": lambda: local(32),
    "local, 100": lambda: local(100),
}
EVERY = {"ddp": 1, "sync": 1}
for variant in SPEED:
    EVERY.setdefault(variant, 100 if "100" in variant else 32)
ACCURACY: dict[str, Any] = {
    "ddp": DDPStrategy,
    "local, 8": lambda: local(8),
    "local, 8, DiLoCo": lambda: local(8, **DILOCO),
}


def worker(folder: Path, name: str, seed: int) -> None:
    """One host's part: some steps of VGG-11, or with a seed the digits to the end."""
    if not seed:
        seed_everything(1, verbose=False)
        trainer = trainer_of(SPEED[name](), folder, epochs=1)
        steps = WARM_UP + (2 * EVERY[name] if EVERY[name] > 1 else STEPS)
        trainer.fit(ImageClassifier(vgg_like(), 100, optimizer=sgd), data(32, 100, 2 * steps * BATCH_SIZE, BATCH_SIZE))
        return
    seed_everything(seed, verbose=False)
    trainer = trainer_of(ACCURACY[name](), folder, EPOCHS)
    model = digits_classifier([32, 64], EPOCHS)
    trainer.fit(model, DigitsDataModule(batch_size=32, seed=seed))


def measure(piece: str) -> float:
    """One fit's samples/s, or its accuracy at the end."""
    kind, number, name = piece.split(": ", 2)
    if kind == "speed":
        fit, _ = fit_across(MEGABITS, ["--strategy", name, "--seed", "0"], MILLISECONDS)
        return fit.samples_per_second()
    _, notes = fit_across(1000, ["--strategy", name, "--seed", number])
    return notes["val_acc"]


def main() -> None:
    """Time each strategy, train with some, and write the page."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=2)
    for name, kind in (("--folder", str), ("--strategy", str), ("--seed", int)):
        made.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.folder:
        worker(Path(options.folder), options.strategy, options.seed)
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    speeds = [f"speed: {number}: {name}" for number in range(options.rounds) for name in SPEED]
    accuracies = [f"digits: {seed}: {name}" for seed in range(1, SEEDS + 1) for name in ACCURACY]
    pieces = Pieces(options)
    if pieces.measure([*speeds, *accuracies], measure):
        page(pieces.known, options.rounds)


def page(known: dict[str, float], rounds: int) -> None:
    """Write the page.

    Args:
        known: What was measured, by piece.
        rounds: Of the speeds.
    """
    rows = [("strategy", "VGG-11: samples/s", "times sync's, of each round", "digits: val_acc")]
    for name in SPEED:
        speeds, base = (
            [known[f"speed: {number}: {variant}"] for number in range(rounds)] for variant in (name, "sync")
        )
        times = ", ".join(f"{speed / other:.1f}" for speed, other in zip(speeds, base, strict=True))
        rows.append((name, f"{statistics.median(speeds):.1f}", times, ""))
    reached = {name: [known[f"digits: {seed}: {name}"] for seed in range(1, SEEDS + 1)] for name in ACCURACY}
    rows += [(name, "", "", described(accuracies, reached["ddp"])) for name, accuracies in reached.items()]
    parameters = sum(parameter.numel() for parameter in vgg_like().parameters())
    report(
        Path(__file__).with_suffix(".md"),
        "Own steps between outer ones, over a slow and long link",
        f"{__doc__}\nVGG-11 with {parameters:,} parameters, batches of {BATCH_SIZE} for each of 2 workers, two rounds "
        f"of own steps with their outer step. On the digits: SmallCNN with momentum, {EPOCHS} epochs of 22 steps, a "
        f"validation and so an outer step after each; the mean over {SEEDS} seeds and splits, and the mean difference "
        "to DDP in pairs with the deviation of these.",
        rows,
    )


if __name__ == "__main__":
    main()
