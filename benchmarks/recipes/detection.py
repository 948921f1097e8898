"""A detector on generated images with shapes, with `experiments/synthetic_retinanet_ddp_cpu`, by the command line.

COCO's mean average precision of 80 validation images after the last epoch. `ddp` and the parameter server have two
processes with 8 images of each batch of 16. In `async` and `ssp` each process makes steps of its own with gradients
of values that are one update old. Their learning rate is a third, beta 1 of AdamW is 0.5 in place of 0.9, and they have
20 epochs in place of 16. In `sync` the parameter server trains the weights of `ddp`, so that it is not a row.
"""

import argparse
import csv
import json
import sys
import time
from pathlib import Path

from command import command

HERE = Path(__file__).resolve()
FOLDER = HERE.parents[2] / "build" / "detection"
CONFIG = ["--config", "experiments/synthetic_retinanet_ddp_cpu"]
ONE_DEVICE = ["--trainer.devices", "1", "--trainer.strategy", "auto"]
OPTIMIZER = "--model.init_args.optimizer.init_args"
CALM = [f"{OPTIMIZER}.lr", "0.001", f"{OPTIMIZER}.betas", "[0.5,0.999]", "--trainer.max_epochs", "20"]
STRATEGY = "--trainer.strategy"
# By row: the arguments of `fit`.
RUNS = {
    "one device": [*CONFIG, *ONE_DEVICE],
    "`ddp`": CONFIG,
    "`parameter_server`, `async`": [*CONFIG, STRATEGY, "parameter_server_async", *CALM],
    "`parameter_server`, `ssp`": [*CONFIG, STRATEGY, "parameter_server_ssp", *CALM],
    "`parameter_server`, `local`": [*CONFIG, "--config", "strategy/parameter_server_local"],
}


def trained(words: list[str]) -> tuple[list[float], float]:
    """Return `val_map` after each epoch, and the processor seconds of `fit` with its processes."""
    name = f"run_{time.time_ns()}"
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", ".", "--trainer.logger.name", name]
    _, _, seconds = command(FOLDER, "fit", *words, *logger)
    with next((FOLDER / name).rglob("metrics.csv")).open() as file:
        return [float(row["val_map"]) for row in csv.DictReader(file) if row.get("val_map")], seconds


def stored(file: Path) -> dict[str, tuple[list[float], float]]:
    """Return the results that a file has, by row."""
    results: dict[str, tuple[list[float], float]] = json.loads(file.read_text()) if file.is_file() else {}
    return results


def main() -> None:
    """Train what has not been trained yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the rows to train")
    only = parser.parse_args().only
    sys.path.append(str(HERE.parents[1] / "pipeline"))
    from ranks import report

    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = FOLDER / "results.json"
    results = stored(kept)
    for name, words in RUNS.items():
        if name not in results and only in name:
            result = trained(words)
            results = {**stored(kept), name: result}
            kept.write_text(json.dumps(results))
    rows = [("strategy", "epochs", "val_map after a quarter", "a half", "the last epoch", "processor seconds")]
    for name in RUNS:
        if name in results:
            values, seconds = results[name]
            count = len(values)
            chosen = [values[count // 4 - 1], values[count // 2 - 1], values[-1]]
            rows.append((name, str(count), *(f"{value:.3f}" for value in chosen), f"{seconds:.0f}"))
    seconds_of = "rank 0's process and of the processes that it waits for, with their start"
    text = f"{__doc__}\nProcessor seconds are those of {seconds_of}."
    report(HERE.with_suffix(".md"), "A detector on shapes", text, rows)


if __name__ == "__main__":
    main()
