"""The parameter server trains the same model as one process, through the command line and with what users switch on."""

import csv
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from test_hybrid_pipeline import ALL_VALIDATION_DATA, ONE, assert_same_run, fit, logged

OPTIMIZERS = {
    "adamw, clipping by value": [
        "--model.init_args.optimizer=torch.optim.AdamW",
        "--model.init_args.optimizer.init_args.lr=0.002",
        "--model.init_args.lr_scheduler=torch.optim.lr_scheduler.OneCycleLR",
        "--model.init_args.lr_scheduler.init_args.max_lr=0.004",
        "--model.init_args.lr_scheduler.init_args.total_steps=100",
        "--model.init_args.lr_interval=step",
        "--trainer.gradient_clip_val=0.01",
        "--trainer.gradient_clip_algorithm=value",
    ],
    # Without the last 31 samples: 16 and 15 beside two batches of 32 cannot be weighted exactly, under DDP neither.
    "clipping and accumulation": [
        "--trainer.gradient_clip_val=0.5",
        "--trainer.accumulate_grad_batches=2",
        "--data.init_args.drop_last=true",
    ],
}


def served(workers=2, **options):
    options = {"start_method": "fork", **options}
    return [
        "--trainer.strategy.class_path=ParameterServerStrategy",
        f"--trainer.devices={workers}",
        *(f"--trainer.strategy.init_args.{name}={value}" for name, value in options.items()),
    ]


class Traffic(Callback):
    """Writes down what a worker has sent and received over the network."""

    def on_train_end(self, trainer, pl_module):
        counters = trainer.strategy.counters
        Path(f"traffic-{trainer.global_rank}").write_text(json.dumps([counters.bytes_sent, counters.bytes_received]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sync_equals_one_process(run_cli, quick, optimizer):
    """Weights, optimizer state, schedulers and everything logged; 5 batches of 64 and one of 30 samples.

    Also where one of a node's workers pushes for all: the last batch has uneven parts there.
    """
    options = [*OPTIMIZERS[optimizer], ALL_VALIDATION_DATA]
    single = fit(run_cli, quick, "single", *options, *ONE)
    accumulates = optimizer == "clipping and accumulation"
    workers = 2 if accumulates else 4
    combined = [*served(workers, servers=2, combine="true"), "--trainer.callbacks+=test_parameter_server.Traffic"]
    for name, layout in {"apart": served() if accumulates else served(1, servers=2), "combined": combined}.items():
        assert_same_run(fit(run_cli, quick, name, *options, *layout), single)
        for got, expected in zip(logged(name), logged("single"), strict=True):
            # `train_loss_step` is that of rank 0's part of the batch.
            both = [{k: v for k, v in row.items() if k != "train_loss_step"} for row in (got, expected)]
            assert both[0] == pytest.approx(both[1], rel=1e-6), name
    with Path("runs/combined/version_0/metrics.csv").open() as file:
        assert {row["servers/dropped"] for row in csv.DictReader(file)} == {"", "0.0"}
    traffic = [json.loads(Path(f"traffic-{rank}").read_text()) for rank in range(workers)]
    assert [[sent > 0, received > 0] for sent, received in traffic] == [[True] * 2, *[[False] * 2] * (workers - 1)]


class SaveWithinARound(Callback):
    """Saves a checkpoint when own steps have been made since the last outer one."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 9:
            trainer.save_checkpoint("middle.ckpt")


def test_a_resumed_local_run_equals_an_uninterrupted_one(run_cli, quick):
    """The outer optimizer's momentum is in the checkpoint; the workers' own optimizers have no state here."""
    options = served(mode="local", sync_every=4, outer_lr=0.7, outer_momentum=0.9, servers=2)
    options += [f"--model.init_args.optimizer.init_args.{option}" for option in ("momentum=0", "nesterov=false")]
    save = "--trainer.callbacks+=test_parameter_server.SaveWithinARound"
    whole = fit(run_cli, quick, "whole", *options, save)
    resumed = fit(run_cli, quick, "resumed", *options, "--ckpt_path=middle.ckpt")
    # Lightning loads the weights before it converts the module to float64.
    assert_same_run(resumed, whole, rtol=1e-6)
    middle = torch.load("middle.ckpt", weights_only=True)
    states = [saved["outer_optimizer_state"]["state"] for saved in (middle, whole, resumed)]
    for parts in zip(*(state.values() for state in states), strict=True):
        before, expected, got = (part["momentum_buffer"] for part in parts)
        assert (got - expected).norm() <= 1e-5 * expected.norm()
        assert (before - expected).norm() > 1e-2 * expected.norm()
