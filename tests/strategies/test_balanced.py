"""Whatever the ranks' shares, and whenever they change, the weights are those of one process."""

import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import digit_runs
import pytest
import torch
from conftest import PlainCNN, quiet_trainer
from digit_runs import Digits, assert_same_run, logged, train
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.strategies import BalancedDDPStrategy, ParameterServerStrategy, balancing


class DealAtRandom(Callback):
    """Other shares every few batches, from a batch that no rank has drawn yet."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.random.random() < 0.5:
            shares = [self.random.uniform(0.1, 4) for _ in range(trainer.world_size)]
            trainer.strategy.batch_shares.change(trainer.current_epoch, batch_idx + 3, shares)


class SlowRank(Callback):
    """One rank takes four times as long for each sample, as long as ``slow`` says; in a time of its own."""

    def __init__(self, folder, slow):
        self.folder, self.slow = folder, slow

    def on_train_start(self, trainer, pl_module):
        self.now, self.dealt = 0.0, []
        balancing.time = SimpleNamespace(perf_counter=lambda: self.now)
        pl_module.network.register_forward_pre_hook(lambda network, given: self.compute(trainer, len(given[0])))

    def compute(self, trainer, samples):
        if trainer.training:
            self.dealt.append(samples)
            slow = trainer.global_rank == 1 and self.slow(trainer.global_step)
            self.now += 1000 * (1 + samples * (4 if slow else 1))  # Against that no real second counts.

    def on_train_end(self, trainer, pl_module):
        Path(self.folder, f"dealt-{trainer.global_rank}.json").write_text(json.dumps(self.dealt))


balanced = partial(BalancedDDPStrategy, start_method="fork")
served = partial(ParameterServerStrategy, start_method="fork")
DEALT = {"ddp": balanced, "servers": served, "a node's servers": partial(served, combine_per_node=True)}


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulated", "samples"),
    [
        # Of the last two samples, each of which is accumulated alone, two ranks have none.
        ("ddp", 3, 2, 58),
        ("servers", 3, 2, 58),
        ("a node's servers", 2, 1, None),
    ],
)
def test_any_batch_under_shares_that_change_trains_one_process_s_weights(strategy, ranks, accumulated, samples):
    seed = torch.initial_seed() % 1000
    samples = samples or random.Random(seed).randint(ranks * accumulated, 130)
    print(f"seed {seed}, global batches of {samples}")
    given = {"data": {"global_batch_size": samples}, "max_epochs": 1}
    one = train("one", **given)
    dealt = train(
        "dealt",
        DEALT[strategy](shares=[random.Random(seed).uniform(0.1, 4) for _ in range(ranks)]),
        ranks,
        callbacks=[DealAtRandom(seed)],
        accumulate_grad_batches=accumulated,
        **given,
    )
    assert_same_run(dealt, one, 1e-12)


class Weighted(ImageClassifier):
    """Rare classes count more."""

    def loss(self, outputs, targets):
        return functional.cross_entropy(outputs, targets, self.weights(targets))

    def loss_weight(self, targets):
        return self.weights(targets)[targets].sum()

    def weights(self, targets):
        return torch.arange(1.0, 11, dtype=torch.float64, device=targets.device)


class PlainDigits(Digits):
    """Its training loader is torch's own."""

    def train_dataloader(self):
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        source = self.train_source
        images = torch.stack([self.train_transform(image[None])[0] for image in source.images])
        dataset = TensorDataset(images, source.targets)
        sampler = DistributedSampler(dataset, seed=5, **ranks)
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 60 // ranks["num_replicas"], drop_last=False))


def test_a_loader_of_the_user_is_dealt_by_shares_too(monkeypatch):
    """Of its sampler's order, without what this repeats, by weights of classes; and a run goes on within an epoch."""
    monkeypatch.setattr(digit_runs, "Digits", PlainDigits)
    monkeypatch.setattr(digit_runs, "ImageClassifier", Weighted)
    # Lightning loads a checkpoint into the network as it was made, and makes it float64 afterwards.
    data = {"batch_size": 20, "global_batch_size": None}
    given = {"data": data, "max_epochs": 1, "limit_val_batches": 0, "network": lambda: PlainCNN().double()}
    one = train("one", **given)
    cut = [ModelCheckpoint("cut", "cut", every_n_train_steps=4), DealAtRandom(torch.initial_seed() % 1000)]
    assert_same_run(train("dealt", balanced(shares=[1, 2.5, 4]), 3, callbacks=cut, **given), one)
    rest = {"ckpt_path": Path("cut/cut.ckpt").resolve(), **given}
    assert_same_run(train("gone on", balanced(shares=[1, 2.5, 4]), 3, **rest), one)


class Pairs(Digits):
    """Of two loaders, the shorter of which begins again within an epoch."""

    def train_dataloader(self):
        rows = TensorDataset(torch.zeros(24, 1, 8, 8), torch.zeros(24, dtype=torch.int64))
        return [DataLoader(rows, 4), DataLoader(rows, 2)]


