"""Tests of the parameter server against one process, with the options that users combine with it."""

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import nn

from cnnstrategies.callbacks import Pictures, SampleWeights
from cnnstrategies.callbacks.traffic import ServerTraffic
from cnnstrategies.paramserver.worker.codecs import CodecChooser
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.protocol import facts_of
from tests.conftest import PlainCNN, leave_undrawn
from tests.strategies import digit_commands
from tests.strategies.digit_commands import COMMON, checkpoint
from tests.strategies.digit_runs import ADAMW, assert_same_run, load, logged, train
from tests.strategies.fault_injection import fault_arguments

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
    "clipping and accumulation": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
}


class Traffic(Callback):
    """A callback that saves the numbers of bytes that a worker has sent and received over the network."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counters = facts_of(trainer.strategy).traffic
        assert trainer.log_dir is not None
        path = Path(trainer.log_dir, f"traffic-{trainer.global_rank}")
        path.write_text(json.dumps([counters.bytes_sent, counters.bytes_received]))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sync_equals_one_process(options: dict[str, Any]) -> None:
    """Weights, optimizer state, schedulers and all logged values are equal for 5 batches of 64 samples and one of 30.

    They are also equal if one of a node's workers pushes for all, and the workers have unequal parts of the last batch.
    """
    single = train("single", callbacks=[SampleWeights()], **options)
    accumulates = "accumulate_grad_batches" in options
    workers = 2 if accumulates else 4
    apart = (served(), 2) if accumulates else (served(servers_per_node=2), 1)
    together = served(servers_per_node=2, combine_per_node=True), workers
    for name, (strategy, devices) in {"apart": apart, "combined": together}.items():
        watched = [ServerTraffic(), Traffic()]
        assert_same_run(train(name, strategy, devices, **options, callbacks=watched), single)
        assert not Path(name, "watch.json").exists(), "a finished run cannot be watched"
        for got, expected in zip(logged(name), logged("single"), strict=True):
            # `train_loss_step` is the loss of rank 0's part of the batch.
            both = [
                {key: value for key, value in row.items() if key != "train_loss_step" and "servers/" not in key}
                for row in (got, expected)
            ]
            assert both[0] == pytest.approx(both[1], rel=1e-6), name
    assert {row["servers/dropped"] for row in logged("combined") if "servers/dropped" in row} == {0.0}
    members = [apart[1], 1 if accumulates else 2]
    last = {name: value for row in logged("apart") for name, value in row.items()}  # Values of the last epoch.
    assert [last[f"servers/{figure}"] for figure in ("workers", "alive", "losses", "staleness")] == [*members, 0, 0]
    megabytes = sum(8e-6 * parameter.numel() for parameter in PlainCNN().parameters())
    for figure in ("sent_mb", "received_mb"):
        assert last[f"servers/{figure}"] == pytest.approx(megabytes, rel=0.1), (
            "a step sends and receives each parameter once"
        )
    traffic = [json.loads(Path(f"combined/traffic-{rank}").read_text()) for rank in range(workers)]
    assert [[sent > 0, received > 0] for sent, received in traffic] == [[True] * 2, *[[False] * 2] * (workers - 1)]


class SaveWithinARound(Callback):
    """A callback that saves a checkpoint when the workers have made local steps since the last outer step."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 9:
            assert trainer.log_dir is not None
            trainer.save_checkpoint(Path(trainer.log_dir, "middle.ckpt"))


def outer_momenta(saved: dict[str, Any]) -> list[torch.Tensor]:
    return [part["momentum_buffer"] for part in saved["outer_optimizer_state"]["state"].values()]


def test_a_resumed_local_run_equals_an_uninterrupted_one() -> None:
    """The checkpoint has the outer optimizer's momentum; the workers' optimizers have no state in this test."""
    outer: dict[str, Any] = {
        "mode": "local",
        "sync_every": 4,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "servers_per_node": 2,
    }
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


class NormalisedCNN(nn.Sequential):
    """A CNN for the digits with batch normalisation."""

    def __init__(self, num_classes: int = 10) -> None:
        layers = nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes)
        super().__init__(*layers)
        self(torch.zeros(2, 1, 8, 8))


class SameEverywhere(Callback):
    """A callback that checks that all ranks validate with the same values, and saves each rank's values at the end."""

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0 and not trainer.sanity_checking:
            values = self.state(pl_module)
            everyone = trainer.strategy.all_gather(values)
            assert len(everyone) == trainer.world_size
            assert all(torch.equal(rank_values, values) for rank_values in everyone)

    def on_fit_end(self, trainer, pl_module):
        torch.save(self.state(pl_module), Path(trainer.log_dir, f"end-of-{trainer.global_rank}"))

    def state(self, module):
        return torch.cat([t.detach().double().flatten() for t in module.network.state_dict().values()])


