"""Tests of unequal and changing shares of a pipeline's replicas: weights equal one process's weights."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from cnnstrategies.callbacks import Pictures
from cnnstrategies.shares.samplers import dealt
from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import PlainCNN, leave_undrawn
from tests.strategies import digit_runs
from tests.strategies.digit_runs import assert_same_run, logged, train
from tests.strategies.test_balanced import DealAtRandom, PlainDigits


def piped(shares, replicas=(3, 1), **more):
    return HybridPipelineStrategy(
        replicas=list(replicas), cuts=["2"], microbatches=9, shares=shares, start_method="fork", **more
    )


def drawn(count):
    """Return random shares that give every replica of a stage at least one of nine microbatches."""
    rng = random.Random(torch.initial_seed())
    return [rng.uniform(0.4, 3) for _ in range(count)]


@pytest.mark.parametrize(("samples", "accumulated"), [(58, 2)])
def test_any_shares_of_replicas_train_the_weights_of_one_process(monkeypatch, samples, accumulated):
    """The last batch of 350 images has two images, accumulated one by one, so two of three replicas have no image."""
    leave_undrawn(monkeypatch)
    common = {"data": {"global_batch_size": samples}, "max_epochs": 1}
    single = train("one", callbacks=[Pictures()], **common)
    common |= {"accumulate_grad_batches": accumulated}
    common["callbacks"] = [DealAtRandom(torch.initial_seed() % 1000), Pictures()]
    assert_same_run(train("dealt", piped(drawn(4)), 4, **common), single, 1e-12)
    validated = [[row["val_loss"] for row in logged(name) if "val_loss" in row] for name in ("dealt", "one")]
    assert validated[0] == pytest.approx(validated[1], rel=1e-6)
    assert validated[0]
    for table in ("val_classes.csv", "val_mistakes.csv"):
        counted = [Path(name, "pictures", table).read_text() for name in ("dealt", "one")]
        assert counted[0] == counted[1]
        assert len(counted[0].splitlines()) > 10


@pytest.mark.cluster  # This test takes long.
def test_a_run_resumes_under_different_shares_and_replicas():
    # Lightning loads a checkpoint before it converts the network to float64, so the network must be in float64 already.
    common = {"data": {"global_batch_size": 50}, "max_epochs": 2, "limit_val_batches": 0}
    common["limit_train_batches"] = 5
    common["network"] = lambda: PlainCNN().double()
    saved = ModelCheckpoint("cut", "cut", every_n_train_steps=4)
    dealt = DealAtRandom(torch.initial_seed() % 1000)
    train("cut", piped([3, 1, 2], (1, 2)), 3, callbacks=[saved, dealt], max_steps=4, **common)
    last = {"ckpt_path": Path("cut/cut.ckpt").resolve(), "callbacks": [dealt]}
    gone_on = train("gone on", piped([1, 1, 3, 1], (3, 1)), 4, **last, **common)
    assert_same_run(gone_on, train("one", **common), 1e-12)


class Deals(Callback):
    """A callback that checks that samples are divided like microbatches.

    Replicas with shares 3 and 1 run 7 and 2 of 9 microbatches.
    """

    def __init__(self, suffix):
        self.suffix = suffix

    def on_train_start(self, trainer, pl_module):
        assert dealt(trainer).counts(0) == (47, 13)
        assert ("shares", f"of the microbatches: [3, 1, 1]{self.suffix}") in trainer.strategy.panel_rows(None)


@pytest.mark.parametrize(
    ("strategy", "suffix"),
    [
        (partial(piped, [3, 1, 1]), ", rank by rank"),
        pytest.param(
            partial(piped, "auto", initial_shares=[3, 1, 1]),
            " at first, then by each rank's own time",
            marks=pytest.mark.cluster,
        ),
    ],
)
def test_a_users_loader_is_also_divided_by_shares(monkeypatch, strategy, suffix):
    monkeypatch.setattr(digit_runs, "Digits", PlainDigits)
    common = {"data": {"batch_size": 20, "global_batch_size": None}, "max_epochs": 1, "limit_val_batches": 0}
    assert_same_run(
        train("dealt", strategy(replicas=(2, 1)), 3, callbacks=[Deals(suffix)], **common), train("one", **common)
    )
