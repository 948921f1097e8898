"""A pipeline that continues from a checkpoint trains the weights of an uninterrupted run, equal in each bit."""

import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_ranks


def network(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(6, 4),
    )  # fmt: skip


def fit(folder: Path, epochs: int, resume: str | None = None, dropout: float = 0.0) -> dict[str, Tensor]:
    random.seed()  # Python does this in each forked process.
    torch.manual_seed(1)
    # The last batch of an epoch is smaller, and of another form.
    data = TensorDataset(torch.randn(44, 3, 8, 8), torch.randint(4, (44,)))
    trainer = quiet_trainer(
        HybridPipelineStrategy(replicas=[1, 1], cuts=["2"], microbatches=4),
        2,
        max_epochs=epochs,
        accumulate_grad_batches=3,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)],
        enable_checkpointing=True,
    )
    module = ImageClassifier(network(dropout), 4)
    trainer.fit(module, DataLoader(data, 8), ckpt_path=resume)
    return dict(module.state_dict())


def whole_and_continued(folder: Path) -> Any:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0"}
    whole = fit(folder / "whole", 2)
    return whole, fit(folder / "continued", 2, f"{folder}/whole/epoch=0.ckpt")


def test_continued_runs_are_equal_in_each_bit(tmp_path: Path) -> None:
    """The first steps of a run are in GPipe's order, and later steps in the order 1F1B, which must not matter."""
    for whole, continued in run_ranks(2, whole_and_continued, tmp_path):
        torch.testing.assert_close(continued, whole, rtol=0, atol=0)


def twice_with_dropout(folder: Path) -> list[dict[str, Tensor]]:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0"}
    return [fit(folder / name, 1, dropout=0.2) for name in ("first", "second")]


def test_a_network_draws_the_same_numbers_in_each_run_with_a_seed(tmp_path: Path) -> None:
    for first, second in run_ranks(2, twice_with_dropout, tmp_path):
        torch.testing.assert_close(second, first, rtol=0, atol=0)