class Collectives(Callback):
    """A callback that checks the strategy's collectives with the arguments that Lightning and users pass."""

    def on_train_start(self, trainer, pl_module):
        strategy, rank, world = trainer.strategy, trainer.global_rank, trainer.world_size
        assert strategy.broadcast({"path": rank, "none": None}, src=1) == {"path": 1, "none": None}
        value = torch.tensor([float(rank), 1.0])
        assert strategy.reduce(value, reduce_op="sum").tolist() == [sum(range(world)), world]
        assert strategy.reduce(value).tolist() == [sum(range(world)) / world, 1]
        assert strategy.reduce(value, reduce_op="max").tolist() == [world - 1, 1]
        assert strategy.reduce("text") == "text"
        assert strategy.reduce_boolean_decision(rank == 0, all=False)
        assert not strategy.reduce_boolean_decision(rank == 0)
        assert pl_module.all_gather(value).shape == (world, 2)
        torch.distributed.all_reduce(value)
        assert value.tolist() == [sum(range(world)), world]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"combine_per_node": True, "pull_compression": "fp16"}, marks=pytest.mark.cluster),
        {"mode": "async"},
        pytest.param({"mode": "local", "sync_every": 6, "outer_momentum": 0.9}, marks=pytest.mark.cluster),
    ],
    ids=["sync", "combined, rounded", "async", "local"],
)
def test_every_rank_validates_with_the_same_values(options):
    strategy, callbacks = served(**options), [SameEverywhere(), Collectives()]
    more = {"precision": "bf16-mixed"} if options.get("mode") == "async" else {}
    data = {"global_batch_size": 60}
    saved = train("run", strategy, 3, NormalisedCNN, data=data, callbacks=callbacks, **more)["state_dict"]
    assert any("running_mean" in name for name in saved)
    assert not any(name.endswith("grad") for name in saved)
    losses = [row["train_loss"] for row in logged("run") if "train_loss" in row]
    assert losses[-1] < losses[0]
    ends = [torch.load(f"run/end-of-{rank}") for rank in range(3)]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_validation_is_left_out_of_measured_steps(monkeypatch, tmp_path):
    def note(chooser, step, seconds):
        with (tmp_path / "notes").open("a") as notes:
            print(step, seconds is None, file=notes)
        return 0

    monkeypatch.setattr(CodecChooser, "next", note)
    train("run", served(compression="auto"), 2, val_check_interval=3)
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes == [f"{step} {step % 3 == 0}" for step in range(12)], "only the first worker chooses"


def test_weight_averages_early_stopping_the_best_checkpoint_and_pictures_equal_one_process(monkeypatch):
    leave_undrawn(monkeypatch)
    runs = []
    for name, *where in (("single", "auto", 1), ("served", served(), 2)):
        best = ModelCheckpoint(Path(name).resolve(), "best", monitor="val_loss", mode="min")
        stops = EarlyStopping("val_loss", patience=1, min_delta=0.2)
        watching = [EMAWeightAveraging(decay=0.8), best, stops, Pictures()]
        last = train(name, *where, callbacks=watching, max_epochs=12)
        runs.append((last, load(name, "best.ckpt")["epoch"]))
    (single, best_of_one), (several, best_of_several) = runs
    assert single["epoch"] == several["epoch"] < 11
    assert best_of_one == best_of_several
    tables = [Path(name, "pictures/val_classes.csv").read_text().splitlines() for name in ("single", "served")]
    assert tables[0] == tables[1]
    assert sum(int(line.split(",")[1]) for line in tables[0][1:]) == 70
    # The average starts from weights before Lightning converts the module to float64.
    assert_same_run(several, single, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "restarts"),
    [
        pytest.param({}, 1, id="sync"),
        pytest.param(
            {"combine_per_node": True, "pull_compression": "fp16"}, 0, marks=pytest.mark.cluster, id="combined"
        ),
    ],  # `test_midway.py` tests mode async.
)
def test_a_signal_stops_the_run_at_a_step_and_it_resumes(run_cli, quick, options, restarts):
    terminate = fault_arguments(how="SIGTERM", victim="parent", step=8)
    layout = [*digit_commands.served(**options, max_restarts=restarts), "--trainer.max_epochs=2000", "--stop.grace=60"]
    code, output = run_cli("fit", *quick, *COMMON, *layout, *terminate, "--trainer.logger.init_args.name=stopped")
    assert code == 128 + signal.SIGTERM, output
    path = checkpoint("stopped")
    stopped = torch.load(path, weights_only=True)
    assert stopped["global_step"] > 0
    assert stopped["epoch"] < 1999, "the run was over before the signal"
    epochs = stopped["epoch"] + 2
    resumed = train("resumed", served(**options), 2, ckpt_path=path.resolve(), max_epochs=epochs)
    assert resumed["global_step"] == 6 * epochs


PIPELINED = [
    ({}, {}, True),
    ({"pull_compression": "fp16"}, {"clip_value": 1.0}, True),
    ({}, {"clip_norm": 1.0}, False),
    ({"mode": "async"}, {}, False),
    ({"pull_compression": "topk"}, {}, False),
    ({"endpoints": []}, {}, False),
]


def test_steps_are_pipelined_if_slices_are_independent():
    dedicated = {"endpoints": ["tcp://127.0.0.1:7000"], "coordinator": "tcp://127.0.0.1:7001", "security": "none"}
    module = NormalisedCNN()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for options, changes, is_pipelined in PIPELINED:
        strategy = ParameterServerStrategy(**{**dedicated, **options})
        specification = strategy.options.specification(module, optimizer, 1, 2, **changes)
        assert specification.pipelined is is_pipelined, (options, changes)
        assert (specification.slice_bytes < 1 << 21) is is_pipelined, "smaller slices come back sooner"