def test_several_loaders_are_refused(monkeypatch):
    monkeypatch.setattr(digit_runs, "Digits", Pairs)
    with pytest.raises(AssertionError, match="several loaders"):
        train("dealt", balanced(), 2, max_epochs=1)


class StepsItself(ImageClassifier):
    """With a loss whose backward needs its value."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        images, targets = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.network(images), targets).log().exp())
        optimizer.step()


def test_samples_count_alike_in_manual_optimization(monkeypatch):
    monkeypatch.setattr(digit_runs, "ImageClassifier", StepsItself)
    given = {"data": {"global_batch_size": 61}, "max_epochs": 1}
    assert_same_run(train("dealt", balanced(shares=[3, 1]), 2, **given), train("one", **given))


@pytest.mark.parametrize("strategy", ["ddp", "servers"])
def test_a_slow_rank_loses_work_and_gets_it_back(tmp_path, strategy):
    """Within twelve steps; and a run that goes on in mid-epoch deals from the very batch on as one that was not cut."""
    # Lightning loads a checkpoint into the network as it was made, and makes it float64 afterwards.
    data = {"global_batch_size": 20, "num_workers": 1}  # which loads ahead
    given = {"data": data, "max_epochs": 2, "limit_train_batches": 12, "limit_val_batches": 0}
    given["network"] = lambda: PlainCNN().double()

    def run(name, *more, **options):
        slow = SlowRank(tmp_path, lambda step: step < 12)
        trained = train(name, DEALT[strategy](shares="auto"), 2, callbacks=[slow, *more], **{**given, **options})
        return trained, json.loads((tmp_path / "dealt-1.json").read_text())

    whole, dealt = run("whole", ModelCheckpoint("cut", "cut", every_n_train_steps=13))
    assert dealt[0] == 10
    assert 2 <= dealt[11] <= 6, dealt
    told = [row for row in logged("whole") if "shares/rank_1" in row]
    assert told[0]["shares/rank_1"] < 10
    assert told[0]["shares/predicted_gain"] > 0.03
    assert any(row["shares/gain"] > 0.03 for row in logged("whole") if "shares/gain" in row)
    assert dealt[-2] >= 8, dealt
    assert_same_run(whole, train("one", **given))
    gone_on, rest = run("gone on", ckpt_path=Path("cut/cut.ckpt").resolve())
    assert rest[0] == dealt[13] < 10
    assert_same_run(gone_on, whole)


def test_no_rank_is_dealt_more_than_fits_into_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(balancing, "fitting", lambda held, device: 12.0)
    given = {"data": {"global_batch_size": 20}, "max_epochs": 1, "callbacks": [SlowRank(tmp_path, lambda step: True)]}
    train("dealt", balanced(shares="auto"), 2, **given)
    assert json.loads((tmp_path / "dealt-0.json").read_text())[:16:15] == [10, 12]


def test_a_slow_rank_loses_work_where_epochs_have_fewer_batches_than_lie_between_two_comparisons(tmp_path):
    slow = SlowRank(tmp_path, lambda step: True)
    train("short", balanced(shares="auto"), 2, limit_train_batches=2, max_epochs=4, callbacks=[slow])
    assert json.loads((tmp_path / "dealt-1.json").read_text())[-1] < 16


def test_shares_that_cannot_be_are_refused_before_processes():
    for refused, said in (
        ({"shares": [3, 0]}, r"shares=\[3, 0\]: set a share above 0 for each rank"),
        ({"shares": "best"}, "shares='best': use auto, equal or a list"),
        ({"max_samples": 0}, "max_samples=0: a rank needs at least 1 sample"),
        (
            {"shares": [3, 1], "initial_shares": [3, 1]},
            r"initial_shares=\[3, 1\] has no effect with shares=\[3, 1\]",
        ),
        ({"ddp_comm_hook": print}, "ddp_comm_hook: this strategy brings its own hook"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            BalancedDDPStrategy(**refused)
    with pytest.raises(ConfigurationError, match=r"shares=\[3, 1\] has 2 entries, but there are 3 processes"):
        quiet_trainer(BalancedDDPStrategy([3, 1]), 3).strategy.launcher.launch(print)
    with pytest.raises(ConfigurationError, match=r"shares=\[3, 1\] are for mode: sync, not mode: local"):
        ParameterServerStrategy("local", shares=[3, 1])
    with pytest.raises(ConfigurationError, match=r"initial_shares=\[3, 1\] has no effect with shares=equal"):
        ParameterServerStrategy(initial_shares=[3, 1])
    with pytest.raises(ConfigurationError, match=r"shares=\[3, 1\] has 2 entries, but there are 3 processes"):
        quiet_trainer(ParameterServerStrategy(shares=[3, 1]), 3).fit(ImageClassifier(PlainCNN(), 10), Digits())
