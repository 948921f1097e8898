"""Compressed pushes and pulls over 100 Mbit/s against DDP: the digits on two hosts.

The hosts are network namespaces with links of 100 Mbit/s, a worker and a server on each. Target: at least 1.8 times the
samples/s of DDP without compression, at the same accuracy at the end. Bytes are what the first host's network device
sends.
"""

import argparse
from pathlib import Path
from typing import Any

from across import fit_across, trainer_of
from fits import digits_classifier
from hosts import missing
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from ranks import report

from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.strategies import CompressedDDPStrategy, ParameterServerStrategy

MEGABITS = 100
WIDTHS = [64, 128]


def served(mode: str = "sync", **options: Any) -> Any:
    """A parameter server without encryption, as the peers are."""
    return ParameterServerStrategy(mode, security="none", **options)  # type: ignore[arg-type]


STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "ddp_fp16": lambda: CompressedDDPStrategy("fp16"),
    "sync": served,
    "sync, fp16 both ways": lambda: served(compression="fp16", pull_compression="fp16"),
    "sync, topk 5 %, pulls fp16": lambda: served(compression="topk", topk_density=0.05, pull_compression="fp16"),
    "local, every 8 steps": lambda: served("local", sync_every=8),
}


def worker(folder: Path, name: str, epochs: int) -> None:
    """One host's part of a fit."""
    trainer = trainer_of(STRATEGIES[name](), folder, epochs)
    seed_everything(1, verbose=False)
    model = digits_classifier(WIDTHS, epochs)
    trainer.fit(model, DigitsDataModule(batch_size=32))


def main() -> None:
    """Train with each strategy over the slow link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    for name in ("--folder", "--strategy"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        worker(Path(options.folder), options.strategy, options.epochs)
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    results = {}
    for name in STRATEGIES:
        fit, notes = fit_across(MEGABITS, ["--strategy", name, "--epochs", str(options.epochs)])
        results[name] = (fit.samples_per_second(), notes["bytes"], notes["val_acc"])
    rows = [("strategy", "samples/s", "times DDP's", "MB sent by a host in a step", "val_acc at the end")]
    for name, (speed, size, accuracy) in results.items():
        rows.append((name, f"{speed:.0f}", f"{speed / results['ddp'][0]:.2f}", f"{size / 1e6:.2f}", f"{accuracy:.4f}"))
    parameters = sum(p.numel() for p in SmallCNN(10, widths=WIDTHS).parameters())
    report(
        Path(__file__).with_suffix(".md"),
        "Compression over a slow link",
        f"{__doc__}\nSmallCNN with {parameters:,} parameters, batches of 32 for each of 2 workers, {options.epochs} "
        "epochs; validation is part of the time.",
        rows,
    )


if __name__ == "__main__":
    main()
