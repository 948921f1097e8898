"""A resumed run takes learned values from the checkpoint, and rates, decay and schedules from the configuration."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
)
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ConfigurationError
from cnnstrategies.callbacks import FromConfiguration
from cnnstrategies.schedules import WarmupCosine
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy
from tests.conftest import quiet_trainer
from tests.runner.forked import in_fork

SAVED = 4  # Number of steps before the checkpoint: one epoch.


class Small(LightningModule):
    def __init__(self, schedule=None, interval="step", kind=torch.optim.SGD, **options):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        self.schedule, self.interval, self.kind = schedule, interval, kind
        self.options = {"lr": 0.1, "momentum": 0.9, **options}
        self.rates = []

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer):
        self.rates.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])

    def configure_optimizers(self):
        options = self.options if self.kind is torch.optim.SGD else {}
        optimizer = self.kind(self.parameters(), **options)
        if self.schedule is None:
            return optimizer
        made = self.schedule(optimizer)
        return [optimizer], [{"scheduler": made, "interval": self.interval, "monitor": "loss"}]


def loader():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 1, 4, 4, generator=generator)
    return DataLoader(TensorDataset(images, torch.randint(2, (32,), generator=generator)), 8)


def train(module, epochs=3, ckpt_path=None, callback=True, **options):
    callbacks = [FromConfiguration()] if callback else []
    options = {"max_epochs": epochs, "use_distributed_sampler": False, **options}
    trainer = quiet_trainer(callbacks=callbacks, **options)
    trainer.fit(module, loader(), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def saved(tmp_path: Path, make, callback=True) -> Path:
    """Write a checkpoint after the first epoch and return its path.

    Another process trains, because a process that has trained cannot fork ranks any more.
    """
    path = tmp_path / "saved.ckpt"
    in_fork(lambda: train(make(), 1, callback=callback).save_checkpoint(path))
    return path


SCHEDULES = {
    "warm-up": lambda total: partial(WarmupCosine, total=total, warmup=3),
    "one cycle, momentum too": lambda total: partial(OneCycleLR, max_lr=0.1, total_steps=total),
    "function": lambda total: partial(LambdaLR, lr_lambda=lambda step: 1 - step / (2 * total)),
}


def cosine(total):
    return partial(CosineAnnealingLR, T_max=total)


def same_rates(rates, expected):
    assert len(rates) == len(expected) > 0
    for of_step, expected_of_step in zip(rates, expected, strict=True):
        for group, wanted in zip(of_step, expected_of_step, strict=True):
            assert {key: group[key] for key in wanted} == {key: pytest.approx(value) for key, value in wanted.items()}


def test_an_unchanged_configuration_resumes_exactly(tmp_path, caplog):
    schedule = SCHEDULES["one cycle, momentum too"](16)
    path = saved(tmp_path, lambda: Small(schedule))
    resumed, whole = Small(schedule), Small(schedule)
    with caplog.at_level(logging.INFO):
        train(resumed, 1, ckpt_path=path)
    assert resumed.rates == []
    assert f"Nothing was trained: {path} is at epoch 1 and step 4" in caplog.text
    train(resumed, ckpt_path=path)
    train(whole)
    assert resumed.rates == whole.rates[SAVED:]
    assert all(
        torch.equal(value, expected) for value, expected in zip(resumed.parameters(), whole.parameters(), strict=True)
    )


OTHERWISE = {
    **{f"longer: {name}": ({"schedule": make(16)}, {"schedule": make(40)}) for name, make in SCHEDULES.items()},
    "another rate, decay and momentum": ({}, {"lr": 0.3, "weight_decay": 0.1, "momentum": 0.5}),
    "another schedule": ({"schedule": cosine(16)}, {"schedule": partial(MultiStepLR, milestones=[4])}),
    "a schedule where none was": ({}, {"schedule": cosine(16)}),
    "none where one was": ({"schedule": cosine(16)}, {"schedule": None}),
    "by epochs": (
        {"schedule": partial(ExponentialLR, gamma=0.5), "interval": "epoch"},
        {"schedule": partial(ExponentialLR, gamma=0.9), "interval": "epoch"},
    ),
}


@pytest.mark.parametrize(("before", "now"), OTHERWISE.values(), ids=OTHERWISE)
def test_changed_settings_apply_and_learned_values_stay(before, now, tmp_path, caplog):
    path = saved(tmp_path, lambda: Small(**before))
    fresh, resumed = Small(**{**before, **now}), Small(**{**before, **now})
    train(fresh)
    with caplog.at_level(logging.INFO):
        trainer = train(resumed, ckpt_path=path)
    same_rates(resumed.rates, fresh.rates[SAVED:])
    assert "Changed by the configuration since the checkpoint was saved: " in caplog.text
    assert trainer.optimizers[0].state[next(resumed.parameters())]["momentum_buffer"] is not None


def test_a_resumed_plateau_schedule_keeps_its_best_value(tmp_path):
    def reduces(patience):
        return partial(ReduceLROnPlateau, factor=0.5, patience=patience, threshold=1e9)

    def make(patience, rate):
        return Small(reduces(patience), interval="epoch", lr=rate)

    path = saved(tmp_path, lambda: make(0, 0.1))  # The rate may have been reduced at the end of the first epoch.
    with_it, other = make(0, 0.1), make(7, 0.4)
    train(with_it, ckpt_path=path)
    trainer = train(other, 2, ckpt_path=path)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.patience == 7
    assert other.rates[0][0]["lr"] == pytest.approx(4 * with_it.rates[0][0]["lr"])
    assert scheduler.best == torch.load(path, weights_only=True)["lr_schedulers"][0]["best"]


class Halves(Small):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


def test_a_rate_set_by_a_hook_stays_unless_configured(tmp_path, caplog):
    path, not_configured = saved(tmp_path, Halves), saved(tmp_path / "other", Small, callback=False)
    resumed = Halves()
    train(resumed, 2, ckpt_path=path)
    assert resumed.rates[0][0]["lr"] == pytest.approx(0.1 / 2**SAVED)
    resumed = Small(lr=0.3)
    with caplog.at_level(logging.INFO):
        train(resumed, 2, ckpt_path=not_configured)
    assert resumed.rates[0][0]["lr"] == 0.1
    assert "does not contain the configuration of its run" in caplog.text


def test_an_ended_schedule_and_another_optimizer_are_refused(tmp_path):
    path = saved(tmp_path, lambda: Small(SCHEDULES["one cycle, momentum too"](16)))
    with pytest.raises(
        ConfigurationError, match="has made 4 steps of its schedule, and the configured OneCycleLR is shorter"
    ):
        train(Small(SCHEDULES["one cycle, momentum too"](2)), ckpt_path=path)
    (tmp_path.parent / "config.yaml").touch()
    with pytest.raises(ConfigurationError, match=r"not saved with AdamW .* include .*dampening, .*config\.yaml"):
        train(Small(kind=torch.optim.AdamW), ckpt_path=path)


STRATEGIES = {
    "hybrid_pipeline": lambda: HybridPipelineStrategy(replicas=[1, 1], microbatches=2, start_method="fork"),
    "parameter_server": lambda: ParameterServerStrategy(start_method="fork"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_changed_settings_apply_under_every_strategy(name, tmp_path):
    """Rate, decay, momentum and schedule change in the resumed run, and the weights equal those of one process."""
    now = {"schedule": SCHEDULES["warm-up"](20), "lr": 0.05, "weight_decay": 0.1, "momentum": 0.5}
    path = saved(tmp_path, lambda: Small(cosine(16)))
    expected = tmp_path / "one.pt"
    in_fork(lambda: torch.save(_weights(Small(**now), path), expected))
    weights = _weights(Small(**now), path, strategy=STRATEGIES[name](), devices=2)
    for key, value in torch.load(expected).items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-7)


def _weights(module, path, **options):
    train(module, ckpt_path=path, **options)
    return module.state_dict()
