"""Each private Lightning name that the package uses still works as expected; see `_lightning_private.py`."""

import os
import signal
import subprocess
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters_context
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, SubsetRandomSampler

from cnnstrategies._lightning_private import (
    ask_of_sigterm,
    asks_of_sigterm,
    averages_models,
    built_by_cli,
    end_observation,
    keep_batches,
    leave_samplers,
    note_sigterm_alone,
    saves_in_epoch,
    set_batches_that_stepped,
    train_loader,
)
from cnnstrategies.strategies.streams import divide_stream


def test_built_by_cli_is_true_only_in_lightnings_context():
    assert not built_by_cli()
    with _given_hyperparameters_context(hparams={}, instantiator="x"):
        assert built_by_cli()
    assert not built_by_cli()


def test_the_number_of_steps_that_loggers_see_can_be_set():
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    set_batches_that_stepped(trainer, 7)
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 7


@pytest.mark.parametrize("ask", [True, False])
def test_lightnings_broadcast_of_a_sigterm_can_be_switched_off(ask, monkeypatch):
    monkeypatch.setattr(torch.distributed, "broadcast", lambda flag, src: None)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    ask_of_sigterm(trainer, ask)
    assert asks_of_sigterm(trainer) is ask
    trainer._signal_connector.received_sigterm = True
    with pytest.raises(SIGTERMException) if ask else nullcontext():
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    ask_of_sigterm(trainer, True)
    assert asks_of_sigterm(trainer)


def test_lightnings_handler_of_sigterm_can_note_the_signal_without_a_broadcast(monkeypatch):
    begun = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda flag, src: begun.append(flag))
    for alone in (False, True):
        trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
        if alone:
            note_sigterm_alone(trainer)
        previous = signal.getsignal(signal.SIGTERM)
        trainer._signal_connector.register_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
        trainer._signal_connector.teardown()
        signal.signal(signal.SIGTERM, previous)
        assert trainer.received_sigterm
        assert len(begun) == 1, "Lightning's own handler begins a broadcast, and the other handler does not"


def test_a_resumed_run_keeps_the_configuration_it_was_given(run_cli, quick):
    one_process = [*quick, "--trainer.strategy=auto", "--trainer.devices=1", "--trainer.limit_train_batches=1"]
    assert run_cli("fit", *one_process, "--trainer.max_epochs=1")[0] == 0
    resume = ["--trainer.max_epochs=2", "--ckpt_path=runs/quickstart/version_0/checkpoints/last.ckpt"]
    code, output = run_cli("fit", *one_process, *resume, "--model.init_args.label_smoothing=0.25")
    assert code == 0, output
    with open("runs/quickstart/version_1/config.yaml") as file:
        assert "label_smoothing: 0.25" in file.read()


def test_the_training_loader_is_known_before_the_trainer_sets_it_up():
    class Given(LightningModule):
        def train_dataloader(self):
            return "by a hook"

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert train_loader(trainer) is None
    module = Given()
    module.trainer = trainer
    trainer._data_connector.attach_data(module, train_dataloaders=(loader := [1, 2]))
    assert train_loader(trainer) is loader
    trainer._data_connector.attach_data(module)
    assert train_loader(trainer) == "by a hook"


def test_the_observer_of_started_ranks_can_be_ended_without_kills():
    """Otherwise the observer may kill the rank that is about to report why the run cannot go on."""
    launcher = SimpleNamespace(procs=[subprocess.Popen(["false"])])
    observer = _ChildProcessObserver(os.getpid(), launcher.procs)
    launcher.procs[0].wait()
    observer.start()
    assert len(end_observation(launcher)) == 1
    assert observer._run()
    assert len(launcher.procs) == 1, "the launcher can still kill its processes"


def test_lightning_can_be_told_to_leave_samplers_alone():
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False, enable_checkpointing=False)
    assert trainer._data_connector._requires_distributed_sampler(loader := DataLoader(range(4)))
    leave_samplers(trainer)
    assert not trainer._data_connector._requires_distributed_sampler(loader)


class OwnBatches(BatchSampler):
    """A batch sampler with the usual arguments, so that Lightning can create it again."""


@pytest.mark.parametrize("by_hook", [False, True])
@pytest.mark.parametrize("kind", [BatchSampler, OwnBatches])
def test_a_batch_sampler_keeps_its_size_and_its_sampler_where_this_is_distributed(kind, by_hook):
    data = range(12)
    chosen = SubsetRandomSampler(data[4:])
    of_user = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)

    class Module(LightningModule):
        def train_dataloader(self):
            return [
                DataLoader(data, batch_sampler=kind(loader, 4, True))
                for loader in (SequentialSampler(data), chosen, of_user)
            ]

    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False, enable_checkpointing=False)
    keep_batches(trainer, divide_stream)
    module = Module()
    module.trainer = trainer
    trainer._data_connector.attach_data(module, train_dataloaders=None if by_hook else module.train_dataloader())
    made = [
        list(trainer._data_connector._prepare_dataloader(loader, False, RunningStage.TRAINING).batch_sampler)
        for loader in _request_dataloader(trainer.fit_loop._data_source)
    ]
    assert made[::2] == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]
    assert len(made[1]) == 1
    assert {*made[1][0]} < {*data[4:]}


@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ({}, 1),
        ({"every_n_epochs": 5}, 0.2),
        ({"every_n_train_steps": 2}, 25),
        ({"train_time_interval": timedelta(1)}, 0),
    ],
)
def test_how_often_an_epoch_is_saved(options, saves):
    trainer = SimpleNamespace(num_training_batches=100, accumulate_grad_batches=2)
    assert saves_in_epoch(ModelCheckpoint(**options), trainer) == saves
    trainer.num_training_batches = float("inf")
    assert saves_in_epoch(ModelCheckpoint(every_n_train_steps=2), trainer) == 0


def test_a_strategy_that_averages_models_now_and_then_is_recognised():
    assert [averages_models(DDPStrategy(model_averaging_period=period)) for period in (None, 2)] == [False, True]
