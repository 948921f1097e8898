"""Tests of networks that `configure_model` builds: each rank holds only its own stage, and values equal one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart, run_ranks


class Network(nn.Sequential):
    """A network of three stages that branches on a shape, which needs no values."""

    def __init__(self, norm: bool) -> None:
        middle = nn.BatchNorm2d(40) if norm else nn.Identity()
        super().__init__(nn.Conv2d(1, 40, 3), middle, nn.Tanh(), nn.Conv2d(40, 4, 3), nn.Tanh(), nn.Linear(16, 3))
        nn.init.trunc_normal_(self[0].weight, std=0.3)
        nn.init.trunc_normal_(self[3].weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:5]:
            x = layer(x)
        if x.shape[-1] < 2:
            raise ValueError("the images are too small")
        return self[5](x.flatten(1))


class Module(LightningModule):
    """A user's module that builds its network in `configure_model`."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.network: nn.Module | None = None

    def configure_model(self) -> None:
        if self.network is None:
            self.network = self.build()

    def build(self) -> nn.Module:
        return Network(self.norm)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class OnMeta(Module):
    def build(self) -> nn.Module:
        with torch.device("meta"):
            return super().build()


class OnMetaAtOnce(OnMeta):
    def __init__(self) -> None:
        super().__init__()
        self.configure_model()


class AnotherEachTime(Module):
    count = 0

    def build(self) -> nn.Module:
        type(self).count += 1
        return nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(type(self).count + 3)))


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 1, 6, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(images, torch.randint(3, (32,), generator=generator)), 16)


def trainer_of(replicas: list[int], epochs: int, name: str, **options: Any) -> Trainer:
    strategy: Any = "auto"
    if dist.is_initialized():  # The ranks have the environment of a cluster's launcher.
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(sum(replicas))}
    if replicas:
        unequal = {"microbatches": replicas[0] ** 2, "shares": [3, *[1] * (sum(replicas) - 1)]}
        options = {"cuts": ["1", "3"][: len(replicas) - 1], **unequal, **options}
        strategy = HybridPipelineStrategy(replicas=replicas, **options)
    return quiet_trainer(
        strategy,
        sum(replicas) or 1,
        max_epochs=epochs,
        precision="64-true",
        callbacks=[ModelCheckpoint(dirpath=name, filename="last", enable_version_counter=False)],
        enable_checkpointing=True,
        use_distributed_sampler=False,
    )


def fit(
    replicas: list[int], epochs: int, norm: bool, name: str, resume: str | None = None
) -> tuple[Any, Any, set[str]]:
    """Fit, then validate the last checkpoint.

    Returns:
        The metrics of fit, the loss of the validation, and the names of the parameters that this rank holds.
    """
    module, trainer = Module(norm), trainer_of(replicas, epochs, name)
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    held = {name for name, parameter in module.named_parameters() if not parameter.is_meta}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (again,) = trainer.validate(module, loader(), ckpt_path=f"{name}/last.ckpt", verbose=False)
    return logged, again["val_loss"], held


def first_run(folder: Path, replicas: list[int], norm: bool) -> Any:
    torch.manual_seed(7)
    return fit(replicas, 2, norm, f"{folder}/{replicas}")


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def saved(name: str) -> dict[str, Any]:
    checkpoint = torch.load(f"{name}/last.ckpt", weights_only=True)
    states = checkpoint["optimizer_states"][0]["state"]
    return checkpoint["state_dict"] | {
        f"{index}.{key}": value for index in states for key, value in states[index].items()
    }


def test_stages_that_are_built_separately_equal_one_process(tmp_path: Path) -> None:
    expected = run_apart(first_run, tmp_path, [], True)
    ranks = run_ranks(3, first_run, tmp_path, [1, 1, 1], True)
    assert_same(saved(f"{tmp_path}/[1, 1, 1]"), saved(f"{tmp_path}/[]"))
    for logged, again, _ in ranks:
        assert_same((logged, again), expected[:2])
    held = [names for *_, names in ranks]
    assert set.union(*held) == expected[2]
    assert sum(map(len, held)) == len(expected[2]), "no two ranks hold the same parameter"


def go_on(folder: Path, replicas: list[int]) -> Any:
    return fit(replicas, 3, False, f"{folder}/on {replicas}", f"{folder}/[]/last.ckpt")


@pytest.mark.cluster  # This test takes long.
def test_replicas_resume_from_a_checkpoint_of_one_process(tmp_path: Path) -> None:
    run_apart(first_run, tmp_path, [], False)
    expected = run_apart(go_on, tmp_path, [])
    ranks = run_ranks(3, go_on, tmp_path, [2, 1])
    assert_same(saved(f"{tmp_path}/on [2, 1]"), saved(f"{tmp_path}/on []"))
    for logged, again, _ in ranks:
        assert_same((logged, again), expected[:2])
