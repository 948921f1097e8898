"""Tests of unequal and changing shares of the ranks: weights equal one process's weights."""

import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.runtime import stopwatch
from cnnstrategies.shares import rebalancing
from cnnstrategies.strategies import BalancedDDPStrategy, ParameterServerStrategy
from tests.conftest import PlainCNN, quiet_trainer
from tests.strategies import digit_runs
from tests.strategies.digit_runs import Digits, assert_same_run, logged, train


class DealAtRandom(Callback):
    """A callback that changes the shares every few batches, from a batch on that no rank has drawn yet."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.random.random() < 0.5:
            shares = [self.random.uniform(0.1, 4) for _ in range(trainer.world_size)]
            trainer.strategy.batch_shares.change(trainer.current_epoch, batch_idx + 3, shares)


class SlowRank(Callback):
    """A callback that makes rank 1 take four times as long for each sample, on a simulated clock.

    Args:
        folder: Folder for the files ``dealt-RANK.json`` with the rank's number of samples in each step, and
            ``waits-RANK.json`` with the kinds of waits that its stopwatch has measured.
        slow: Function of the step that says whether rank 1 is slow.
    """

    def __init__(self, folder, slow):
        self.folder, self.slow = folder, slow

    def on_train_start(self, trainer, pl_module):
        self.now, self.dealt = 0.0, []
        stopwatch.time = SimpleNamespace(perf_counter=lambda: self.now)
        pl_module.network.register_forward_pre_hook(lambda network, inputs: self.compute(trainer, len(inputs[0])))
        clock = next(callback.clock for callback in trainer.callbacks if isinstance(callback, rebalancing.Balance))
        self.begun, self.waits = [], set()
        clock.begin_waiting = partial(self.wait, clock.begin_waiting, self.begun.append)
        clock.end_waiting = partial(self.wait, clock.end_waiting, lambda kind: self.waits.update(self.begun[-1:]))

    @staticmethod
    def wait(original, note, kind="gradients"):
        note(kind)
        original()

    def compute(self, trainer, samples):
        if trainer.training:
            self.dealt.append(samples)
            slow = trainer.global_rank == 1 and self.slow(trainer.global_step)
            self.now += 1000 * (1 + samples * (4 if slow else 1))  # Real seconds are negligible.

    def on_train_end(self, trainer, pl_module):
        for name, notes in (("dealt", self.dealt), ("waits", sorted(self.waits))):
            Path(self.folder, f"{name}-{trainer.global_rank}.json").write_text(json.dumps(notes))


balanced = partial(BalancedDDPStrategy, start_method="fork")
served = partial(ParameterServerStrategy, start_method="fork")
DEALT = {"ddp": balanced, "servers": served, "a node's servers": partial(served, combine_per_node=True)}


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulated", "samples"),
    [
        # The last batch has two samples, which are accumulated one by one, so that two ranks have no sample.
        ("ddp", 3, 2, 58),
        ("servers", 3, 2, 58),
        ("a node's servers", 2, 1, None),
    ],
)
def test_batches_under_changing_shares_train_the_weights_of_one_process(strategy, ranks, accumulated, samples):
    seed = torch.initial_seed() % 1000
    samples = samples or random.Random(seed).randint(ranks * accumulated, 130)
    print(f"seed {seed}, global batches of {samples}")
    common = {"data": {"global_batch_size": samples}, "max_epochs": 1}
    single = train("one", **common)
    dealt = train(
        "dealt",
        DEALT[strategy](shares=[random.Random(seed).uniform(0.1, 4) for _ in range(ranks)]),
        ranks,
        callbacks=[DealAtRandom(seed)],
        accumulate_grad_batches=accumulated,
        **common,
    )
    assert_same_run(dealt, single, 1e-12)


class Weighted(ImageClassifier):
    """A classifier that gives classes different weights."""

    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs, targets, self.weights(targets))

    def loss_weight(self, targets):
        return self.weights(targets)[targets].sum()

    def weights(self, targets):
        return torch.arange(1.0, 11, dtype=torch.float64, device=targets.device)


class PlainDigits(Digits):
    """Digits with a plain training loader of torch."""

    def train_dataloader(self):
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        source = self.train_source
        images = torch.stack([self.train_transform(image[None])[0] for image in source.images])
        dataset = TensorDataset(images, source.targets)
        sampler = DistributedSampler(dataset, seed=5, **ranks)
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 60 // ranks["num_replicas"], drop_last=False))


def test_a_users_loader_is_also_divided_by_shares(monkeypatch):
    """Training keeps the sampler's order without repeated samples, uses class weights, and resumes within an epoch."""
    monkeypatch.setattr(digit_runs, "Digits", PlainDigits)
    monkeypatch.setattr(digit_runs, "ImageClassifier", Weighted)
    # Lightning loads a checkpoint before it converts the network to float64, so the network must be in float64 already.
    data = {"batch_size": 20, "global_batch_size": None}
    common = {"data": data, "max_epochs": 1, "limit_val_batches": 0, "network": lambda: PlainCNN().double()}
    single = train("one", **common)
    cut = [ModelCheckpoint("cut", "cut", every_n_train_steps=4), DealAtRandom(torch.initial_seed() % 1000)]
    assert_same_run(train("dealt", balanced(shares=[1, 2.5, 4]), 3, callbacks=cut, **common), single)
    rest = {"ckpt_path": Path("cut/cut.ckpt").resolve(), **common}
    assert_same_run(train("gone on", balanced(shares=[1, 2.5, 4]), 3, **rest), single)


