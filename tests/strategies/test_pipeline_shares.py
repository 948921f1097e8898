"""Whatever the shares of a pipeline's replicas, the weights are those of one process."""

import random
from pathlib import Path

import digit_runs
import pytest
import torch
from conftest import PlainCNN
from digit_runs import assert_same_run, logged, train
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from test_balanced import PlainDigits

from cnnstrategies.data.sampling import dealt
from cnnstrategies.strategies import HybridPipelineStrategy


def piped(shares, replicas=(3, 1), microbatches=9):
    return HybridPipelineStrategy(
        replicas=list(replicas), cuts=["2"], microbatches=microbatches, shares=shares, start_method="fork"
    )


def drawn(count):
    """By which no replica of a stage is without one of nine microbatches."""
    rng = random.Random(torch.initial_seed())
    return [rng.uniform(0.4, 3) for _ in range(count)]


@pytest.mark.parametrize(("replicas", "samples", "accumulated"), [((3, 1), 64, 1), ((2, 1), 37, 3), ((3, 1), 29, 1)])
def test_any_batch_under_any_shares_trains_one_process_s_weights(replicas, samples, accumulated):
    """Of 350 images the last batch has, of 29, two: one of three replicas has none."""
    given = {"data": {"global_batch_size": samples}, "max_epochs": 1}
    one = train("one", **given)
    strategy = piped(drawn(sum(replicas)), replicas)
    assert_same_run(train("dealt", strategy, sum(replicas), accumulate_grad_batches=accumulated, **given), one, 1e-12)
    validated = [[row["val_loss"] for row in logged(name) if "val_loss" in row] for name in ("dealt", "one")]
    assert validated[0] == pytest.approx(validated[1], rel=1e-6)
    assert validated[0]


def test_a_run_stops_and_goes_on_under_other_shares():
    # Lightning loads a checkpoint into the network as it was made, and makes it float64 afterwards.
    given = {"data": {"global_batch_size": 20}, "max_epochs": 2, "network": lambda: PlainCNN().double()}
    saved = ModelCheckpoint("cut", "cut", every_n_train_steps=7)
    train("cut", piped([3, 1, 2], (1, 2)), 3, callbacks=[saved], max_steps=7, **given)
    gone_on = train("gone on", piped([1, 1, 3, 1], (3, 1)), 4, ckpt_path=Path("cut/cut.ckpt").resolve(), **given)
    assert_same_run(gone_on, train("one", **given))


class Deals(Callback):
    """Sees that samples are dealt as microbatches are, of which replicas with shares 3 and 1 run 7 and 2 of 9."""

    def on_train_start(self, trainer, pl_module):
        assert dealt(trainer).counts(0) == (47, 13)
        assert ("shares", "of the microbatches: [3, 1, 1], rank by rank") in trainer.strategy.describe(None)


def test_a_loader_of_the_user_is_dealt_by_shares_too(monkeypatch):
    monkeypatch.setattr(digit_runs, "Digits", PlainDigits)
    given = {"data": {"batch_size": 20, "global_batch_size": None}, "max_epochs": 1}
    assert_same_run(train("dealt", piped([3, 1, 1], (2, 1)), 3, callbacks=[Deals()], **given), train("one", **given))
