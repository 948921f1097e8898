"""The hybrid pipeline trains the same model as one process, through the command line and with what users switch on."""

import csv
import os
from pathlib import Path

import pytest
import torch

from cnnstrategies.pipeline.stage import StageModule

# Without batch normalisation, whose statistics are those of a microbatch; in float64, so that the order of summation
# leaves no trace. 5 batches of 64 and one of 30 samples, which is fewer than two microbatches times 16, and even:
# DDP takes the mean of its ranks' means, which equals the mean over the batch only where their shares are equal.
# Of the validation data a few batches of each rank's part, which are other samples than those of one process.
COMMON = [
    "--model.init_args.network=conftest.PlainCNN",
    "--trainer.precision=64-true",
    "--trainer.max_epochs=2",
    "--trainer.num_sanity_val_steps=0",
    "--data.init_args.augment=false",
    "--data.init_args.val_split=0.7565",
    "--trainer.limit_val_batches=3",
    "--checkpoint.monitor=null",
    "--trainer.logger=CSVLogger",
    "--trainer.logger.init_args.save_dir=runs",
]
ONE = ["--trainer.strategy=auto", "--trainer.devices=1"]
ALL_VALIDATION_DATA = "--trainer.limit_val_batches=1.0"
OPTIMIZERS = {
    "sgd": [],
    "adamw, clipping by value": [
        "--model.init_args.optimizer=torch.optim.AdamW",
        "--model.init_args.optimizer.init_args.lr=0.002",
        "--trainer.gradient_clip_val=0.01",
        "--trainer.gradient_clip_algorithm=value",
    ],
    "clipping": ["--trainer.gradient_clip_val=0.5", "--trainer.accumulate_grad_batches=2"],
}


def hybrid(replicas, cuts, **options):
    options = {"replicas": replicas, "cuts": cuts, "start_method": "fork", **options}
    return [
        "--trainer.strategy.class_path=HybridPipelineStrategy",
        f"--trainer.devices={sum(replicas)}",
        *(f"--trainer.strategy.init_args.{name}={value}" for name, value in options.items()),
    ]


LAYOUTS = {
    "1-1 compiled": [*hybrid([1, 1], ["1"], microbatches=4), "--model.init_args.compile_backend=aot_eager"],
    "2-1 gpipe": hybrid([2, 1], ["2"], microbatches=4, schedule="gpipe", placement="replicas"),
    "1-2-1": hybrid([1, 2, 1], ["1", "4"], microbatches=6, activation_checkpointing="always"),
}


def fit(run_cli, quick, name, *args):
    code, output = run_cli("fit", *quick, *COMMON, f"--trainer.logger.init_args.name={name}", *args)
    assert code == 0, output
    return torch.load(checkpoint(name), weights_only=True)


def checkpoint(name, version=0):
    return Path("runs") / name / f"version_{version}/checkpoints/last.ckpt"


def logged(name, version=0):
    with (Path("runs") / name / f"version_{version}/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [key for key in rows[0] if key != "samples_per_s" and not key.startswith("servers/")]
    return [{key: float(row[key]) for key in names if row[key]} for row in rows]


def assert_same_run(actual, expected, rtol=1e-9):
    """Weights, optimizer and scheduler state of two checkpoints."""
    assert list(actual["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        error = float((actual["state_dict"][name] - value).norm() / value.norm())
        assert error <= rtol, f"{name}: relative error {error:.1e}"
    for got, wanted in zip(actual["optimizer_states"], expected["optimizer_states"], strict=True):
        assert got["param_groups"] == wanted["param_groups"]
        assert got["state"].keys() == wanted["state"].keys()
        for index, state in wanted["state"].items():
            for key, value in state.items():
                assert torch.allclose(
                    torch.as_tensor(got["state"][index][key]), torch.as_tensor(value), rtol=1e3 * rtol
                )
    assert actual["lr_schedulers"] == expected["lr_schedulers"]
    assert actual["global_step"] == expected["global_step"]


@pytest.mark.parametrize(
    ("optimizer", "layout"), [("sgd", "1-2-1"), ("adamw, clipping by value", "1-1 compiled"), ("clipping", "2-1 gpipe")]
)
def test_equals_one_process(run_cli, quick, optimizer, layout, monkeypatch):
    noted = lambda self, **options: Path(f"compiled by {os.getpid()}").write_text(options["backend"])  # noqa: E731
    monkeypatch.setattr(StageModule, "compile", noted)  # What compiled stages train: `test_compiled.py`.
    options = [*OPTIMIZERS[optimizer], ALL_VALIDATION_DATA]
    single = fit(run_cli, quick, "single", *options, *ONE)
    assert_same_run(fit(run_cli, quick, "piped", *options, *LAYOUTS[layout]), single)
    for got, expected in zip(logged("piped"), logged("single"), strict=True):
        assert got == pytest.approx(expected, rel=1e-6)
    backends = [path.read_text() for path in Path().glob("compiled by *")]
    assert backends == ["aot_eager"] * (2 if "compiled" in layout else 0)
