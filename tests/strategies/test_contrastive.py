"""The documentation's MoCo: its queue and its average of the encoder are those of one device, also in checkpoints."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import ROOT, quiet_trainer
from tests.runner.ranks import run_ranks


def seed_batch(batch: Any, index: int) -> None:
    seed_everything(10 + index, verbose=False)


def fit(replicas: Sequence[int], epochs: int, begun: str | None = None) -> dict[str, Any]:
    """Train MoCo on one device, or on the ranks of a pipeline if there are replicas, and return the checkpoint.

    Each batch begins with random numbers of its own, because a loader draws numbers at another time after a checkpoint.
    """
    torch.set_default_dtype(torch.float64)
    devices, strategy = max(1, sum(replicas)), "auto"
    if replicas:
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(devices)}
        strategy = HybridPipelineStrategy(
            replicas=list(replicas), cuts=["2", "5"][3 - devices :], submodule="encoder", timeout=30.0
        )
    seed_everything(1, verbose=False)
    module: LightningModule = importlib.import_module("contrastive").MoCo(queue=20)
    module.on_train_batch_start = seed_batch
    images = torch.rand(28, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    folder = Path.cwd() / f"{len(replicas)}_{epochs}"
    saved = ModelCheckpoint(folder, "saved")
    trainer = quiet_trainer(strategy, devices, max_epochs=epochs, enable_checkpointing=True, callbacks=[saved])
    trainer.fit(module, DataLoader(TensorDataset(images, images), 8), ckpt_path=begun)
    return {"path": str(folder / "saved.ckpt"), **torch.load(folder / "saved.ckpt", weights_only=True)}


@pytest.mark.cluster
@pytest.mark.parametrize("replicas", [[1, 1], [1, 1, 1]], ids=str)
def test_moco_has_the_queue_and_the_average_of_one_device(
    replicas: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline's first epoch, resumed on one device, and one device's, resumed by the pipeline, give equal states."""
    monkeypatch.syspath_prepend(ROOT / "docs/examples")
    world = sum(replicas)
    (whole,) = run_ranks(1, fit, [], 2)
    kept = tmp_path / "kept.ckpt"
    for first, then in ((replicas, []), ([], replicas)):
        torch.save(run_ranks(world if first else 1, fit, first, 1)[0], kept)
        resumed = run_ranks(world if then else 1, fit, then, 2, str(kept))[0]
        for name, value in whole["state_dict"].items():
            # Adam divides by the size of the gradients, so rounding of a small gradient becomes larger: 2e-12 here.
            torch.testing.assert_close(resumed["state_dict"][name], value, rtol=0, atol=2e-11, msg=name)
        assert not torch.equal(resumed["state_dict"]["queue"], torch.load(kept)["state_dict"]["queue"])
