"""Test of all strategies: with the same seed and the same global batch, weights equal one process's weights."""

import re

import torch

from tests.conftest import PlainCNN
from tests.runner import panels
from tests.strategies.digit_commands import COMMON, checkpoint
from tests.strategies.digit_runs import assert_same_run, logged

# Each layer has its own learning rate and each class its own weight. Biases have no weight decay, the learning rate
# warms up, and predictions are means over mirror images.
RECIPE = [
    "--model.init_args.network=tests.strategies.digit_commands.GroupedCNN",
    "--model.init_args.optimizer=tests.strategies.digit_commands.OwnSGD",
    "--model.init_args.layer_lr_decay=0.5",
    "--model.init_args.class_weights=balanced",
    "--model.init_args.test_flips=true",
    "--data=tests.strategies.digit_commands.FewForValidation",
    "--trainer.limit_val_batches=1.0",
    "--model.init_args.decay_norms_and_biases=false",
    "--model.init_args.lr_interval=step",
    "--model.init_args.lr_scheduler=cnnstrategies.schedules.WarmupCosine",
    "--model.init_args.lr_scheduler.init_args.total=20",
]
LINES = {
    "one device": ["--trainer.strategy=auto", "--trainer.devices=1"],
    **{name: [f"--trainer.strategy={name}_fork"] for name in ("ddp", "hybrid_pipeline", "parameter_server")},
}


def test_another_strategy_changes_neither_weights_nor_steps(run_cli, quick):
    """The quickstart's configuration is run with different strategies. The panels at the start are checked as well."""
    runs, reported, metrics = {}, {}, {}
    for name, line in LINES.items():
        code, output = run_cli("fit", *quick, *COMMON, *RECIPE, *line, f"--trainer.logger.init_args.name={name}")
        assert code == 0, output
        runs[name], reported[name] = torch.load(checkpoint(name), weights_only=True), panels.rows(output)
        metrics[name] = [
            (row["val_loss"], row["val_acc"]) for row in logged(f"runs/{name}/version_0") if "val_loss" in row
        ]
    single = runs["one device"]
    groups = single["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.0005, 0.0] * 3
    assert [group["initial_lr"] for group in groups] == [0.025, 0.025, 0.05, 0.05, 0.1, 0.1]
    assert single["global_step"] == 12
    for name, saved in runs.items():
        assert_same_run(saved, single)
        torch.testing.assert_close(metrics[name], metrics["one device"], rtol=1e-5, atol=0)
        assert reported[name]["global batch"].startswith("64 images"), name
        assert reported[name]["global batch"].endswith("6 steps an epoch"), name
        assert reported[name]["precision"] == "64-true, contiguous", name
        assert reported[name]["results"] == f"runs/{name}/version_0", name

    whole = f"{sum(p.numel() for p in PlainCNN().parameters()):,}"
    assert reported["one device"]["parameters"] == whole
    assert reported["one device"]["devices"] == "1 CPU process on 1 node"
    assert reported["one device"]["unlike one device"] == "nothing"
    for name in ("ddp", "parameter_server"):
        assert reported[name]["strategy"] == name
        assert reported[name]["devices"] == "2 CPU processes on 1 node"
        assert reported[name]["global batch"] == "64 images = 2 processes x 32; 6 steps an epoch"
        assert reported[name]["parameters"] == f"{whole}; all of them on each device"
        assert reported[name]["unlike one device"] == "random draws (as in dropout) are each process's own"
    assert reported["parameter_server"]["mode"] == "sync"
    assert reported["parameter_server"]["servers"] == "1 (on this node)"
    hybrid = reported["hybrid_pipeline"]
    assert hybrid["strategy"] == "hybrid_pipeline"
    assert hybrid["global batch"] == "64 images, loaded by one process; 6 steps an epoch"
    assert hybrid["microbatches"] == "8 of 8 images"
    stages = [re.search(r" on rank \d: ([\d,]+) parameters", hybrid[f"stage {stage}"])[1] for stage in range(2)]
    assert sum(int(stage.replace(",", "")) for stage in stages) == int(whole.replace(",", ""))
    least, most = sorted(stages, key=lambda text: int(text.replace(",", "")))
    assert hybrid["parameters"] == f"{whole}; {least} to {most} on a device"
