"""SimCLR and MoCo on the digits, from `docs/examples/contrastive.py`: a linear classifier on what they have learned.

Batches have 64 images, 1150 images train without their labels for 10 epochs. Under `hybrid_pipeline` (two stages) the
loss sees the whole batch, as on one device. Under `ddp` each of two processes has 32 images, and a queue of its own, of
which that of rank 0 counts. The features are those before the two linear layers. A ridge regression on the features of
the training images then classifies the 360 test images.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies import HybridPipelineStrategy

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / "docs" / "examples"), str(HERE.parents[1] / "pipeline")]
from contrastive import MoCo, SimCLR, make_encoder  # noqa: E402
from ranks import report  # noqa: E402

METHODS = {"SimCLR": SimCLR, "MoCo": MoCo}
STRATEGIES, SEEDS, EPOCHS, RIDGE = ("ddp", "hybrid_pipeline"), (1, 2, 3), 10, 1.0
FOLDER = HERE.parents[2] / "build" / "contrastive"


def data() -> DigitsDataModule:
    """Return the digits without augmentation of their own."""
    return DigitsDataModule(global_batch_size=64, augment=False)


def train(method: str, strategy: str, seed: int, file: Path) -> None:
    """Train in this process and the ranks that it forks, and save the encoder's weights on rank 0."""
    torch.set_num_threads(1)
    seed_everything(seed, verbose=False)
    pipeline = HybridPipelineStrategy(replicas=[1, 1], cuts=["5"], submodule="encoder", start_method="fork")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=pipeline if strategy == "hybrid_pipeline" else "ddp_fork",
        max_epochs=EPOCHS,
        limit_val_batches=0,
        **quiet,
    )
    module = METHODS[method]()
    trainer.fit(module, data())
    torch.save(module.encoder.state_dict(), file)


def probe(encoder: nn.Sequential) -> float:
    """Return the test accuracy of a ridge regression on an encoder's features."""
    digits = data()
    digits.setup("fit")
    digits.setup("test")
    sources = digits.train_source, digits.test_source
    with torch.no_grad():
        parts = [(encoder[:10](digits.eval_transform(source.images)), source.targets) for source in sources]
    mean, deviation = parts[0][0].mean(0), parts[0][0].std(0) + 1e-6
    rows = [F.pad((features - mean) / deviation, (0, 1), value=1.0).double() for features, _ in parts]
    wanted = F.one_hot(parts[0][1], 10).double()
    gram = rows[0].T @ rows[0] + RIDGE * torch.eye(rows[0].shape[1], dtype=torch.float64)
    weights: Tensor = torch.linalg.solve(gram, rows[0].T @ wanted)
    return float(((rows[1] @ weights).argmax(1) == parts[1][1]).double().mean())


def measured(method: str, strategy: str, seed: int) -> float:
    """Train with one of the strategies, or not at all, and return the accuracy."""
    if strategy == "untrained":
        seed_everything(seed, verbose=False)
        return probe(make_encoder())
    file = FOLDER / f"{method}_{strategy}_{seed}.pt"
    process = multiprocessing.get_context("fork").Process(target=train, args=(method, strategy, seed, file))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{method} under {strategy} with seed {seed} ended with {process.exitcode}")
    encoder = make_encoder()
    encoder.load_state_dict(torch.load(file, weights_only=True))
    return probe(encoder)


def main() -> None:
    """Train what has not been trained yet, and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    warnings.filterwarnings("ignore")
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = FOLDER / "results.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    kinds = [("none", "untrained"), *((method, strategy) for method in METHODS for strategy in STRATEGIES)]
    for seed in SEEDS:
        for method, strategy in kinds:
            name = f"{method} {strategy} {seed}"
            if name not in results:
                results[name] = measured(method, strategy, seed)
                kept.write_text(json.dumps(results))
    rows: list[tuple[str, ...]] = [("method", "strategy", *(f"seed {seed}" for seed in SEEDS), "mean")]
    for method, strategy in kinds:
        reached = [results[f"{method} {strategy} {seed}"] for seed in SEEDS]
        rows.append((method, strategy, *(f"{value:.3f}" for value in reached), f"{statistics.mean(reached):.3f}"))
    report(HERE.with_suffix(".md"), "Features without labels", str(__doc__), rows)


if __name__ == "__main__":
    main()
