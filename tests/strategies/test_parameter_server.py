"""The parameter server trains the same model as one process, with what users switch on, and goes on from others."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_runs import ADAMW, assert_same_run, load, logged, train
from lightning.pytorch import Callback, LightningModule, Trainer
from test_hybrid_pipeline import hybrid

from cnnstrategies.callbacks.traffic import ServerTraffic
from cnnstrategies.strategies import ParameterServerStrategy

served = partial(ParameterServerStrategy, start_method="fork")
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw, clipping by value": {
        "model": {
            "optimizer": ADAMW,
            "lr_scheduler": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.004, total_steps=100),
            "lr_interval": "step",
        },
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    # Without the last 31 samples: 16 and 15 beside two batches of 32 cannot be weighted exactly, under DDP neither.
    "clipping and accumulation": {
        "gradient_clip_val": 0.5,
        "accumulate_grad_batches": 2,
        "data": {"drop_last": True},
    },
}


class Traffic(Callback):
    """Writes down what a worker has sent and received over the network."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counters = trainer.strategy.counters  # type: ignore[attr-defined]
        assert trainer.log_dir is not None
        path = Path(trainer.log_dir, f"traffic-{trainer.global_rank}")
        path.write_text(json.dumps([counters.bytes_sent, counters.bytes_received]))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sync_equals_one_process(options: dict[str, Any]) -> None:
    """Weights, optimizer state, schedulers and everything logged; 5 batches of 64 and one of 30 samples.

    Also where one of a node's workers pushes for all: the last batch has uneven parts there.
    """
    single = train("single", **options)
    accumulates = "accumulate_grad_batches" in options
    workers = 2 if accumulates else 4
    apart = (served(), 2) if accumulates else (served(servers=2), 1)
    together = served(servers=2, combine=True), workers
    for name, (strategy, devices) in {"apart": apart, "combined": together}.items():
        assert_same_run(train(name, strategy, devices, **options, callbacks=[ServerTraffic(), Traffic()]), single)
        for got, expected in zip(logged(name), logged("single"), strict=True):
            # `train_loss_step` is that of rank 0's part of the batch.
            both = [
                {key: value for key, value in row.items() if key != "train_loss_step" and "servers/" not in key}
                for row in (got, expected)
            ]
            assert both[0] == pytest.approx(both[1], rel=1e-6), name
    assert {row["servers/dropped"] for row in logged("combined") if "servers/dropped" in row} == {0.0}
    traffic = [json.loads(Path(f"combined/traffic-{rank}").read_text()) for rank in range(workers)]
    assert [[sent > 0, received > 0] for sent, received in traffic] == [[True] * 2, *[[False] * 2] * (workers - 1)]


class SaveWithinARound(Callback):
    """Saves a checkpoint when own steps have been made since the last outer one."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 9:
            assert trainer.log_dir is not None
            trainer.save_checkpoint(Path(trainer.log_dir, "middle.ckpt"))


def outer_momenta(saved: dict[str, Any]) -> list[torch.Tensor]:
    return [part["momentum_buffer"] for part in saved["outer_optimizer_state"]["state"].values()]


def test_a_resumed_local_run_equals_an_uninterrupted_one() -> None:
    """The outer optimizer's momentum is in the checkpoint; the workers' own optimizers have no state here."""
    outer: dict[str, Any] = {"mode": "local", "sync_every": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "servers": 2}
    options: dict[str, Any] = {"model": {"optimizer": partial(torch.optim.SGD, lr=0.1, weight_decay=5e-4)}}
    whole = train("whole", served(**outer), 2, callbacks=[SaveWithinARound()], **options)
    path = Path("whole/middle.ckpt").resolve()
    resumed = train("resumed", served(**outer), 2, ckpt_path=path, **options)
    # Lightning loads the weights before it converts the module to float64.
    assert_same_run(resumed, whole, rtol=1e-6)
    momenta = map(outer_momenta, (load("whole", "middle.ckpt"), whole, resumed))
    for before, expected, got in zip(*momenta, strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()
        assert (before - expected).norm() > 1e-2 * expected.norm()


def test_resumes_under_any_other_strategy() -> None:
    """An epoch each under servers, pipelines, DDP and one process, as if one process had not stopped.

    Lightning loads a checkpoint before it converts the module to float64, so each resumption rounds to float32.
    """
    options: dict[str, Any] = {
        "model": {"optimizer": ADAMW, "lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)},
        "data": {"drop_last": True},
    }
    chain: dict[str, tuple[Any, int]] = {
        "2-1": (hybrid(replicas=[2, 1], cuts=["2"], microbatches=4, schedule="gpipe", placement="replicas"), 3),
        "two servers": (served(servers=2), 2),
        "ddp": ("ddp_fork", 2),
        "one": ("auto", 1),
    }
    whole = train("whole", **options, max_epochs=len(chain))
    previous = None
    for epochs, (name, (strategy, devices)) in enumerate(chain.items(), start=1):
        last = train(name, strategy, devices, **options, ckpt_path=previous, max_epochs=epochs)
        previous = Path(name, "last.ckpt").resolve()
    assert_same_run(last, whole, rtol=1e-4)