@pytest.mark.parametrize("strategy", ["ddp", "servers"])
def test_accumulated_batches_of_a_users_loader_count_as_on_one_device(monkeypatch, strategy):
    """The last step of an epoch has fewer batches than the other steps, and the last batch has fewer samples.

    Each batch has its own divisor, the sum of its class weights.
    """
    monkeypatch.setattr(digit_runs, "Digits", PlainDigits)
    monkeypatch.setattr(digit_runs, "ImageClassifier", Weighted)
    data = {"batch_size": 20, "global_batch_size": None}
    common = {"data": data, "max_epochs": 1, "limit_val_batches": 0, "accumulate_grad_batches": 4}
    single = train("one", **common)
    assert_same_run(train("dealt", DEALT[strategy](shares=[1, 2.5]), 2, **common), single)


class Pairs(Digits):
    """Data of two loaders; the shorter loader starts again within an epoch."""

    def train_dataloader(self):
        rows = TensorDataset(torch.zeros(24, 1, 8, 8), torch.zeros(24, dtype=torch.int64))
        return [DataLoader(rows, 4), DataLoader(rows, 2)]


def test_several_loaders_are_refused(monkeypatch):
    monkeypatch.setattr(digit_runs, "Digits", Pairs)
    with pytest.raises(AssertionError, match="several loaders"):
        train("dealt", balanced(), 2, max_epochs=1)


