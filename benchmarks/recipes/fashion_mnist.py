"""A recipe to its end: Fashion-MNIST with `experiments/fashion_mnist_smallcnn_recipe_cpu`, by the command line.

54,000 images to train on, 6,000 to choose the checkpoint by, and the 10,000 official test images, which neither sees.
The network has 72,666 parameters. The strategy is the one word that differs; with it batch normalisation sees the 64
images of a process, or the 16 of a pipeline's microbatch.
"""

import argparse
import gzip
import itertools
import json
import re
import statistics
import sys
import time
from pathlib import Path

from command import command

HERE = Path(__file__).resolve()
FOLDER = HERE.parents[2] / "build" / "fashion_mnist"  # Of the data and the runs.
STRATEGIES, SEEDS = ("ddp", "hybrid_pipeline"), (1, 2, 3)
CONFIG = "experiments/fashion_mnist_smallcnn_recipe_cpu"
# Of Debian's package dataset-fashion-mnist; elsewhere torchvision downloads the same files.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
PUBLISHED = """Others' test accuracy, from the [list of the data set's
authors](https://github.com/zalandoresearch/fashion-mnist#benchmark), who have not checked it: 0.876 to 0.932 for
networks of 2 or 3 convolutions (0.925 with fewer than 100,000 parameters), 0.949 for a ResNet-18, 0.967 for the best,
with 8.9 million parameters."""


def trained(strategy: str, seed: int) -> tuple[float, float, float]:
    """Test accuracy, and `fit`'s seconds and processor seconds."""
    run = ["--config", CONFIG, "--seed_everything", str(seed), "--trainer.strategy", strategy]
    run += ["--run_name", f"{strategy}_{seed}_{int(time.time())}", "--trainer.enable_progress_bar", "false"]
    _, seconds, used = command(FOLDER, "fit", *run)
    output, _, _ = command(FOLDER, "test", *run, "--ckpt_path", "best")
    match = re.search(r"test_acc +│ +([\d.]+)", output)
    if match is None:
        raise SystemExit(f"no test_acc in the output of test:\n{output}")
    return float(match[1]), seconds, used


def main() -> None:
    """Train and test what has not been yet, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.path.append(str(HERE.parents[1] / "pipeline"))
    from ranks import report

    raw = FOLDER / "datasets/FashionMNIST/raw"
    raw.mkdir(parents=True, exist_ok=True)
    for file in DEBIAN.glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    kept = FOLDER / "results.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    for strategy, seed in itertools.product(STRATEGIES, SEEDS):
        if f"{strategy} {seed}" not in results:
            results[f"{strategy} {seed}"] = trained(strategy, seed)
            kept.write_text(json.dumps(results))
    rows = [("strategy", "seed", "test accuracy", "seconds", "processor seconds of rank 0")]
    for name, (accuracy, seconds, used) in sorted(results.items()):
        rows.append((*name.split(), f"{accuracy:.4f}", f"{seconds:.0f}", f"{used:.0f}"))
    means = []
    for strategy in STRATEGIES:
        reached = [accuracy for name, (accuracy, *_) in results.items() if name.split()[0] == strategy]
        means.append(f"`{strategy}` **{statistics.mean(reached):.4f}** ± {statistics.stdev(reached):.4f}")
    report(
        HERE.with_suffix(".md"),
        "A recipe to its end",
        f"{__doc__}\nTest accuracy, mean and standard deviation over the seeds: {', '.join(means)}.\n\n{PUBLISHED}\n\n"
        "Seconds are those of `fit`, from Enter to the prompt, with as much of the machine as other work left: "
        "processor seconds tell more. What is measured is kept: the same command goes on with it.",
        rows,
    )


if __name__ == "__main__":
    main()
