"""The proof of a strategy: same seed, same global batch, same weights as one process."""

import re
from pathlib import Path

import panels
import pytest
import torch
from conftest import PlainCNN

NETWORK = [
    # Without batch normalisation, whose statistics are those of each rank's part; in float64, so that the order of
    # summation leaves no trace. 350 samples: 5 whole global batches of 64 and one of 30, which is shared out evenly.
    "--model.init_args.network=conftest.PlainCNN",
    "--trainer.precision=64-true",
    "--trainer.max_epochs=2",
    "--data.init_args.augment=false",
    "--data.init_args.val_split=0.7565",
    "--trainer.limit_val_batches=1",
    "--checkpoint.monitor=null",
]


RECIPE = [
    "--model.init_args.decay_norms_and_biases=false",
    "--model.init_args.layer_lr_decay=0.5",
    "--model.init_args.lr_interval=step",
    "--model.init_args.lr_scheduler=cnnstrategies.schedules.WarmupCosine",
    "--model.init_args.lr_scheduler.init_args.total=20",
]


ONE = ["--trainer.strategy=auto", "--trainer.devices=1"]


def fit(run_cli, quick, name, *args):
    code, output = run_cli("fit", *quick, *NETWORK, f"--trainer.logger.init_args.name={name}", *args)
    assert code == 0, output
    return torch.load(Path("runs") / name / "version_0/checkpoints/last.ckpt", weights_only=True), output


def assert_equal(actual, expected, rtol):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name] - value).norm() / value.norm()
        assert error <= rtol, f"{name}: relative error {error:.1e}"


def test_one_line_changes_neither_the_weights_nor_the_steps(run_cli, quick):
    """The quickstart's YAML, with another strategy and nothing else, and what each says at its start.

    Each layer has a learning rate of its own, biases are not decayed, and the rate warms up.
    """
    lines = {
        "one device": ONE,
        **{name: [f"--trainer.strategy={name}_fork"] for name in ("ddp", "hybrid_pipeline", "parameter_server")},
    }
    runs = {name: fit(run_cli, quick, name, *line, *RECIPE) for name, line in lines.items()}
    single, _ = runs["one device"]
    groups = single["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.0005, 0.0] * 3
    assert groups[0]["initial_lr"] == pytest.approx(0.1 * 0.5**2)
    said = {name: panels.rows(output) for name, (_, output) in runs.items()}
    for name, (checkpoint, _) in runs.items():
        assert_equal(checkpoint["state_dict"], single["state_dict"], rtol=1e-9)
        assert checkpoint["global_step"] == 12, name
        assert said[name]["global batch"].startswith("64 images"), name
        assert said[name]["global batch"].endswith("6 steps an epoch"), name
        assert said[name]["precision"] == "64-true, contiguous", name
        assert said[name]["results"] == f"runs/{name}/version_0", name

    whole = f"{sum(p.numel() for p in PlainCNN().parameters()):,}"
    assert said["one device"]["parameters"] == whole
    assert said["one device"]["devices"] == "1 CPU process on 1 node"
    assert said["one device"]["unlike one device"] == "nothing"
    for name in ("ddp", "parameter_server"):
        assert said[name]["strategy"] == name
        assert said[name]["devices"] == "2 CPU processes on 1 node"
        assert said[name]["global batch"] == "64 images = 2 processes x 32; 6 steps an epoch"
        assert said[name]["parameters"] == f"{whole}; all of them on each device"
        assert said[name]["unlike one device"] == "random draws (as in dropout) are each process's own"
    assert said["parameter_server"]["mode"] == "sync"
    assert said["parameter_server"]["servers"] == "1 (on this node), 0.0305 MB of parameters each"
    hybrid = said["hybrid_pipeline"]
    assert hybrid["strategy"] == "hybrid_pipeline"
    assert hybrid["global batch"] == "64 images, loaded by one process; 6 steps an epoch"
    assert hybrid["microbatches"] == "8 of 8 images, schedule 1f1b"
    stages = [re.search(r" on rank \d: ([\d,]+) parameters", hybrid[f"stage {stage}"])[1] for stage in range(2)]
    assert sum(int(stage.replace(",", "")) for stage in stages) == int(whole.replace(",", ""))
    least, most = sorted(stages, key=lambda text: int(text.replace(",", "")))
    assert hybrid["parameters"] == f"{whole}; {least} to {most} on a device"