class StepsItself(ImageClassifier):
    """A module with manual optimization, and with a loss whose backward needs the loss's value."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        images, targets = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.network(images), targets).log().exp())
        optimizer.step()


def test_samples_get_equal_weights_in_manual_optimization(monkeypatch):
    monkeypatch.setattr(digit_runs, "ImageClassifier", StepsItself)
    common = {"data": {"global_batch_size": 61}, "max_epochs": 1}
    assert_same_run(train("dealt", balanced(shares=[3, 1]), 2, **common), train("one", **common))


def with_buffer() -> PlainCNN:
    """Return a network in float64 with a buffer: DDP waits in a forward only to broadcast buffers."""
    network = PlainCNN().double()
    network.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    return network


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("servers", marks=pytest.mark.cluster)])
def test_a_slow_rank_gets_a_smaller_share_until_it_is_fast_again(tmp_path, strategy):
    """Shares follow within an epoch. A run that resumes in mid-epoch has the shares of an uninterrupted run."""
    # Lightning loads a checkpoint before it converts the network to float64, so the network must be in float64 already.
    data = {"global_batch_size": 20, "num_workers": 1}  # A loading worker loads ahead.
    common = {"data": data, "max_epochs": 3, "limit_train_batches": 17, "limit_val_batches": 0}
    common["network"] = with_buffer

    def run(name, *more, **options):
        slow = SlowRank(tmp_path, lambda step: step < 17)
        trained = train(name, DEALT[strategy](shares="auto"), 2, callbacks=[slow, *more], **{**common, **options})
        return trained, json.loads((tmp_path / "dealt-1.json").read_text())

    whole, dealt = run("whole", ModelCheckpoint("cut", "cut-{step}", every_n_train_steps=18, save_top_k=-1))
    assert dealt[0] == 10
    assert 2 <= dealt[16] <= 6, dealt
    waits = {"ddp": {"gradients", "buffers"}, "servers": {"servers"}}[strategy]
    assert waits <= set(json.loads((tmp_path / "waits-0.json").read_text()))
    share_rows = [row for row in logged("whole") if "shares/rank_1" in row]
    assert share_rows[0]["shares/rank_1"] < 10
    assert share_rows[0]["shares/predicted_gain"] > 0.03
    assert any(row["shares/gain"] > 0.03 for row in logged("whole") if "shares/gain" in row)
    assert dealt[-2] >= 8, dealt
    assert_same_run(whole, train("one", **common))
    gone_on, rest = run("gone on", ckpt_path=Path("cut/cut-step=18.ckpt").resolve())
    assert rest[0] == dealt[18] < 10
    assert_same_run(gone_on, whole)


def test_no_rank_gets_more_samples_than_fit_into_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rebalancing, "fitting", lambda held, device: 12.0)
    common = {"data": {"global_batch_size": 20}, "max_epochs": 1, "callbacks": [SlowRank(tmp_path, lambda step: True)]}
    train("dealt", balanced(shares="auto"), 2, **common)
    assert json.loads((tmp_path / "dealt-0.json").read_text())[:16:15] == [10, 12]


@pytest.mark.cluster  # This test takes long.
def test_a_slow_rank_gets_a_smaller_share_even_in_very_short_epochs(tmp_path):
    slow = SlowRank(tmp_path, lambda step: True)
    train("short", balanced(shares="auto"), 2, limit_train_batches=2, max_epochs=16, callbacks=[slow])
    assert json.loads((tmp_path / "dealt-1.json").read_text())[-1] < 16


def test_impossible_shares_are_refused_before_processes_start():
    for options, message in (
        ({"shares": [3, 0]}, r"shares=\[3, 0\]: set a share above 0 for each rank"),
        ({"shares": "best"}, "shares='best': use auto, equal or a list"),
        ({"max_samples": 0}, "max_samples=0: a rank needs at least 1 sample"),
        ({"max_samples": [8, 0]}, r"max_samples=\[8, 0\]: a rank needs at least 1 sample"),
        (
            {"shares": [3, 1], "initial_shares": [3, 1]},
            r"initial_shares=\[3, 1\] has no effect with shares=\[3, 1\]",
        ),
        ({"ddp_comm_hook": print}, "ddp_comm_hook: this strategy registers its own communication hook"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            BalancedDDPStrategy(**options)
    with pytest.raises(ConfigurationError, match=r"shares=\[3, 1\] has length 2, but there are 3 processes"):
        quiet_trainer(BalancedDDPStrategy([3, 1]), 3).strategy.launcher.launch(print)
    with pytest.raises(ConfigurationError, match=r"max_samples=\[8, 4\] has length 2, but there are 3 processes"):
        quiet_trainer(BalancedDDPStrategy(max_samples=[8, 4]), 3).strategy.launcher.launch(print)
    with pytest.raises(ConfigurationError, match=r"shares=\[3, 1\] are for `mode: sync`, not `mode: local`"):
        ParameterServerStrategy("local", shares=[3, 1])
    with pytest.raises(ConfigurationError, match=r"initial_shares=\[3, 1\] has no effect with shares=equal"):
        ParameterServerStrategy(initial_shares=[3, 1])
    with pytest.raises(ConfigurationError, match=r"shares=\[3, 1\] has length 2, but there are 3 processes"):
        quiet_trainer(ParameterServerStrategy(shares=[3, 1]), 3).fit(ImageClassifier(PlainCNN(), 10), Digits())
